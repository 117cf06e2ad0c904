// The choice of experts for one token, from its scores: a warp's work. Contract in router.py.
#pragma once
#include "hopper.cuh"

namespace routing {

constexpr int MOST_EXPERTS = 512;

struct Choice {
  const float* bias;  // [E]
  int* ids;           // [T, top_k]
  float* weights;
  int E, top_k, norm;
  float scale;
};

// Logits of expert e are the sum over p of scores[p * apart + e]. All loads are in flight at once: one after the other
// they took 10 us.
template <int EACH>
__device__ void pick_of(const Choice& c, const float* scores, int parts, int64_t apart, int token, int lane) {
  float score[EACH];
  uint32_t key[EACH];  // choices as integers of the same order; 0 is below all
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    int e = min(n * 32 + lane, c.E - 1);
    score[n] = __ldcg(scores + e);
    key[n] = __float_as_uint(c.bias[e]);
  }
  for (int p = 1; p < parts; p++) {
#pragma unroll
    for (int n = 0; n < EACH; n++) score[n] += __ldcg(scores + p * apart + min(n * 32 + lane, c.E - 1));
  }
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    score[n] = 1.0f / (1.0f + expf(-score[n]));
    uint32_t bits = __float_as_uint(score[n] + __uint_as_float(key[n]));
    key[n] = n * 32 + lane < c.E ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
  }
  float kept = 0, sum = 0;
  int mine = 0;
  for (int k = 0; k < c.top_k; k++) {
    uint32_t best = 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) best = max(best, key[n]);
    best = __reduce_max_sync(~0u, best);
    int id = 1 << 30;
#pragma unroll
    for (int n = EACH - 1; n >= 0; n--) {
      if (key[n] == best) id = n * 32 + lane;
    }
    id = __reduce_min_sync(~0u, id);
    float value = 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      if (n * 32 + lane == id) value = score[n], key[n] = 0;
    }
    value = __shfl_sync(~0u, value, id % 32);
    sum += value;
    if (lane == k) mine = id, kept = value;
  }
  if (lane < c.top_k) {
    c.ids[token * c.top_k + lane] = mine;
    c.weights[token * c.top_k + lane] = (c.norm ? kept / (sum + 1e-20f) : kept) * c.scale;
  }
}

__device__ __forceinline__ void pick(const Choice& c, const float* scores, int parts, int64_t apart, int token,
                                     int lane) {
  if (c.E <= 384) pick_of<12>(c, scores, parts, apart, token, lane);
  else pick_of<MOST_EXPERTS / 32>(c, scores, parts, apart, token, lane);
}

}  // namespace routing
