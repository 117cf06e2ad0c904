// Eight-lane vectors for the CPU kernels, in GCC's vector extension: AVX2 and FMA where -march=native has them,
// pairs of SSE or NEON registers elsewhere, from one source.
//
// A dot product is always one chain of eight lanes over ascending k, then `sum`: equal rows and vectors give the same
// bits with any blocking, so a token's result does not depend on the batch.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))
#define API extern "C" __attribute__((visibility("default"))) int

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint16_t bf16;

template <class To, class From>
INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

INLINE f8 load(const float* p) {
  f8 v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE f8 load(const bf16* p) {
  h8 v;
  memcpy(&v, p, sizeof v);
  return bits<f8>(__builtin_convertvector(v, u8) << 16);
}

INLINE void store(float* p, f8 v) { memcpy(p, &v, sizeof v); }

INLINE f8 splat(float x) { return f8{x, x, x, x, x, x, x, x}; }

INLINE float sum(f8 v) {
  f4 low, high;
  memcpy(&low, &v, sizeof low);
  memcpy(&high, reinterpret_cast<char*>(&v) + sizeof low, sizeof high);
  f4 s = low + high;
  return (s[0] + s[2]) + (s[1] + s[3]);
}

INLINE float widen(bf16 x) { return bits<float>(uint32_t(x) << 16); }
INLINE float widen(float x) { return x; }

// e^x to 2 units in the last place; 0 below -104, infinity above 88.73; nan stays nan.
INLINE f8 exp8(f8 x) {
  x = x > 89.0f ? splat(89.0f) : x;  // a comparison with nan is false and leaves it
  x = x < -104.0f ? splat(-104.0f) : x;
  const f8 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // nearest whole number
  const f8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f8 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // Two factors: 2^n alone does not fit an exponent field at either end.
  const i8 whole = __builtin_convertvector(n, i8), half = whole >> 1;
  return p * bits<f8>((half + 127) << 23) * bits<f8>((whole - half + 127) << 23);
}

INLINE f8 silu(f8 x) { return x / (1.0f + exp8(-x)); }
