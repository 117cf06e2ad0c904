// The experts ops on CPU, one entry point per weight format. Pairs (token, choice) are sorted by expert, so that each
// expert's weights are read once per call. gate and up: a piece of work is (expert, tile of rows). down: a piece is a
// tile of rows for all experts; its thread alone writes these columns of y and adds the experts in ascending order, so
// results need no atomics and have the same bits every time.
#include <algorithm>

#include "cpp/gemm.h"

namespace {

// Rows as in gemm.h. Every dequantised value is rounded once, as the op's reference does it.
struct Int4Compact {
  static constexpr int chunk = 4;  // the 32 values that share a scale
  const uint32_t* packed;
  const uint8_t* scale;
  const bf16* row_scale;
  int64_t K;
  inline __attribute__((always_inline)) void get(int64_t row, int64_t c, f8* out) const {
    const uint32_t* words = packed + row * (K / 8) + c * 4;
    const f8 s = splat(scale[row * (K / 32) + c] * (widen(row_scale[row]) / 255.0f));
    const u8 shift = {0, 4, 8, 12, 16, 20, 24, 28};
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const uint32_t word = words[j];
      const u8 nibbles = (u8{word, word, word, word, word, word, word, word} >> shift) & 15;
      out[j] = __builtin_convertvector(bits<i8>(nibbles) - 8, f8) * s;
    }
  }
};

