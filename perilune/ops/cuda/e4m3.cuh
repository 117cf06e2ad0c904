// Converts e4m3 weights to bf16 for the tensor cores by moving bits: exact, subnormals included.
//
// e4m3 exponent and mantissa, moved to the low bits of bf16's exponent and the high bits of its mantissa, give 2^-120
// times the value. Activations are multiplied by 2^100 (X_SCALE) when they are staged, so that sums are normal floats.
// A sum is multiplied by 2^20 (Y_SCALE) and by the scale of its row.
#pragma once
#include "cuda/hopper.cuh"

namespace e4m3 {

constexpr float X_SCALE = 0x1p100f, Y_SCALE = 0x1p20f;

// Of four bytes k .. k + 3, `even` converts k and k + 2, `odd` k + 1 and k + 3. Activations are staged in that order.
__device__ __forceinline__ uint32_t even(uint32_t word) {
  return ((word << 8) & 0x80008000u) | ((word << 4) & 0x07f007f0u);
}
__device__ __forceinline__ uint32_t odd(uint32_t word) { return (word & 0x80008000u) | ((word >> 4) & 0x07f007f0u); }

// Four bytes as two pairs of fp16, in order. Exact.
__device__ __forceinline__ uint2 halves(uint32_t word) {
  uint2 v;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(v.x), "=r"(v.y)
      : "r"(word));
  return v;
}

// Bytes 2 N and 2 N + 1 as bf16 of their own values, not scaled.
template <int N>
__device__ __forceinline__ uint32_t pair(uint32_t word) {
  const uint32_t v = __byte_perm(word, 0, N ? 0x3424 : 0x1404), raised = (v & 0x80008000u) | ((v >> 4) & 0x07f007f0u);
  const __nv_bfloat162 unit = __float2bfloat162_rn(0x1p120f);
  const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&raised), unit);
  return *reinterpret_cast<const uint32_t*>(&value);
}

// Four bf16 values rounded to e4m3; magnitudes above 448 become 448.
__device__ __forceinline__ uint32_t rounded(uint32_t first, uint32_t second) {
  const float2 a = hopper::widen(first), b = hopper::widen(second);
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(a.y), "f"(a.x));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(b.y), "f"(b.x));
  return low | static_cast<uint32_t>(high) << 16;
}

}  // namespace e4m3
