// rope on CPU, fp32: interleaved pairs in, interleaved pairs out.
#include "cpp/vec.h"

API rope(const float* x, int64_t token_stride, int64_t head_stride, const float* cosines, const float* sines, float* y,
         int64_t T, int64_t H, int64_t r, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * H * r > (1 << 18))
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h++) {
      const float* from = x + t * token_stride + h * head_stride;
      float* to = y + (t * H + h) * r;
      for (int64_t i = 0; i < r / 2; i++) {
        const float c = cosines[t * (r / 2) + i], s = sines[t * (r / 2) + i];
        const float even = from[2 * i], odd = from[2 * i + 1];
        to[2 * i] = even * c - odd * s;
        to[2 * i + 1] = odd * c + even * s;
      }
    }
  return 0;
}
