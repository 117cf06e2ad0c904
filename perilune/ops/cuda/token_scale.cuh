// Quantizes bf16 rows to e4m3 with a scale per group of 128 values: contract in linear/quantize_tokens.py. Half a warp
// (16 lanes, 8 values each) holds a group; all 32 lanes must call together.
#pragma once
#include "cuda/hopper.cuh"

namespace token_scale {

constexpr float LARGEST = 448.0f, LEAST = 1e-30f;  // e4m3's largest value; minimum of `top`, unless 0

// The magnitudes of two bf16.
__device__ __forceinline__ __nv_bfloat162 magnitude(uint32_t pair) {
  return __habs2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

// The largest magnitude in the lane's group; NaN if a value is NaN. All lanes of the warp call it.
__device__ __forceinline__ __nv_bfloat16 largest(const uint4& value) {
  const __nv_bfloat162 most = __hmax2_nan(__hmax2_nan(magnitude(value.x), magnitude(value.y)),
                                          __hmax2_nan(magnitude(value.z), magnitude(value.w)));
  __nv_bfloat16 largest = __hmax_nan(most.x, most.y);
#pragma unroll
  for (int lane = 8; lane; lane >>= 1) largest = __hmax_nan(largest, __shfl_xor_sync(~0u, largest, lane));
  return largest;
}

// The magnitude that the group's scale maps to 448.
__device__ __forceinline__ float top(__nv_bfloat16 largest) {
  const float top = __bfloat162float(largest);
  return top > 0.0f && top < LEAST ? LEAST : top;
}

__device__ __forceinline__ float scale(float top) { return top == 0.0f ? 1.0f : top / LARGEST; }

__device__ __forceinline__ uint32_t e4m3(uint32_t first, uint32_t second, float factor) {
  const float2 a = hopper::widen(first), b = hopper::widen(second);
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(a.y * factor), "f"(a.x * factor));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(b.y * factor), "f"(b.x * factor));
  return low | static_cast<uint32_t>(high) << 16;
}

// The lane's 8 values as e4m3. top: of their group.
__device__ __forceinline__ uint2 rounded(const uint4& value, float top) {
  const float factor = top == 0.0f ? 1.0f : 1.0f / top * LARGEST;  // rounds as torch's division does
  return make_uint2(e4m3(value.x, value.y, factor), e4m3(value.z, value.w, factor));
}

}  // namespace token_scale
