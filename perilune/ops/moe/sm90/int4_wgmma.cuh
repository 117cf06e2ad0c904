// INT4 weights as A of warpgroup products, and stores of results to shared memory.
#pragma once
#include "cuda/wgmma.cuh"

namespace {

using namespace hopper;

// A bf16 with nibble q in its low byte, and no other bit, is q 2^-133, or q 2^-129 if q is the upper nibble: the format
// is linear there. So one fma gives (q - 8) scale / SMALL, rounded once. SMALL is a power of two that keeps the factors
// within the format; the sums of products are multiplied by it at the end.
constexpr float SMALL = 0x1p48f;

struct Scale {
  uint32_t lower, upper, offset;  // factors of lower and of upper nibbles; -8 scale / SMALL
  __device__ __forceinline__ explicit Scale(uint32_t pair) {
    asm("mul.rn.bf16x2 %0, %3, %4; mul.rn.bf16x2 %1, %3, %5; mul.rn.bf16x2 %2, %3, %6;"
        : "=r"(lower), "=r"(upper), "=r"(offset)
        : "r"(pair), "r"(0x6a006a00), "r"(0x68006800), "r"(0xa900a900));  // 2^85, 2^81, -2^-45
  }
};

template <int mask>
__device__ __forceinline__ uint32_t dequantize(uint32_t word, uint32_t factor, uint32_t offset) {
  uint32_t v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(word & mask), "r"(factor), "r"(offset));
  return v;
}

// A for 4 steps of 16 k, from two words of each of the thread's two rows.
__device__ __forceinline__ void unpack(uint32_t (&a)[16], const uint32_t* low, const uint32_t* high, const Scale& ls,
                                       const Scale& hs) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const uint32_t l = low[s / 2] >> 8 * (s % 2), h = high[s / 2] >> 8 * (s % 2);
    a[4 * s] = dequantize<0x000f000f>(l, ls.lower, ls.offset);
    a[4 * s + 1] = dequantize<0x000f000f>(h, hs.lower, hs.offset);
    a[4 * s + 2] = dequantize<0x00f000f0>(l, ls.upper, ls.offset);
    a[4 * s + 3] = dequantize<0x00f000f0>(h, hs.upper, hs.offset);
  }
}

__device__ __forceinline__ void store_transposed(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_transposed(void* row, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(shared_address(row)), "r"(a),
               "r"(b)
               : "memory");
}

}  // namespace
