// Selects the experts of one token from its scores, as topk.cuh does, but by several warps.
#pragma once
#include "moe/sm90/topk.cuh"

namespace routing {

// biases and ids (0) are set before the choice.
template <int WARPS, int EACH>
struct Choosing {
  float biases[WARPS * EACH * 32], scores[WARPS * EACH * 32];
  uint64_t best[WARPS][32];  // high: key; low: inverted expert id, so that ties go to the lower id
  int ids[32];
};

// Lane l of warp w holds the scores of experts (w EACH + n) 32 + l. Each warp lists its best; then the rank of each is
// how many of all lists come before it. Ties go to the lower expert. K: top_k, or 0. A rehearsal writes nothing to
// global memory. meet(): a barrier of the warps. publish(k, id) is called for each expert as soon as it is selected.
template <int WARPS, int EACH, int K, typename Meet, typename Publish>
__device__ __forceinline__ void choose(const Choice& choice, Choosing<WARPS, EACH>& c, const float (&score)[EACH],
                                       int token, bool rehearsal, Meet meet, Publish publish) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, E = choice.E, first = warp * EACH * 32 + lane;
  const int top_k = K ? K : choice.top_k;
  uint32_t key[EACH];  // scores with bias as integers of the same order; 0 is below all
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const uint32_t bits = __float_as_uint(score[n] + c.biases[first + n * 32]);
    key[n] = first + n * 32 < E ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
    c.scores[first + n * 32] = score[n];
  }
#pragma unroll(K ? K : 1)
  for (int k = 0; k < top_k; k++) {
    uint32_t best = key[EACH - 1], own = first + (EACH - 1) * 32;
#pragma unroll
    for (int n = EACH - 2; n >= 0; n--) {
      if (key[n] >= best) best = key[n], own = first + n * 32;
    }
    const uint32_t top = __reduce_max_sync(~0u, best), those = __ballot_sync(~0u, best == top);
    bool won = best == top;
    if (those & (those - 1)) {
      const uint32_t least = __reduce_min_sync(~0u, won ? own : ~0u);
      won = own == least;
    }
    if (won) {
      c.best[warp][k] = static_cast<uint64_t>(top) << 32 | ~own;
#pragma unroll
      for (int n = 0; n < EACH; n++) key[n] = first + n * 32 == own ? 0 : key[n];
    }
  }
  meet();
  // Four lanes count the rank of one expert.
#pragma unroll 1
  for (int k = lane / 4; k < (top_k + 7) / 8 * 8; k += 8) {
    const uint64_t mine = c.best[warp][min(k, top_k - 1)];
    int rank = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
      for (int n = 0; n < (K + 3) / 4; n++) rank += c.best[w][lane % 4 + n * 4] > mine;
      for (int n = lane % 4 + (K + 3) / 4 * 4; n < top_k; n += 4) rank += c.best[w][n] > mine;
    }
    rank += __shfl_xor_sync(~0u, rank, 1);
    rank += __shfl_xor_sync(~0u, rank, 2);
    if (lane % 4 == 0 && k < top_k && rank < top_k && mine >> 32) {
      const int id = static_cast<int>(~static_cast<uint32_t>(mine));
      if (!rehearsal) publish(rank, id);
      c.ids[rank] = id;
    }
  }
  meet();
  if (warp == 0) {
    const int id = c.ids[min(lane, top_k - 1)];
    const float kept = lane < top_k ? c.scores[id] : 0, sum = hopper::warp_sum(kept);
    if (lane < top_k && !rehearsal) {
      choice.ids[token * top_k + lane] = id;
      choice.weights[token * top_k + lane] = (choice.norm ? kept / (sum + 1e-20f) : kept) * choice.scale;
    }
  }
}

}  // namespace routing
