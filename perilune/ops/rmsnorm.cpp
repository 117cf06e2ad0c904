// rmsnorm and add_rmsnorm on CPU, fp32. D is a multiple of 8.
#include "vec.h"

namespace {

INLINE void normed(const float* x, const float* w, float* y, int64_t D, float eps) {
  f8 squares = {};
  for (int64_t k = 0; k < D; k += 8) squares += load(x + k) * load(x + k);
  const float factor = 1.0f / sqrtf(sum(squares) / float(D) + eps);
  for (int64_t k = 0; k < D; k += 8) store(y + k, load(x + k) * factor * load(w + k));
}

constexpr int64_t PARALLEL = 1 << 18;

}  // namespace

API rmsnorm(const float* x, int64_t ldx, const float* w, float* y, int64_t T, int64_t D, int64_t threads, float eps) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * D > PARALLEL)
  for (int64_t t = 0; t < T; t++) normed(x + t * ldx, w, y + t * D, D, eps);
  return 0;
}

API add_rmsnorm(float* residual, const float* x, const float* w, float* y, int64_t T, int64_t D, int64_t threads,
                float eps) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * D > PARALLEL)
  for (int64_t t = 0; t < T; t++) {
    float* const row = residual + t * D;
    for (int64_t k = 0; k < D; k += 8) store(row + k, load(row + k) + load(x + t * D + k));
    normed(row, w, y + t * D, D, eps);
  }
  return 0;
}
