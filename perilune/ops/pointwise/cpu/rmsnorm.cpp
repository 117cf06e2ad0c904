// rmsnorm, add_rmsnorm and embed_norm on CPU, fp32. D is a multiple of 8.
#include "cpp/norm.h"

// Min T * D to split rows over OpenMP's threads, the ones that torch's products of long prompts use too.
constexpr int64_t WORTH = 1 << 18;

API rmsnorm(const float* x, int64_t ldx, const float* w, float* y, int64_t T, int64_t D, int64_t threads, float eps) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * D > WORTH)
  for (int64_t t = 0; t < T; t++) normed(x + t * ldx, w, y + t * D, D, eps);
  return 0;
}

API add_rmsnorm(float* residual, const float* x, const float* w, float* y, int64_t T, int64_t D, int64_t threads,
                float eps) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * D > WORTH)
  for (int64_t t = 0; t < T; t++) {
    float* const row = residual + t * D;
    for (int64_t k = 0; k < D; k += 8) store(row + k, load(row + k) + load(x + t * D + k));
    normed(row, w, y + t * D, D, eps);
  }
  return 0;
}

API embed_norm(const int64_t* ids, const int64_t* rows, const int64_t* last, int64_t slots, const int64_t* positions,
               const float* table, const float* w, const float* cosines, const float* sines, float* h, float* x,
               float* cos_rows, float* sin_rows, int64_t T, int64_t V, int64_t D, int64_t P, int64_t r, int64_t pending,
               float eps) {
  for (int64_t t = 0; t < T; t++) {
    int64_t token = ids[t];
    if (token == pending && rows != nullptr) {
      if (rows[t] < 0 || rows[t] >= slots) return 1;
      token = last[rows[t]];
    }
    if (token < 0 || token >= V || positions[t] < 0 || positions[t] >= P) return 1;
    memcpy(h + t * D, table + token * D, D * sizeof(float));
    normed(h + t * D, w, x + t * D, D, eps);
    memcpy(cos_rows + t * r, cosines + positions[t] * r, r * sizeof(float));
    memcpy(sin_rows + t * r, sines + positions[t] * r, r * sizeof(float));
  }
  return 0;
}
