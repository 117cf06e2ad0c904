// INT4 weights and bf16 activations as tensor-core operands, for moe_int4_mma_tma.cu. moe_int4_t1.cu uses `raised` and
// `values` for the shared expert.
//
// A nibble needs no conversion instruction: masked out of its word and read as a (subnormal) bf16, it is q * 2^-133, or
// 16 q * 2^-133 if it is four bits higher. Activations for the latter are divided by 16, and all are multiplied by
// 2^80: exact for magnitudes from 2^-73 to 2^47. The start value of the sum of a group of 32 k is -8 times the sum of
// its activations, because q is stored with an offset of 8.
#pragma once
#include "cuda/e4m3.cuh"
#include "cuda/tensor_map.cuh"

namespace moe {

using namespace hopper;

constexpr uint32_t LOW = 0x000f000f, HIGH = 0x00f000f0;
constexpr float RAISED = 0x1p80f;  // activations
constexpr float UNIT = 0x1p-133f;  // the nibble 1
constexpr float RESULT = 0x1p53f;  // 1 / (RAISED * UNIT)

__host__ __device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// 8 activations times RAISED, in the order of a word's nibbles; those at odd places times `high` instead.
__device__ __forceinline__ uint4 raised(uint4 v, float high) {
  const float2 x01 = widen(v.x), x23 = widen(v.y), x45 = widen(v.z), x67 = widen(v.w);
  return make_uint4(narrow(x01.x * RAISED, x45.x * RAISED), narrow(x23.x * RAISED, x67.x * RAISED),
                    narrow(x01.y * high, x45.y * high), narrow(x23.y * high, x67.y * high));
}
__device__ __forceinline__ float total(uint4 v) {
  const float2 x01 = widen(v.x), x23 = widen(v.y), x45 = widen(v.z), x67 = widen(v.w);
  return ((x01.x + x01.y) + (x23.x + x23.y)) + ((x45.x + x45.y) + (x67.x + x67.y));
}

// A's registers for the words of nibbles v in row g and z in row g + 8.
__device__ __forceinline__ void nibbles(uint32_t v, uint32_t z, uint32_t (&low)[4], uint32_t (&high)[4]) {
  const uint32_t v8 = v >> 8, z8 = z >> 8;
  low[0] = v & LOW, low[1] = z & LOW, low[2] = v8 & LOW, low[3] = z8 & LOW;
  high[0] = v & HIGH, high[1] = z & HIGH, high[2] = v8 & HIGH, high[3] = z8 & HIGH;
}

// A's registers for 8 values in rows g and g + 8, in the same order: 16 bytes of bf16, or half e of 16 bytes of e4m3.
template <bool FP8>
__device__ __forceinline__ void values(uint4 top, uint4 bottom, int e, uint32_t (&low)[4], uint32_t (&high)[4]) {
  if constexpr (FP8) {
    const uint32_t p = e ? top.z : top.x, q = e ? top.w : top.y;
    const uint32_t r = e ? bottom.z : bottom.x, s = e ? bottom.w : bottom.y;
    const uint32_t up_low = __byte_perm(p, q, 0x6420), up_high = __byte_perm(p, q, 0x7531);
    const uint32_t down_low = __byte_perm(r, s, 0x6420), down_high = __byte_perm(r, s, 0x7531);
    low[0] = e4m3::even(up_low), low[1] = e4m3::even(down_low);
    low[2] = e4m3::odd(up_low), low[3] = e4m3::odd(down_low);
    high[0] = e4m3::even(up_high), high[1] = e4m3::even(down_high);
    high[2] = e4m3::odd(up_high), high[3] = e4m3::odd(down_high);
  } else {
    low[0] = __byte_perm(top.x, top.z, 0x5410), low[1] = __byte_perm(bottom.x, bottom.z, 0x5410);
    low[2] = __byte_perm(top.y, top.w, 0x5410), low[3] = __byte_perm(bottom.y, bottom.w, 0x5410);
    high[0] = __byte_perm(top.x, top.z, 0x7632), high[1] = __byte_perm(bottom.x, bottom.z, 0x7632);
    high[2] = __byte_perm(top.y, top.w, 0x7632), high[3] = __byte_perm(bottom.y, bottom.w, 0x7632);
  }
}

}  // namespace moe
