// y = x W^T for rows of W in fp32, bf16 or the checkpoint's INT4, on few or many rows of x, in fp32.
//
// A tile of output rows is the unit of parallel work. For more than `SMALL` vectors, rows that are not fp32 are widened
// (dequantised) once into fp32 scratch; for fewer, in registers.
#pragma once
#include <type_traits>

#include "cpp/work_pool.h"

constexpr int64_t TILE = 16;  // output rows of one piece of work
#ifdef __AVX512VL__
constexpr int64_t SMALL = 6;  // vectors in registers at once: 4 rows times 6 sums, of 32 registers
#else
constexpr int64_t SMALL = 3;  // 4 rows times 3 sums, of 16 registers
#endif
constexpr int64_t PARALLEL = 1 << 15;  // max multiplications for one thread: using more threads would cost more time

// Rows of weights. `chunk` is how many groups of eight `get` yields at once; K is a multiple of 8 * chunk.
template <class T>
struct Plain {
  static constexpr int chunk = 1;
  const T* data;
  int64_t K;
  inline __attribute__((always_inline)) void get(int64_t row, int64_t c, f8* out) const {
    out[0] = load(data + row * K + c * 8);
  }
  // Rows are too short for the hardware prefetcher, so a row is prefetched while an earlier one is used. Unconditional:
  // with a branch the compiler may not fuse products with sums, and bits would differ.
  inline __attribute__((always_inline)) void fetch(int64_t row, int64_t c) const {
    __builtin_prefetch(data + row * K + c * 8);
  }
};

// Rows of fp32 that are in the cache already: nothing to prefetch.
struct Near {
  static constexpr int chunk = 1;
  const float* data;
  int64_t K;
  inline __attribute__((always_inline)) void get(int64_t row, int64_t c, f8* out) const {
    out[0] = load(data + row * K + c * 8);
  }
};

struct Int4 {
  static constexpr int chunk = 4;  // the 32 values that share a scale
  const uint32_t* packed;
  const bf16* scale;
  int64_t K;
  // (q - 8) * s has at most 12 significant bits: exact, with or without a fused multiply-add.
  inline __attribute__((always_inline)) void get(int64_t row, int64_t c, f8* out) const {
    const uint32_t* words = packed + row * (K / 8) + c * 4;
    const f8 s = splat(widen(scale[row * (K / 32) + c]));
    const f8 offset = s * -8.0f;
    const u8 shift = {0, 4, 8, 12, 16, 20, 24, 28};
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const uint32_t word = words[j];
      const u8 nibbles = (u8{word, word, word, word, word, word, word, word} >> shift) & 15;
      out[j] = __builtin_convertvector(bits<i8>(nibbles), f8) * s + offset;
    }
  }
  inline __attribute__((always_inline)) void fetch(int64_t row, int64_t c) const {
    __builtin_prefetch(packed + row * (K / 8) + c * 4);
  }
};

template <class W, class = void>
struct fetches : std::false_type {};
template <class W>
struct fetches<W, std::void_t<decltype(&W::fetch)>> : std::true_type {};

// out[r][t] = W[row + r] . x[t] for r < M, t < N.
template <int M, int N, class W>
INLINE void block(const W& w, int64_t row, const float* const* x, float (*out)[SMALL]) {
  f8 acc[M][N] = {};
  const int64_t chunks = w.K / (8 * W::chunk);
  for (int64_t c = 0; c < chunks; c++) {
#pragma GCC unroll 4
    for (int r = 0; r < M; r++) {
      f8 v[W::chunk];
      if constexpr (fetches<W>::value) w.fetch(row + M + r, c);
      w.get(row + r, c, v);
#pragma GCC unroll 4
      for (int j = 0; j < W::chunk; j++)
#pragma GCC unroll 6
        for (int t = 0; t < N; t++) acc[r][t] += v[j] * load(x[t] + (c * W::chunk + j) * 8);
    }
  }
  for (int r = 0; r < M; r++)
    for (int t = 0; t < N; t++) out[r][t] = sum(acc[r][t]);
}

