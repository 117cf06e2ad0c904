// What ranks that share out a KV cache along the sequence give for this rank's heads, weighed and multiplied by W_UV.
// Contract in mla_decode_merge.py.
//
// No activation's pointer is __restrict__: the compiler may move a load through such a one above the wait.
#include "attention/sm90/split_kv_combine.cuh"

// o [ranks][T, H, 512] bf16, `o_step` values from rank to rank; lse [ranks][T, H] float, likewise; w_uv [H, 512, 128]
// and out [T, H, 128] bf16.
API int mla_decode_merge(const void* o, int64_t o_step, const void* lse, int64_t lse_step, const void* w_uv, void* out,
                         int64_t ranks, int64_t T, int64_t H, void* stream) {
  if (T == 0) return 0;
  return mla::combine_ranges<true>(o, lse, nullptr, nullptr, w_uv, out, ranks, lse_step, T, H, o_step, stream);
}
