// router on CPU. Each token's scores, group choice and top-k in one pass; ties go to the lower id, and a row of nans
// still chooses valid experts (with nan weights).
#include "cpp/gemm.h"

namespace {

constexpr int64_t ROWS = 8;  // tokens of a piece of work

// The index of the largest value not taken; the first index not taken if only nans are left.
INLINE int64_t largest(const float* values, const bool* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

}  // namespace

API router(const float* x, const float* gate, const float* bias, int32_t* ids, float* weights, float* scores, int64_t T,
           int64_t D, int64_t E, int64_t k, int64_t groups, int64_t kept, int64_t norm, int64_t threads, float scale) {
  matmul(Plain<float>{gate, D}, x, D, scores, T, E, threads);
  const int64_t size = E / groups;
  const int64_t pieces = (T + ROWS - 1) / ROWS, each = 2 * (E + groups);
  if (T * E * k <= PARALLEL) threads = 1;
  Scratch scratch(threads * each);
  share(pieces, threads, [&](int64_t piece, int worker) {
    float* const choice = scratch.data + worker * each;
    float* const best = choice + E;
    bool* const taken = reinterpret_cast<bool*>(best + groups);
    bool* const grouped = taken + E;
    for (int64_t t = piece * ROWS; t < T && t < (piece + 1) * ROWS; t++) {
      float* const s = scores + t * E;
      for (int64_t e = 0; e < E; e++) {
        s[e] = 1.0f / (1.0f + expf(-s[e]));
        choice[e] = s[e] + bias[e];
      }
      memset(taken, 0, E);
      if (kept < groups) {
        memset(grouped, 0, groups);
        for (int64_t g = 0; g < groups; g++) {
          const float* in = choice + g * size;
          const int64_t first = largest(in, taken + g * size, size);
          float score = in[first];
          if (size > 1) {
            taken[g * size + first] = true;
            score += in[largest(in, taken + g * size, size)];
            taken[g * size + first] = false;
          }
          best[g] = score;
        }
        for (int64_t g = 0; g < kept; g++) grouped[largest(best, grouped, groups)] = true;
        for (int64_t e = 0; e < E; e++) taken[e] = !grouped[e / size];
      }
      float total = 1e-20f;
      for (int64_t j = 0; j < k; j++) {
        const int64_t e = largest(choice, taken, E);
        taken[e] = true;
        ids[t * k + j] = int32_t(e);
        weights[t * k + j] = s[e];
        total += s[e];
      }
      const float factor = norm ? scale / total : scale;
      for (int64_t j = 0; j < k; j++) weights[t * k + j] *= factor;
    }
  });
  return 0;
}