template <int N, class W>
INLINE void blocks(const W& w, int64_t row, int64_t rows, const float* const* x, float (*out)[SMALL]) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) block<4, N>(w, row + r, x, out + r);
  for (; r < rows; r++) block<1, N>(w, row + r, x, out + r);
}

// As `blocks` with N = n <= SMALL, for rows <= TILE. Not inlined: it would multiply the code and the compiler's time.
template <class W>
__attribute__((noinline)) void tile_dots(const W& w, int64_t row, int64_t rows, const float* const* x, int64_t n,
                                         float (*out)[SMALL]) {
  if constexpr (SMALL > 3) {
    if (n == 6) return blocks<6>(w, row, rows, x, out);
    if (n == 5) return blocks<5>(w, row, rows, x, out);
    if (n == 4) return blocks<4>(w, row, rows, x, out);
  }
  if (n == 3)
    blocks<3>(w, row, rows, x, out);
  else if (n == 2)
    blocks<2>(w, row, rows, x, out);
  else
    blocks<1>(w, row, rows, x, out);
}

template <class W>
__attribute__((noinline)) void widen_rows(const W& w, int64_t row, int64_t rows, float* scratch) {
  const int64_t chunks = w.K / (8 * W::chunk);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < chunks; c++) {
      f8 v[W::chunk];
      w.get(row + r, c, v);
      for (int j = 0; j < W::chunk; j++) store(scratch + r * w.K + (c * W::chunk + j) * 8, v[j]);
    }
}

// emit(t, row + r, W[row + r] . x(t)) for t < count and r < rows <= TILE; x(t) is the address of vector t.
// `scratch` holds TILE * K floats.
template <class W, class X, class Emit>
INLINE void dots(const W& w, int64_t row, int64_t rows, int64_t count, float* scratch, X x, Emit emit) {
  constexpr bool plain = std::is_same<W, Plain<float>>::value;
  const bool again = count > SMALL;  // the rows are read more than once
  Near near{scratch, w.K};
  if constexpr (plain)
    near.data = w.data + row * w.K;
  else if (again)
    widen_rows(w, row, rows, scratch);
  for (int64_t t = 0; t < count; t += SMALL) {
    const int64_t n = count - t < SMALL ? count - t : SMALL;
    const float* at[SMALL];
    float out[TILE][SMALL];
    for (int64_t b = 0; b < n; b++) at[b] = x(t + b);
    if (again && (t > 0 || !plain))
      tile_dots(near, 0, rows, at, n, out);
    else
      tile_dots(w, row, rows, at, n, out);
    for (int64_t b = 0; b < n; b++)
      for (int64_t r = 0; r < rows; r++) emit(t + b, row + r, out[r][b]);
  }
}

// Scratch memory; an allocation failure ends the process like any other out-of-memory in C.
struct Scratch {
  float* data;
  explicit Scratch(int64_t floats) : data(static_cast<float*>(aligned_alloc(64, (floats * 4 + 127) / 64 * 64))) {
    if (data == nullptr) abort();
  }
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
};

// y[T, o] = x[T, K] W^T; x rows `ldx` apart.
template <class W>
inline void matmul(const W& w, const float* x, int64_t ldx, float* y, int64_t T, int64_t o, int64_t threads) {
  const int64_t tiles = (o + TILE - 1) / TILE, size = T > SMALL ? TILE * w.K : 0;
  if (T * o * w.K <= PARALLEL) threads = 1;
  Scratch scratch(threads * size);
  share(tiles, threads, [&](int64_t tile, int worker) {
    const int64_t row = tile * TILE, rows = o - row < TILE ? o - row : TILE;
    dots(w, row, rows, T, scratch.data + worker * size, [&](int64_t t) { return x + t * ldx; },
         [&](int64_t t, int64_t r, float value) { y[t * o + r] = value; });
  });
}
