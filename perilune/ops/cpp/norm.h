// y = x / rms(x) * w of one row on CPU, fp32; D is a multiple of 8.
#pragma once
#include "cpp/gemm.h"

INLINE void normed(const float* x, const float* w, float* y, int64_t D, float eps) {
  f8 squares = {};
  for (int64_t k = 0; k < D; k += 8) squares += load(x + k) * load(x + k);
  const float factor = 1.0f / sqrtf(sum(squares) / float(D) + eps);
  for (int64_t k = 0; k < D; k += 8) store(y + k, load(x + k) * factor * load(w + k));
}
