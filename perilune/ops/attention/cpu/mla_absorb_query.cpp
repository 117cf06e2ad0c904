// mla_absorb_query on CPU, fp32: rmsnorm, rope, per_head_matmul. Contract in mla_absorb_query.py.
#include "cpp/per_head.h"
#include "cpp/norm.h"

namespace {

INLINE void rotate(const float* from, const float* cosines, const float* sines, float* to, int64_t r) {
  for (int64_t i = 0; i < r / 2; i++) {
    const float even = from[2 * i], odd = from[2 * i + 1];
    to[2 * i] = even * cosines[i] - odd * sines[i];
    to[2 * i + 1] = odd * cosines[i] + even * sines[i];
  }
}

// Rounds to the nearest bf16, ties to even; NaN stays NaN.
INLINE bf16 narrow(float x) {
  const uint32_t b = bits<uint32_t>(x);
  return x != x ? bf16(b >> 16 | 0x40) : bf16((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

INLINE void put(float* to, const float* from, int64_t n) { memcpy(to, from, n * sizeof(float)); }
INLINE void put(bf16* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = narrow(from[i]);
}

template <class C>
int run(const float* q, const float* ckv, int64_t ld, const float* kv_norm, const float* cosines, const float* sines,
        const float* w_uk, C* cache, int64_t rows, const int64_t* slots, float* out, int64_t T, int64_t H, int64_t n,
        int64_t R, int64_t r, int64_t threads, float eps) {
  const int64_t width = R + r, half = r / 2;
  for (int64_t t = 0; t < T; t++)
    if (slots[t] >= rows) return 1;
  const Scratch row(width);
  for (int64_t t = 0; t < T; t++) {
    const float *c = cosines + t * half, *s = sines + t * half;
    if (slots[t] >= 0) {
      normed(ckv + t * ld, kv_norm, row.data, R, eps);
      rotate(ckv + t * ld + R, c, s, row.data + R, r);
      put(cache + slots[t] * width, row.data, width);
    }
    for (int64_t h = t * H; h < (t + 1) * H; h++) rotate(q + h * (n + r) + n, c, s, out + h * width + R, r);
  }
  heads_matmul(q, H * (n + r), n + r, w_uk, out, width, T, H, n, R, threads);
  return 0;
}

}  // namespace

API mla_query_f32(const float* q, const float* ckv, int64_t ld, const float* kv_norm, const float* cosines,
                  const float* sines, const float* w_uk, float* cache, int64_t rows, const int64_t* slots, float* out,
                  int64_t T, int64_t H, int64_t n, int64_t R, int64_t r, int64_t threads, float eps) {
  return run(q, ckv, ld, kv_norm, cosines, sines, w_uk, cache, rows, slots, out, T, H, n, R, r, threads, eps);
}

API mla_query_bf16(const float* q, const float* ckv, int64_t ld, const float* kv_norm, const float* cosines,
                   const float* sines, const float* w_uk, bf16* cache, int64_t rows, const int64_t* slots, float* out,
                   int64_t T, int64_t H, int64_t n, int64_t R, int64_t r, int64_t threads, float eps) {
  return run(q, ckv, ld, kv_norm, cosines, sines, w_uk, cache, rows, slots, out, T, H, n, R, r, threads, eps);
}
