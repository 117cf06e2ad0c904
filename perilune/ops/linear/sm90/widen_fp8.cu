// e4m3 in bf16, which holds it exactly. Contract in widen_fp8.py.
//
// A lane reads 8 bytes and writes 16, so that a warp's store fills whole lines. If it read 16 bytes, each of its two
// stores would fill only half of every sector.
#include "cuda/e4m3.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256, EACH = 4;  // EACH: pieces of 8 values of a thread, all read before the first is written

__device__ __forceinline__ uint32_t paired(uint32_t halves) {
  const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return narrow(v.x, v.y);
}

__global__ void __launch_bounds__(THREADS) widen_fp8_kernel(const uint2* w, uint4* y, int64_t pieces) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (EACH * THREADS) + threadIdx.x;
  let_successor_start();
  uint2 value[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (first + i * THREADS < pieces) value[i] = __ldcs(w + first + i * THREADS);  // a step reads weights once
  }
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (first + i * THREADS >= pieces) break;
    // Through fp16, to which the hardware converts e4m3, also exactly; NaN stays NaN.
    const uint2 low = e4m3::halves(value[i].x), high = e4m3::halves(value[i].y);
    y[first + i * THREADS] = make_uint4(paired(low.x), paired(low.y), paired(high.x), paired(high.y));
  }
}

}  // namespace

// w: `values` of e4m3, a multiple of 8, at a multiple of 8 bytes; y as many bf16, at a multiple of 16 bytes.
API int widen_fp8(const void* w, void* y, int64_t values, void* stream) {
  const int64_t pieces = values / 8;
  if (pieces == 0) return 0;
  return launch(widen_fp8_kernel, dim3((pieces + EACH * THREADS - 1) / (EACH * THREADS)), dim3(THREADS), 0, stream, 1,
                static_cast<const uint2*>(w), static_cast<uint4*>(y), pieces);
}