// e4m3 bits as fp32. Exponent and mantissa, moved to their places in an fp32, give the value times 2^-120: exact, for
// subnormal numbers too. Not for nan, which loading refuses.
INLINE f8 e4m3(u8 byte) {
  return bits<f8>((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

struct Fp8 {
  static constexpr int chunk = 1;
  const uint8_t* data;
  const float* scale;  // [.., ceil(K / 128)]
  int64_t K;
  int64_t half;  // rows of gate; up's rows begin a new block
  inline __attribute__((always_inline)) void get(int64_t row, int64_t c, f8* out) const {
    const int64_t block = row < half ? row >> 7 : ((half + 127) >> 7) + ((row - half) >> 7);
    uint32_t words[2];
    memcpy(words, data + row * K + c * 8, sizeof words);
    const uint32_t a = words[0], b = words[1];
    const u8 shift = {0, 8, 16, 24, 0, 8, 16, 24};
    out[0] = e4m3(u8{a, a, a, a, b, b, b, b} >> shift) * scale[block * ((K + 127) >> 7) + (c >> 4)];
  }
};

// All e4m3 numbers, for scales: one load is cheaper than the conversion of a single one.
struct E4m3Table {
  float value[256];
  E4m3Table() {
    for (uint32_t b = 0; b < 256; b++) value[b] = e4m3(u8{b})[0];
  }
};
const E4m3Table E4M3;

struct NvFp4 {
  static constexpr int chunk = 2;  // the 16 values that share a scale
  const uint8_t* packed;
  const uint8_t* scale;
  const float* global;  // gate's, then up's
  int64_t K;
  int64_t half;
  inline __attribute__((always_inline)) void get(int64_t row, int64_t c, f8* out) const {
    const u8 shift = {0, 4, 8, 12, 16, 20, 24, 28};
    const float s = E4M3.value[scale[row * (K / 16) + c]] * global[row >= half];
    const f8 magnitude = f8{0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f} * s;
    uint32_t words[2];
    memcpy(words, packed + row * (K / 2) + c * 8, sizeof words);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const uint32_t word = words[j];
      const u8 codes = u8{word, word, word, word, word, word, word, word} >> shift;
      const u8 sign = (codes & 8) << 28;  // the shuffle uses the other three bits as index
      out[j] = bits<f8>(bits<u8>(__builtin_shuffle(magnitude, bits<i8>(codes))) ^ sign);
    }
  }
};

struct Sorted {
  int64_t* start;  // [E + 1] first position of each expert
  int64_t* used;   // [hit] the experts with pairs, in ascending order
  int64_t hit = 0;
  int64_t* token;  // [T * k]
  float* share;    // [T * k]
  void* memory;

  Sorted(const int32_t* ids, const float* weights, int64_t T, int64_t k, int64_t E) {
    memory = malloc((2 * E + 1) * 8 + T * k * 16);
    if (memory == nullptr) abort();
    start = static_cast<int64_t*>(memory);
    used = start + E + 1;
    token = used + E;
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
    for (int64_t e = 0; e < E; e++)
      if (start[e + 1] > start[e]) used[hit++] = e;
  }
  ~Sorted() { free(memory); }
  Sorted(const Sorted&) = delete;
};

// The shared expert, for every token with weight 1: rows as in gemm.h, [2 S, D] and [D, S]; S may be 0.
struct Shared {
  const float *gate_up, *down;
  int64_t S;
};

// h[first + t, row..] = silu(gate) * up * share(t) for the rows of one tile of an expert and t < count.
template <class W, class X, class Share>
INLINE void gated(const W& w, int64_t I, int64_t tile, int64_t count, float* scratch, X x, Share share, float* h) {
  const int64_t row = tile * TILE, rows = I - row < TILE ? I - row : TILE;
  dots(w, row, rows, count, scratch, x, [&](int64_t t, int64_t r, float gate) { h[t * I + r] = gate; });
  for (int64_t t = 0; t < count; t++)
    for (int64_t r = row; r < row + rows; r += 8) store(h + t * I + r, silu(load(h + t * I + r)));
  dots(w, I + row, rows, count, scratch, x,
       [&](int64_t t, int64_t r, float up) { h[t * I + r - I] *= up * share(t); });
}

// gate_up(e), down(e): the weights of expert e. h is [T * k, I] scratch, and [T, S] after it; y [T, D].
template <class GateUp, class Down>
INLINE int run(GateUp gate_up, Down down, const Shared& shared, const float* x, const int32_t* ids,
               const float* weights, float* h, float* y, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I,
               int64_t threads) {
  for (int64_t p = 0; p < T * k; p++)
    if (ids[p] < 0 || ids[p] >= E) return 1;
  const Sorted pairs(ids, weights, T, k, E);
  const int64_t S = shared.S, inner = (I + TILE - 1) / TILE, outer = (D + TILE - 1) / TILE;
  const int64_t beside = T > 0 ? (S + TILE - 1) / TILE : 0, widest = std::max({D, I, S});
  float* const h_shared = h + T * k * I;
  if (T * (k * I + S) * D <= PARALLEL) threads = 1;
  const Scratch scratch(threads * TILE * widest);
  share(pairs.hit * inner + beside, threads, [&](int64_t piece, int worker) {
    float* const own = scratch.data + worker * TILE * widest;
    if (piece < beside) {
      gated(Plain<float>{shared.gate_up, D}, S, piece, T, own, [&](int64_t t) { return x + t * D; },
            [](int64_t) { return 1.0f; }, h_shared);
    } else {
      const int64_t e = pairs.used[(piece - beside) / inner], first = pairs.start[e];
      gated(gate_up(e), I, (piece - beside) % inner, pairs.start[e + 1] - first, own,
            [&](int64_t t) { return x + pairs.token[first + t] * D; },
            [&](int64_t t) { return pairs.share[first + t]; }, h + first * I);
    }
  });
  share(outer, threads, [&](int64_t tile, int worker) {
    float* const own = scratch.data + worker * TILE * widest;
    const int64_t row = tile * TILE, rows = D - row < TILE ? D - row : TILE;
    for (int64_t t = 0; t < T; t++) memset(y + t * D + row, 0, rows * sizeof(float));
    for (int64_t i = 0; i < pairs.hit; i++) {
      const int64_t e = pairs.used[i], first = pairs.start[e];
      dots(down(e), row, rows, pairs.start[e + 1] - first, own, [&](int64_t t) { return h + (first + t) * I; },
           [&](int64_t t, int64_t r, float value) { y[pairs.token[first + t] * D + r] += value; });
    }
    if (S > 0)
      dots(Plain<float>{shared.down, S}, row, rows, T, own, [&](int64_t t) { return h_shared + t * S; },
           [&](int64_t t, int64_t r, float value) { y[t * D + r] += value; });
  });
  return 0;
}

constexpr Shared NONE = {nullptr, nullptr, 0};

template <class T>
INLINE int dense(const float* x, const int32_t* ids, const float* weights, const T* gate_up, const T* down, float* h,
                 float* y, int64_t tokens, int64_t k, int64_t E, int64_t D, int64_t I, int64_t threads) {
  return run([=](int64_t e) { return Plain<T>{gate_up + e * 2 * I * D, D}; },
             [=](int64_t e) { return Plain<T>{down + e * D * I, I}; }, NONE, x, ids, weights, h, y, tokens, k, E, D, I,
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

API moe_int4(const float* x, const int32_t* ids, const float* weights, const uint32_t* gate_up,
             const bf16* gate_up_scale, const uint32_t* down, const bf16* down_scale, const float* shared_gate_up,
             const float* shared_down, float* h, float* y, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I,
             int64_t S, int64_t threads) {
  return run(
      [=](int64_t e) {
        return Int4{gate_up + e * 2 * I * (D / 8), gate_up_scale + e * 2 * I * (D / 32), D};
      },
      [=](int64_t e) {
        return Int4{down + e * D * (I / 8), down_scale + e * D * (I / 32), I};
      },
      Shared{shared_gate_up, shared_down, S}, x, ids, weights, h, y, T, k, E, D, I, threads);
}

API experts_int4(const float* x, const int32_t* ids, const float* weights, const uint32_t* gate_up,
                 const bf16* gate_up_scale, const uint32_t* down, const bf16* down_scale, float* h, float* y, int64_t T,
                 int64_t k, int64_t E, int64_t D, int64_t I, int64_t threads) {
  return moe_int4(x, ids, weights, gate_up, gate_up_scale, down, down_scale, nullptr, nullptr, h, y, T, k, E, D, I, 0,
                  threads);
}

API experts_int4_compact(const float* x, const int32_t* ids, const float* weights, const uint32_t* gate_up,
                         const uint8_t* gate_up_scale, const bf16* gate_up_row, const uint32_t* down,
                         const uint8_t* down_scale, const bf16* down_row, float* h, float* y, int64_t T, int64_t k,
                         int64_t E, int64_t D, int64_t I, int64_t threads) {
  return run(
      [=](int64_t e) {
        return Int4Compact{gate_up + e * 2 * I * (D / 8), gate_up_scale + e * 2 * I * (D / 32),
                           gate_up_row + e * 2 * I, D};
      },
      [=](int64_t e) {
        return Int4Compact{down + e * D * (I / 8), down_scale + e * D * (I / 32), down_row + e * D, I};
      },
      NONE, x, ids, weights, h, y, T, k, E, D, I, threads);
}

API experts_fp8(const float* x, const int32_t* ids, const float* weights, const uint8_t* gate_up,
                const float* gate_up_scale, const uint8_t* down, const float* down_scale, float* h, float* y, int64_t T,
                int64_t k, int64_t E, int64_t D, int64_t I, int64_t threads) {
  const int64_t across = (D + 127) / 128, along = (I + 127) / 128;
  return run(
      [=](int64_t e) {
        return Fp8{gate_up + e * 2 * I * D, gate_up_scale + e * 2 * along * across, D, I};
      },
      [=](int64_t e) {
        return Fp8{down + e * D * I, down_scale + e * across * along, I, D};
      },
      NONE, x, ids, weights, h, y, T, k, E, D, I, threads);
}

API experts_nvfp4(const float* x, const int32_t* ids, const float* weights, const uint8_t* gate_up,
                  const uint8_t* gate_up_scale, const float* gate_up_global, const uint8_t* down,
                  const uint8_t* down_scale, const float* down_global, float* h, float* y, int64_t T, int64_t k,
                  int64_t E, int64_t D, int64_t I, int64_t threads) {
  return run(
      [=](int64_t e) {
        return NvFp4{gate_up + e * I * D, gate_up_scale + e * 2 * I * (D / 16), gate_up_global + e * 2, D, I};
      },
      [=](int64_t e) {
        return NvFp4{down + e * D * (I / 2), down_scale + e * D * (I / 16), down_global + e, I, D};
      },
      NONE, x, ids, weights, h, y, T, k, E, D, I, threads);
}
