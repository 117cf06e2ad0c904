// experts and experts_int4 on CPU. Pairs (token, choice) are sorted by expert, so that each expert's weights are read
// once per call; work is cut into (expert, tile of rows) for gate and up, and into tiles of rows for down, where a
// thread owns its columns of y and adds the experts in ascending order: no atomics, the same bits every time.
#include "gemm.h"

namespace {

struct Sorted {
  int64_t* start;  // [E + 1] first position of each expert
  int64_t* token;  // [T * k]
  float* share;    // [T * k]
  void* memory;

  Sorted(const int32_t* ids, const float* weights, int64_t T, int64_t k, int64_t E) {
    memory = malloc((E + 1) * 8 + T * k * 16);
    if (memory == nullptr) abort();
    start = static_cast<int64_t*>(memory);
    token = start + E + 1;
    share = reinterpret_cast<float*>(token + T * k);
    memset(start, 0, (E + 1) * 8);
    for (int64_t p = 0; p < T * k; p++) start[ids[p] + 1]++;
    for (int64_t e = 0; e < E; e++) start[e + 1] += start[e];
    for (int64_t p = 0; p < T * k; p++) {
      const int64_t at = start[ids[p]]++;
      token[at] = p / k;
      share[at] = weights[p];
    }
    for (int64_t e = E; e > 0; e--) start[e] = start[e - 1];
    start[0] = 0;
  }
  ~Sorted() { free(memory); }
  Sorted(const Sorted&) = delete;
};

// at(e): the weights of expert e. h is [T * k, I] scratch, y [T, D].
template <class GateUp, class Down>
INLINE int run(GateUp gate_up, Down down, const float* x, const int32_t* ids, const float* weights, float* h, float* y,
               int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int threads) {
  for (int64_t p = 0; p < T * k; p++)
    if (ids[p] < 0 || ids[p] >= E) return 1;
  const Sorted pairs(ids, weights, T, k, E);
  const int64_t inner = (I + TILE - 1) / TILE, outer = (D + TILE - 1) / TILE;
  const int64_t widest = D > I ? D : I;
#pragma omp parallel num_threads(threads) if (T * k * D * I > PARALLEL)
  {
    Scratch scratch(2 * TILE * widest);
#pragma omp for schedule(dynamic, 4)
    for (int64_t piece = 0; piece < E * inner; piece++) {
      const int64_t e = piece / inner, first = pairs.start[e], count = pairs.start[e + 1] - first;
      if (count == 0) continue;
      const int64_t row = piece % inner * TILE, rows = I - row < TILE ? I - row : TILE;
      const auto w = gate_up(e);
      auto vector = [&](int64_t t) { return x + pairs.token[first + t] * D; };
      dots(w, row, rows, count, scratch.data, vector,
           [&](int64_t t, int64_t r, float gate) { h[(first + t) * I + r] = gate; });
      for (int64_t t = first; t < first + count; t++)
        for (int64_t r = row; r < row + rows; r += 8) store(h + t * I + r, silu(load(h + t * I + r)));
      dots(w, I + row, rows, count, scratch.data, vector,
           [&](int64_t t, int64_t r, float up) { h[(first + t) * I + r - I] *= up * pairs.share[first + t]; });
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t tile = 0; tile < outer; tile++) {
      const int64_t row = tile * TILE, rows = D - row < TILE ? D - row : TILE;
      for (int64_t t = 0; t < T; t++) memset(y + t * D + row, 0, rows * sizeof(float));
      for (int64_t e = 0; e < E; e++) {
        const int64_t first = pairs.start[e], count = pairs.start[e + 1] - first;
        if (count == 0) continue;
        dots(down(e), row, rows, count, scratch.data, [&](int64_t t) { return h + (first + t) * I; },
             [&](int64_t t, int64_t r, float value) { y[pairs.token[first + t] * D + r] += value; });
      }
    }
  }
  return 0;
}

template <class T>
INLINE int dense(const float* x, const int32_t* ids, const float* weights, const T* gate_up, const T* down, float* h,
                 float* y, int64_t tokens, int64_t k, int64_t E, int64_t D, int64_t I, int64_t threads) {
  return run([=](int64_t e) { return Plain<T>{gate_up + e * 2 * I * D, D}; },
             [=](int64_t e) { return Plain<T>{down + e * D * I, I}; }, x, ids, weights, h, y, tokens, k, E, D, I,
             threads);
}

}  // namespace

API experts_f32(const float* x, const int32_t* ids, const float* weights, const float* gate_up, const float* down,
                float* h, float* y, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int64_t threads) {
  return dense(x, ids, weights, gate_up, down, h, y, T, k, E, D, I, threads);
}

API experts_bf16(const float* x, const int32_t* ids, const float* weights, const bf16* gate_up, const bf16* down,
                 float* h, float* y, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int64_t threads) {
  return dense(x, ids, weights, gate_up, down, h, y, T, k, E, D, I, threads);
}

API experts_int4(const float* x, const int32_t* ids, const float* weights, const uint32_t* gate_up,
                 const bf16* gate_up_scale, const uint32_t* down, const bf16* down_scale, float* h, float* y, int64_t T,
                 int64_t k, int64_t E, int64_t D, int64_t I, int64_t threads) {
  return run(
      [=](int64_t e) {
        return Int4{gate_up + e * 2 * I * (D / 8), gate_up_scale + e * 2 * I * (D / 32), D};
      },
      [=](int64_t e) {
        return Int4{down + e * D * (I / 8), down_scale + e * D * (I / 32), I};
      },
      x, ids, weights, h, y, T, k, E, D, I, threads);
}
