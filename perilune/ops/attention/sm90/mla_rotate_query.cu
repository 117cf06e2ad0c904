// Before attention in the plain form: rotates queries in place and writes the step's cache rows. Contract in
// mla_rotate_query.py.
#include "attention/sm90/cache_row.cuh"

using namespace mla;

namespace {

constexpr int TOKENS = 8, THREADS = TOKENS * 32;  // a warp per token writes the cache
constexpr int PIECES = ROPE / 8;

struct Args {
  bf16* q;  // [T, H, NOPE + ROPE]
  NewRows rows;
  int H;
};

__global__ void __launch_bounds__(THREADS) rotate_kernel(const Args a) {
  const int first = blockIdx.x * TOKENS, token = first + threadIdx.x / 32;
  add_row(a.rows, token);
  let_successor_start();
  const int pieces = min(TOKENS, a.rows.T - first) * a.H * PIECES;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += THREADS) {
    const int64_t row = static_cast<int64_t>(first) * a.H + i / PIECES;
    const int angle = static_cast<int>(row / a.H) * (ROPE / 2) + i % PIECES * 4;
    uint4* at = reinterpret_cast<uint4*>(a.q + row * (NOPE + ROPE) + NOPE + i % PIECES * 8);
    const uint4 v = *at;
    const float4 c = *reinterpret_cast<const float4*>(a.rows.cos + angle);
    const float4 s = *reinterpret_cast<const float4*>(a.rows.sin + angle);
    *at = make_uint4(rotate(v.x, c.x, s.x), rotate(v.y, c.y, s.y), rotate(v.z, c.z, s.z), rotate(v.w, c.w, s.w));
  }
}

}  // namespace

API int mla_rotate_query(void* q, const void* ckv, int64_t ckv_stride, const void* kv_norm, const void* cos, const void* sin,
                   void* cache, int64_t slots, int64_t packed, const void* slot, int64_t T, int64_t H, float eps,
                   void* stream) {
  const Args a = {static_cast<bf16*>(q),
                  new_rows(ckv, ckv_stride, kv_norm, cos, sin, cache, slots, packed, slot, T, eps),
                  static_cast<int>(H)};
  if (T == 0) return 0;
  return launch(rotate_kernel, dim3((T + TOKENS - 1) / TOKENS), dim3(THREADS), 0, stream, 1, a);
}
