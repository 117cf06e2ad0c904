// per_head_matmul on CPU; the arithmetic is in per_head.h.
#include "cpp/per_head.h"

API head_matmul_f32(const float* x, int64_t token_stride, int64_t head_stride, const float* w, float* y, int64_t T,
                    int64_t H, int64_t a, int64_t b, int64_t threads) {
  heads_matmul(x, token_stride, head_stride, w, y, b, T, H, a, b, threads);
  return 0;
}

API head_matmul_bf16(const float* x, int64_t token_stride, int64_t head_stride, const bf16* w, float* y, int64_t T,
                     int64_t H, int64_t a, int64_t b, int64_t threads) {
  heads_matmul(x, token_stride, head_stride, w, y, b, T, H, a, b, threads);
  return 0;
}
