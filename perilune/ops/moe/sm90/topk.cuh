// Selects the experts of one token from its scores, by one warp or by a CTA. Contract in router.py.
#pragma once
#include "cuda/wgmma.cuh"

namespace routing {

constexpr int MOST_EXPERTS = 512;

struct Choice {
  const float* bias;  // [E]
  int* ids;           // [T, top_k]
  float* weights;
  int E, top_k, norm;
  float scale;
};

// Selection by one warp. Lane l holds logits and biases of experts 32 n + l. A negative token: a dry run, nothing is
// written. Lane 0 calls publish(k, id) for each expert as soon as it is selected. Experts are selected one by one: the
// rank of each candidate takes fewer steps, but three times the instructions, which all miss the instruction cache.
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

// Selection by all WARPS warps of a CTA. A score is listed unless top_k lanes of its warp have a better one: with 7 warps
// and 2 scores per lane, about 8.4 of a warp's 64 scores are listed, more with ties. An expert's rank is the number of
// better scores in the list. Ties go to the lower id.
template <int EACH, int WARPS>
struct Choosing {
  static constexpr int THREADS = WARPS * 32, BLOCK = 64, MOST = (THREADS * EACH + BLOCK - 1) / BLOCK * BLOCK;
  alignas(16) uint64_t list[MOST];  // high: key; low: inverted expert id, so that ties go to the lower id; then zeros
  alignas(16) uint32_t best[WARPS][32];
  float biases[THREADS * EACH], scores[THREADS * EACH];
  int ids[32], listed;

  __device__ static int first() { return threadIdx.x / 32 * EACH * 32 + threadIdx.x % 32; }

  // All threads, before the first `choose`, with a barrier between.
  __device__ void begin(const Choice& choice) {
    for (int n = threadIdx.x; n < THREADS * EACH; n += THREADS) biases[n] = n < choice.E ? choice.bias[n] : 0;
    if (threadIdx.x < 32) ids[threadIdx.x] = 0;
  }

  // read(score): waits for this thread's scores, of experts first() + 32 n. publish(k, id): called for each expert as soon
  // as it is selected. rehearsal: a dry run, nothing is written or published.
  template <typename Read, typename Publish>
  __device__ __forceinline__ void choose(const Choice& choice, int token, bool rehearsal, const Read& read,
                                         const Publish& publish) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, E = choice.E, top_k = choice.top_k;
    for (int n = tid; n < MOST; n += THREADS) list[n] = 0;
    if (tid == 0) listed = 0;
    __syncthreads();
    float score[EACH];
    read(score);
    uint32_t key[EACH], most = 0;  // scores with bias as integers of the same order; 0 is below all
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const uint32_t bits = __float_as_uint(score[n] + biases[first() + n * 32]);
      key[n] = first() + n * 32 < E ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
      most = max(most, key[n]);
      scores[first() + n * 32] = score[n];
    }
    best[warp][lane] = most;
    __syncwarp();
    int better[EACH] = {};  // lanes
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint4 v = reinterpret_cast<const uint4*>(best[warp])[i];
#pragma unroll
      for (int n = 0; n < EACH; n++) better[n] += (v.x > key[n]) + (v.y > key[n]) + (v.z > key[n]) + (v.w > key[n]);
    }
    uint32_t those[EACH];
    int count = 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      those[n] = __ballot_sync(~0u, key[n] != 0 && better[n] < top_k);
      count += __popc(those[n]);
    }
    int at = lane == 0 ? atomicAdd(&listed, count) : 0;
    at = __shfl_sync(~0u, at, 0);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const uint64_t word = static_cast<uint64_t>(key[n]) << 32 | ~static_cast<uint32_t>(first() + n * 32);
      if (those[n] >> lane & 1) list[at + __popc(those[n] & ((1u << lane) - 1))] = word;
      at += __popc(those[n]);
    }
    __syncthreads();
    // Four lanes count the rank of one expert.
    const int all = rehearsal ? 1 : listed;
#pragma unroll 1
    for (int begin = 0; begin < all; begin += THREADS / 4) {
      const int of = begin + tid / 4;
      const uint64_t mine = list[min(of, MOST - 1)];
      int rank = 0;
#pragma unroll 1
      for (int block = 0; block < all; block += BLOCK) {
#pragma unroll
        for (int i = 0; i < BLOCK / 8; i++) {
          const ulonglong2 v = *reinterpret_cast<const ulonglong2*>(list + block + i * 8 + lane % 4 * 2);
          rank += (v.x > mine) + (v.y > mine);
        }
      }
      rank += __shfl_xor_sync(~0u, rank, 1);
      rank += __shfl_xor_sync(~0u, rank, 2);
      if (lane % 4 == 0 && of < all && rank < top_k) {
        const int id = static_cast<int>(~static_cast<uint32_t>(mine));
        if (!rehearsal) publish(rank, id);
        ids[rank] = id;
      }
    }
    __syncthreads();
    if (warp == 0) {
      const int id = ids[min(lane, top_k - 1)];
      const float kept = lane < top_k ? scores[id] : 0, sum = hopper::warp_sum(kept);
      if (lane < top_k && !rehearsal) {
        choice.ids[token * top_k + lane] = id;
        choice.weights[token * top_k + lane] = (choice.norm ? kept / (sum + 1e-20f) : kept) * choice.scale;
      }
    }
  }
};

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
