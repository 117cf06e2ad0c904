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

// What a warp needs in shared memory.
struct Candidates {
  uint32_t key[32];
  int id[32];
  float score[32];
  float kept[32];  // by rank
};

// How many of the warp's keys come before this lane's: the larger ones, and equal ones of lower lanes.
__device__ __forceinline__ int rank_of(uint32_t key, int lane) {
  unsigned larger = 0, equal = 0;
#pragma unroll
  for (int j = 0; j < 32; j++) {
    const uint32_t other = __shfl_sync(~0u, key, j);
    if (other > key) larger |= 1u << j;
    if (other == key) equal |= 1u << j;
  }
  return __popc(larger) + __popc(equal & ((1u << lane) - 1));
}

// Lane l holds logits and biases of experts 32 n + l. A negative token is nobody: nothing is written. tell(k, id) hears
// of every choice as soon as it is made, from some lane.
//
// Whatever is chosen is at least the top_k-th largest of the lanes' maxima. Few are: those get a lane each and count
// who comes before them. Too many, which takes ties: one after the other.
template <int EACH, typename Tell>
__device__ __forceinline__ void choose(const Choice& c, float (&score)[EACH], const float (&bias)[EACH], int token,
                                       int lane, Candidates& held, Tell tell) {
  uint32_t key[EACH], most = 0;  // choices as integers of the same order; 0 is below all
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    score[n] = 1.0f / (1.0f + expf(-score[n]));
    const uint32_t bits = __float_as_uint(score[n] + bias[n]);
    key[n] = n * 32 + lane < c.E ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
    most = max(most, key[n]);
  }
  const uint32_t least = __shfl_sync(~0u, most, __ffs(__ballot_sync(~0u, rank_of(most, lane) == c.top_k - 1)) - 1);
  int count = 0;
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const unsigned found = __ballot_sync(~0u, key[n] >= least);
    const int at = count + __popc(found & ((1u << lane) - 1));
    if (key[n] >= least && at < 32) held.key[at] = key[n], held.id[at] = n * 32 + lane, held.score[at] = score[n];
    count += __popc(found);
  }
  int rank = 32, id = 0;
  if (count <= 32) {
    __syncwarp();
    const int before = rank_of(lane < count ? held.key[lane] : 0, lane);
    if (lane < count) rank = before, id = held.id[lane];
    if (rank < c.top_k) held.kept[rank] = held.score[lane];
  } else {
    for (int k = 0; k < c.top_k; k++) {
      uint32_t best = 0;
#pragma unroll
      for (int n = 0; n < EACH; n++) best = max(best, key[n]);
      best = __reduce_max_sync(~0u, best);
      int first = 1 << 30;
#pragma unroll
      for (int n = EACH - 1; n >= 0; n--) {
        if (key[n] == best) first = n * 32 + lane;
      }
      first = __reduce_min_sync(~0u, first);
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        if (n * 32 + lane == first) held.kept[k] = score[n], key[n] = 0;
      }
      if (lane == k) rank = k, id = first;
    }
  }
  if (rank < c.top_k && token >= 0) tell(rank, id);
  __syncwarp();
  float sum = 0;
  for (int k = 0; k < c.top_k; k++) sum += held.kept[k];
  if (rank < c.top_k && token >= 0) {
    const float kept = held.kept[rank];
    c.ids[token * c.top_k + rank] = id;
    c.weights[token * c.top_k + rank] = (c.norm ? kept / (sum + 1e-20f) : kept) * c.scale;
  }
  __syncwarp();
}

template <int EACH>
__device__ __forceinline__ void pick_of(const Choice& c, const float* logits, int token, int lane,
                                        Candidates& held) {
  float score[EACH], bias[EACH];
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const int e = min(n * 32 + lane, c.E - 1);
    score[n] = __ldcg(logits + e);
    bias[n] = c.bias[e];
  }
  choose(c, score, bias, token, lane, held, [](int, int) {});
}

// logits [E] of the token
__device__ __forceinline__ void pick(const Choice& c, const float* logits, int token, int lane, Candidates& held) {
  if (c.E <= 384) pick_of<12>(c, logits, token, lane, held);
  else pick_of<MOST_EXPERTS / 32>(c, logits, token, lane, held);
}

}  // namespace routing
