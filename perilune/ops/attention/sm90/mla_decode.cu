// Absorbed MLA for few tokens a request: attention split over the sequence (split_kv_range.cuh), then combined and
// multiplied by W_UV (split_kv_combine.cuh); the contract is in mla_decode.py. `share_work` (split_kv_schedule.cuh)
// gives every CTA its range from the contexts, so that one launch fits all contexts.
//
// No pointer to activations is __restrict__: the compiler may move a load through such a pointer above the PDL wait.
#include "attention/sm90/split_kv_range.cuh"
#include "attention/sm90/split_kv_combine.cuh"

using namespace mla;

namespace {

// Describes `count` rows of 64 * chunks values as [chunk][row][64]. A box has `rows` rows and all chunks, or one chunk
// if `single`. bytes: values of 1 byte, not swizzled; else bf16 with the 128-byte swizzle.
bool describe(CUtensorMap* map, const void* from, bool bytes, int64_t count, int64_t row_bytes, int chunks, int rows,
              bool single) {
  return maps::describe(map, from, bytes ? maps::BYTES : maps::SWIZZLED, {64, count, chunks},
                        {row_bytes, bytes ? 64 : 128}, {64, rows, single ? 1 : chunks});
}

bool describe_cache(Maps* maps, const void* cache, int64_t rows, bool packed) {
  const int64_t row = packed ? LATENT + ROPE * 2 : WIDTH * 2;
  const int chunks = packed ? 1 : CHUNKS;
  const void* values = packed ? static_cast<const uint8_t*>(cache) + LATENT : cache;
  return describe(&maps->few, values, false, rows, row, chunks, GROUP, true) &&
         describe(&maps->many, values, false, rows, row, chunks, KEYS, false) &&
         (!packed || (describe(&maps->few_bytes, cache, true, rows, row, CHUNKS - 1, GROUP, true) &&
                      describe(&maps->many_bytes, cache, true, rows, row, CHUNKS - 1, KEYS, false)));
}

}  // namespace

// cache [cache_rows, 576] bf16, or packed rows of 640 bytes; partials [ctas, 64, 512] bf16 and weights [64, ctas]
// float: outputs and log-sum-exps of the ranges. If w_uv is null, they are not combined. -1: no driver entry point for
// tensor maps, or the driver refuses one.
API int mla_decode(const void* q, const void* cache, int64_t cache_rows, int64_t packed, int64_t block,
                   const void* tables, int64_t M, const void* query_start, const void* context, const void* w_uv,
                   void* partials, void* weights, void* out, int64_t B, int64_t T, int64_t H, int64_t ctas,
                   int64_t least, float scale, void* stream) {
  if (T == 0) return 0;
  CUtensorMap queries;
  Maps latents{};
  if (!describe(&queries, q, false, T * H, WIDTH * 2, CHUNKS, ROWS, false) ||
      !describe_cache(&latents, cache, cache_rows, packed)) {
    return -1;
  }
  int failed = launch(packed ? attend<true> : attend<false>, dim3(ctas), dim3(ATTEND_THREADS), ATTEND_BYTES, stream, 1,
                      queries, latents, static_cast<const bf16*>(q), static_cast<const int*>(tables),
                      static_cast<const int*>(query_start), static_cast<const int*>(context),
                      static_cast<bf16*>(partials), static_cast<float*>(weights), B, M, H, block, least,
                      scale * 1.4426950408889634f);
  if (failed || w_uv == nullptr) return failed;
  return combine_ranges<false>(partials, weights, query_start, context, w_uv, out, ctas, B, T, H, least, stream);
}

// Attention of one token over `ranges` ranges (attend_few), of at most 48 positions each of a bf16 cache, or 512 of a
// packed one. Results of range i are in slot i of `slots`. tables: [M]; H: 8, 16, 32 or 64.
API int mla_attend_few(const void* q, const void* cache, int64_t cache_rows, int64_t packed, int64_t block,
                       const void* tables, int64_t M, const void* query_start, const void* context, void* partials,
                       void* weights, int64_t H, int64_t ranges, int64_t slots, float scale, void* stream) {
  CUtensorMap latents, ropes;
  const int64_t row = LATENT + ROPE * 2;
  const bool described =
      packed ? maps::describe(&latents, cache, maps::SWIZZLED_BYTES, {128, cache_rows, LATENT / 128}, {row, 128},
                              {128, GROUP, LATENT / 128}) &&
                   describe(&ropes, static_cast<const uint8_t*>(cache) + LATENT, false, cache_rows, row, 1, GROUP, false)
             : describe(&latents, cache, false, cache_rows, WIDTH * 2, CHUNKS, GROUP, false);
  if (!described) return -1;
  // Max shared-memory carve-out: on each SM, a CTA of the next kernel must fit beside this kernel's.
  auto kernel = packed ? attend_few<true> : attend_few<false>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  if (e != cudaSuccess) return static_cast<int>(e);
  return launch(kernel, dim3(static_cast<unsigned>(ranges * ceil_div(H, QUARTER))), dim3(FEW_THREADS),
                packed ? Packed::ALL : FEW_BYTES, stream, 1, latents, packed ? ropes : latents,
                static_cast<const bf16*>(q), static_cast<const int*>(tables), static_cast<const int*>(query_start),
                static_cast<const int*>(context), static_cast<bf16*>(partials), static_cast<float*>(weights), H, M,
                block, slots, scale * 1.4426950408889634f);
}
