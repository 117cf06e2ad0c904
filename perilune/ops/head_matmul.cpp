// head_matmul on CPU for few tokens: each weight is read once for up to three tokens, 32 columns at a time.
#include "gemm.h"

namespace {

template <int N, int V, class T>
INLINE void columns(const float* x, int64_t stride, const T* w, float* y, int64_t ldy, int64_t a, int64_t b) {
  f8 acc[N][V] = {};
  for (int64_t k = 0; k < a; k++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const f8 row = load(w + k * b + v * 8);
#pragma GCC unroll 3
      for (int t = 0; t < N; t++) acc[t][v] += splat(x[t * stride + k]) * row;
    }
  }
  for (int t = 0; t < N; t++)
    for (int v = 0; v < V; v++) store(y + t * ldy + v * 8, acc[t][v]);
}

template <int N, class T>
INLINE void tile(const float* x, int64_t stride, const T* w, float* y, int64_t ldy, int64_t a, int64_t b, int64_t wide) {
  if (wide == 32) return columns<N, 4>(x, stride, w, y, ldy, a, b);
  for (int64_t c = 0; c < wide; c += 8) columns<N, 1>(x, stride, w + c, y + c, ldy, a, b);
}

template <class T>
void run(const float* x, int64_t token_stride, int64_t head_stride, const T* w, float* y, int64_t tokens, int64_t H,
         int64_t a, int64_t b, int threads) {
  const int64_t tiles = (b + 31) / 32;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * H * a * b > PARALLEL)
  for (int64_t piece = 0; piece < H * tiles; piece++) {
    const int64_t h = piece / tiles, c = piece % tiles * 32, wide = b - c < 32 ? b - c : 32;
    for (int64_t t = 0; t < tokens; t += 3) {
      const float* from = x + t * token_stride + h * head_stride;
      const T* weights = w + h * a * b + c;
      float* to = y + (t * H + h) * b + c;
      const int64_t n = tokens - t;
      if (n >= 3)
        tile<3>(from, token_stride, weights, to, H * b, a, b, wide);
      else if (n == 2)
        tile<2>(from, token_stride, weights, to, H * b, a, b, wide);
      else
        tile<1>(from, token_stride, weights, to, H * b, a, b, wide);
    }
  }
}

}  // namespace

API head_matmul_f32(const float* x, int64_t token_stride, int64_t head_stride, const float* w, float* y, int64_t T,
                    int64_t H, int64_t a, int64_t b, int64_t threads) {
  run(x, token_stride, head_stride, w, y, T, H, a, b, threads);
  return 0;
}

API head_matmul_bf16(const float* x, int64_t token_stride, int64_t head_stride, const bf16* w, float* y, int64_t T,
                     int64_t H, int64_t a, int64_t b, int64_t threads) {
  run(x, token_stride, head_stride, w, y, T, H, a, b, threads);
  return 0;
}
