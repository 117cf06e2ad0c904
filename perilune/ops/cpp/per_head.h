// y[t, h] = x[t, h] W[h] on CPU for few tokens: each weight is read once for up to three of them, by strips of columns.
#pragma once
#include "cpp/gemm.h"

template <int N, int V, class T>
INLINE void columns(const float* x, int64_t stride, const T* w, float* y, int64_t ldy, int64_t a, int64_t b) {
  f8 acc[N][V] = {};
  for (int64_t k = 0; k < a; k++) {
#pragma GCC unroll 8
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
INLINE void strip(const float* x, int64_t stride, const T* w, float* y, int64_t ldy, int64_t a, int64_t b,
                  int64_t wide) {
  int64_t c = 0;
  if constexpr (N == 1)
    for (; c + 64 <= wide; c += 64) columns<N, 8>(x, stride, w + c, y + c, ldy, a, b);
  for (; c + 32 <= wide; c += 32) columns<N, 4>(x, stride, w + c, y + c, ldy, a, b);
  for (; c < wide; c += 8) columns<N, 1>(x, stride, w + c, y + c, ldy, a, b);
}

// x's tokens and heads have the given strides, y's heads `ldy`.
template <class T>
INLINE void heads_matmul(const float* x, int64_t token_stride, int64_t head_stride, const T* w, float* y, int64_t ldy,
                         int64_t tokens, int64_t H, int64_t a, int64_t b, int64_t threads) {
  const int64_t width = b < 256 ? 32 : 64, tiles = (b + width - 1) / width;
  share(H * tiles, tokens * H * a * b > PARALLEL ? threads : 1, [&](int64_t piece, int) {
    const int64_t h = piece / tiles, c = piece % tiles * width, wide = b - c < width ? b - c : width;
    for (int64_t t = 0; t < tokens; t += 3) {
      const float* from = x + t * token_stride + h * head_stride;
      const T* weights = w + h * a * b + c;
      float* to = y + (t * H + h) * ldy + c;
      const int64_t n = tokens - t;
      if (n >= 3)
        strip<3>(from, token_stride, weights, to, H * ldy, a, b, wide);
      else if (n == 2)
        strip<2>(from, token_stride, weights, to, H * ldy, a, b, wide);
      else
        strip<1>(from, token_stride, weights, to, H * ldy, a, b, wide);
    }
  });
}
