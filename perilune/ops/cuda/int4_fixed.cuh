// INT4 weights and one token's activations as operands of the tensor cores' products of bytes, for moe_int4_t1.cu.
//
// An activation is s (256 high + low): s a power of two for each group of 32 k, `high` and `low` signed bytes. The
// greatest magnitude of a group has 14 bits, so the error is at most 2^-14 of it (of bf16: 2^-9 of each value).
//
// A holds 16 rows, and its 32 k are 8 of each of 4 groups: those of group t in lanes (g, t). Columns 2t and 2t + 1 of B
// are `high` and `low` of group t, and zero for the k of other groups. So 4 products sum 4 groups without mixing them,
// and a scale is applied to the sum of 32 products, not of 8. A nibble becomes the signed byte 16 (q - 8). Sums are
// exact.
#pragma once
#include "cuda/hopper.cuh"

namespace fixed_point {

// d[16 x 8] += a[16 x 32] b[32 x 8] of signed bytes. Lane l, g = l / 4, t = l % 4: a[0] = row g, k 4t..4t+3; a[1] = row
// g + 8, same k; a[2], a[3] = the same rows, k 16 higher; b0 = column g, k 4t..4t+3; b1 = k 16 higher; d as in `mma`.
__device__ __forceinline__ void mma_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The nibbles at odd places of a word as 4 bytes 16 (q - 8); of word << 4: those at even places. In C++ the compiler
// makes two instructions, because one takes only one constant that is not in a register.
__device__ __forceinline__ uint32_t bytes_of(uint32_t word) {
  uint32_t v;  // (word ^ 0x88888888) & 0xf0f0f0f0
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(v) : "r"(word), "r"(0x88888888), "r"(0xf0f0f0f0));
  return v;
}

// A group's activations in shared memory: 4 times 16 bytes, `high` of even values, `high` of odd ones, `low` of even
// ones, `low` of odd ones. Their order is turned, so that neither the stores of 8 groups nor loads meet in a bank.
constexpr int FIXED_GROUP = 64;
__device__ __forceinline__ int turned(int group, int quarter) { return (quarter ^ group / 2 % 4) * 16; }

// Writes 8 activations, number 8 word and following of group `group`, and by word 0 s / 16 to units[group]. Called by 4
// adjacent lanes for the same group. even, odd: the values at even and odd places, as floats times 2^RAISE; odd ones
// also divided by ODD. most: the greatest bf16 among this lane's magnitudes, times 2^RAISE.
template <int RAISE, int ODD>
__device__ __forceinline__ void put_fixed(const uint32_t (&even)[4], const uint32_t (&odd)[4], uint32_t most,
                                          uint8_t* groups, float* units, int group, int word) {
  constexpr int BITS = 13, LEAST = 18 + RAISE;  // smaller exponents have no s / 16
  constexpr float BASE = 0x1.8p23f + 128;       // the lowest bits of BASE + n, for a whole number n, are n + 128
  const unsigned quad = 0xfu << (threadIdx.x & 28);
  most = max(most, __shfl_xor_sync(quad, most, 1));
  most = max(most, __shfl_xor_sync(quad, most, 2));
  const int exponent = max(static_cast<int>(most >> 7), LEAST);
  const float scale = __uint_as_float((254 + BITS - exponent) << 23);
  const int at = group * FIXED_GROUP + turned(group, 0) + word * 4;
  const auto put = [&](const uint32_t (&values)[4], float by, int quarter) {
    uint32_t x[4];
#pragma unroll
    for (int n = 0; n < 4; n++) x[n] = __float_as_uint(fmaf(__uint_as_float(values[n]), by, BASE));
    const uint32_t first = __byte_perm(x[0], x[1], 0x5140), second = __byte_perm(x[2], x[3], 0x5140);
    const uint32_t high = __byte_perm(first, second, 0x7632), low = __byte_perm(first, second, 0x5410) ^ 0x80808080;
    *reinterpret_cast<uint32_t*>(groups + (at ^ quarter * 16)) = high;
    *reinterpret_cast<uint32_t*>(groups + (at ^ (quarter + 2) * 16)) = low;
  };
  put(even, scale, 0);
  put(odd, scale * ODD, 1);
  // Infinite and undefined values make the whole group undefined.
  if (word == 0) units[group] = __uint_as_float(most >> 7 >= 255 ? 0x7fffffff : (exponent - LEAST + 1) << 23);
}

__device__ __forceinline__ uint32_t low_float(uint32_t pair) { return pair << 16; }
__device__ __forceinline__ uint32_t high_float(uint32_t pair) { return pair & 0xffff0000; }
__device__ __forceinline__ uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fff; }

// From 8 values in memory order.
__device__ __forceinline__ void put_fixed(uint4 v, uint8_t* groups, float* units, int group, int word) {
  uint32_t most = __vmaxu2(magnitudes(v.x), magnitudes(v.y));
  most = __vmaxu2(most, __vmaxu2(magnitudes(v.z), magnitudes(v.w)));
  put_fixed<0, 1>({low_float(v.x), low_float(v.y), low_float(v.z), low_float(v.w)},
                  {high_float(v.x), high_float(v.y), high_float(v.z), high_float(v.w)}, max(most & 0xffff, most >> 16),
                  groups, units, group, word);
}

}  // namespace fixed_point
