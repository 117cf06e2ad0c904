// Selects the experts of one token from its scores, by one warp. Contract in router.py.
#pragma once
#include "cuda/hopper.cuh"

namespace routing {

constexpr int MOST_EXPERTS = 512;

struct Choice {
  const float* bias;  // [E]
  int* ids;           // [T, top_k]
  float* weights;
  int E, top_k, norm;
  float scale;
};

// Lane l holds logits and biases of experts 32 n + l. A negative token: a dry run, nothing is written. Lane 0 calls
// publish(k, id) for each expert as soon as it is selected. Selects one after the other: computing the rank of each
// candidate takes fewer steps, but three times as many instructions, all of them instruction cache misses, and was
// slower.
template <int EACH, typename Publish>
__device__ __forceinline__ void choose(const Choice& c, float (&score)[EACH], const float (&bias)[EACH], int token,
                                       int lane, Publish publish) {
  uint32_t key[EACH];  // choices as integers of the same order; 0 is below all
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    score[n] = 1.0f / (1.0f + expf(-score[n]));
    const uint32_t bits = __float_as_uint(score[n] + bias[n]);
    key[n] = n * 32 + lane < c.E ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
  }
  float kept = 0, sum = 0;
  int mine = 0;
#pragma unroll 1
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
    if (lane == 0 && token >= 0) publish(k, id);
    float value = 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      if (n * 32 + lane == id) value = score[n], key[n] = 0;
    }
    value = __shfl_sync(~0u, value, id % 32);
    sum += value;
    if (lane == k) mine = id, kept = value;
  }
  if (lane < c.top_k && token >= 0) {
    c.ids[token * c.top_k + lane] = mine;
    c.weights[token * c.top_k + lane] = (c.norm ? kept / (sum + 1e-20f) : kept) * c.scale;
  }
}

template <int EACH>
__device__ __forceinline__ void pick_of(const Choice& c, const float* logits, int token, int lane) {
  float score[EACH], bias[EACH];
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const int e = min(n * 32 + lane, c.E - 1);
    score[n] = __ldcg(logits + e);
    bias[n] = c.bias[e];
  }
  choose(c, score, bias, token, lane, [](int, int) {});
}

// logits [E] of the token
__device__ __forceinline__ void pick(const Choice& c, const float* logits, int token, int lane) {
  if (c.E <= 384) pick_of<12>(c, logits, token, lane);
  else pick_of<MOST_EXPERTS / 32>(c, logits, token, lane);
}

}  // namespace routing
