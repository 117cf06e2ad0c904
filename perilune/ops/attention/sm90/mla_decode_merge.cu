// Merges all ranks' attention outputs over their parts of a sharded KV cache, for this rank's heads, then multiplies by
// W_UV. Contract in mla_decode_merge.py.
#include "attention/sm90/split_kv_combine.cuh"

// o [ranks][T, H, 512] bf16, ranks `o_step` values apart; lse [ranks][T, H] float, ranks `lse_step` values apart; w_uv
// [H, 512, 128] and out [T, H, 128] bf16.
API int mla_decode_merge(const void* o, int64_t o_step, const void* lse, int64_t lse_step, const void* w_uv, void* out,
                         int64_t ranks, int64_t T, int64_t H, void* stream) {
  if (T == 0) return 0;
  return mla::combine_ranges<true>(o, lse, nullptr, nullptr, w_uv, out, ranks, lse_step, T, H, o_step, stream);
}
