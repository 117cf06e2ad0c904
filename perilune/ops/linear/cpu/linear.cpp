// linear, rmsnorm_linear and linear_int4 on CPU; the arithmetic is in gemm.h.
#include "cpp/norm.h"

API linear_f32(const float* x, int64_t ldx, const float* w, float* y, int64_t T, int64_t K, int64_t o, int64_t threads) {
  matmul(Plain<float>{w, K}, x, ldx, y, T, o, threads);
  return 0;
}

API linear_bf16(const float* x, int64_t ldx, const bf16* w, float* y, int64_t T, int64_t K, int64_t o,
                int64_t threads) {
  matmul(Plain<bf16>{w, K}, x, ldx, y, T, o, threads);
  return 0;
}

API linear_int4(const float* x, int64_t ldx, const uint32_t* packed, const bf16* scale, float* y, int64_t T, int64_t K,
                int64_t o, int64_t threads) {
  matmul(Int4{packed, scale, K}, x, ldx, y, T, o, threads);
  return 0;
}

API rmsnorm_linear(const float* x, int64_t ldx, const float* norm, const float* w, float* y, int64_t T, int64_t K,
                int64_t o, int64_t threads, float eps) {
  const Scratch normal(T * K);
  for (int64_t t = 0; t < T; t++) normed(x + t * ldx, norm, normal.data + t * K, K, eps);
  matmul(Plain<float>{w, K}, normal.data, K, y, T, o, threads);
  return 0;
}
