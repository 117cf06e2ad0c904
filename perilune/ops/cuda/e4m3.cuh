// e4m3 weights for bf16 tensor cores, by moving bits: exact, subnormals included, and no conversion instruction.
//
// A byte's exponent and mantissa, placed at the low end of a bf16's, are 2^-120 times its value. The activations that
// meet them are staged times 2^100, so that sums stay among normal floats, and a sum is multiplied by 2^20 and the
// scale of its row.
#pragma once
#include "cuda/hopper.cuh"

namespace e4m3 {

constexpr float X_SCALE = 0x1p100f, Y_SCALE = 0x1p20f;

// Four bytes, k to k + 3, as two pairs: k and k + 2, then k + 1 and k + 3. Activations are staged in that order.
__device__ __forceinline__ uint32_t even(uint32_t word) {
  return ((word << 8) & 0x80008000u) | ((word << 4) & 0x07f007f0u);
}
__device__ __forceinline__ uint32_t odd(uint32_t word) { return (word & 0x80008000u) | ((word >> 4) & 0x07f007f0u); }

// Four bytes as fp16, two and two: exact.
__device__ __forceinline__ uint2 halves(uint32_t word) {
  uint2 v;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(v.x), "=r"(v.y)
      : "r"(word));
  return v;
}

// Bytes 2 N and 2 N + 1 as bf16 of their own values.
template <int N>
__device__ __forceinline__ uint32_t pair(uint32_t word) {
  const uint32_t v = __byte_perm(word, 0, N ? 0x3424 : 0x1404), raised = (v & 0x80008000u) | ((v >> 4) & 0x07f007f0u);
  const __nv_bfloat162 unit = __float2bfloat162_rn(0x1p120f);
  const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&raised), unit);
  return *reinterpret_cast<const uint32_t*>(&value);
}

// Four bf16 values, rounded; larger magnitudes than 448 become 448.
__device__ __forceinline__ uint32_t rounded(uint32_t first, uint32_t second) {
  const float2 a = hopper::widen(first), b = hopper::widen(second);
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(a.y), "f"(a.x));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(b.y), "f"(b.x));
  return low | static_cast<uint32_t>(high) << 16;
}

}  // namespace e4m3
