// Shared by mla_prefill.cu and mla_prefill_w8a8.cu: the table of requests, the softmax of a tile of 128 keys.
#pragma once
#include "cuda/tensor_map.cuh"

namespace {

using namespace hopper;

constexpr int NOPE = 128, ROPE = 64, VALUE = 128;
constexpr int QUERIES = 128, KEYS = 128;  // per tile
constexpr int MAX_REQUESTS = 64;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float row_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float row_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// table: row of the block tables. first, count: rows of q. context: number of keys. key: row of the first key.
struct Request {
  int table, first, count, context, key;
};
struct Requests {
  Request of[MAX_REQUESTS];
};

// requests: [count] `Request`s in host memory.
Requests copied(const void* requests, int64_t count) {
  Requests r = {};
  for (int i = 0; i < count; i++) r.of[i] = static_cast<const Request*>(requests)[i];
  return r;
}

// The order in which CTAs start: heads in groups, in a group the tiles with the most keys first, so that the SMs end
// together. Every tile of queries reads the keys and values again: those of a group fit the L2 cache.
constexpr int64_t GROUP_OF_HEADS_BYTES = 24 << 20;

struct Order {
  int heads, groups;

  __device__ __forceinline__ int head() const { return blockIdx.z % groups * gridDim.x + blockIdx.x; }
  __device__ __forceinline__ int request() const { return blockIdx.z / groups; }
  // The first query of the CTA, counted from the first of its request.
  __device__ __forceinline__ int first() const { return (gridDim.y - 1 - blockIdx.y) * QUERIES; }

  // longest: max queries of a request.
  dim3 grid(int64_t longest, int64_t count) const {
    return dim3((heads + groups - 1) / groups, (longest + QUERIES - 1) / QUERIES, groups * count);
  }
};

// bytes: of a key and a value of one head.
Order order_of(const Requests& requests, int64_t count, int64_t heads, int64_t bytes) {
  int64_t most = 1;  // keys
  for (int i = 0; i < count; i++) most = requests.of[i].context > most ? requests.of[i].context : most;
  int64_t size = GROUP_OF_HEADS_BYTES / (most * bytes);
  size = size < 1 ? 1 : size < heads ? size : heads;
  return {static_cast<int>(heads), static_cast<int>((heads + size - 1) / size)};
}

// Online softmax state of a thread's two rows.
struct Rows {
  float top[2], sum[2];  // the largest score so far, unscaled; the sum of this thread's probabilities
};

// Replaces scores by probabilities times 2^LIFT. shrink: factor for earlier sums and outputs of either row.
template <int LIFT = 0>
__device__ __forceinline__ void softmax(float (&s)[64], Rows& rows, float (&shrink)[2], float scale, bool masked,
                                        int visible) {
  if (masked) {  // `visible`: keys of this tile that the first row may see, less this thread's first column
#pragma unroll
    for (int i = 0; i < 64; i++)
      if (8 * (i / 4) + i % 2 >= visible + (i % 4 >= 2 ? 8 : 0)) s[i] = -INFINITY;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = rows.top[r];
#pragma unroll
    for (int i = 0; i < 64; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    top = row_max(top);
    shrink[r] = power_of_two((rows.top[r] - top) * scale);
    rows.top[r] = top;
    float sum = 0.0f;
    const float offset = top * scale - LIFT;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      s[i + 2 * r] = power_of_two(s[i + 2 * r] * scale - offset);
      s[i + 2 * r + 1] = power_of_two(s[i + 2 * r + 1] * scale - offset);
      sum += s[i + 2 * r] + s[i + 2 * r + 1];
    }
    rows.sum[r] = rows.sum[r] * shrink[r] + sum;
  }
}

}  // namespace
