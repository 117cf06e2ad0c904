// The steps before and after the grouped products of moe_int4_grouped.cuh and moe_int4_tall.cu: rows of pairs (token,
// choice) are sorted by expert, activations are permuted, a token's results are summed.
#pragma once
#include "cuda/hopper.cuh"

namespace {

using namespace hopper;

constexpr int MAX_EXPERTS = 1024;

struct Tile {
  int expert, row, count;  // row: the first, a multiple of 8
};

__host__ __device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// By 1024 threads, one per expert. Writes to shared memory: counts [MAX_EXPERTS], the number of an expert's pairs; next
// [MAX_EXPERTS], its first row, a multiple of 8. totals [32]: scratch. Returns the count of the thread's expert.
__device__ __forceinline__ int count_pairs(const int* ids, int pairs, int E, int* counts, int* next, int* totals) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  counts[tid] = 0;
  __syncthreads();
#pragma unroll 4
  for (int n = tid; n < pairs; n += 1024) {
    const int e = ids[n];
    if (static_cast<unsigned>(e) < static_cast<unsigned>(E)) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
  const int own = counts[tid], padded = divide_up(own, 8) * 8;
  int before = padded;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int v = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += v;
  }
  if (lane == 31) totals[warp] = before;
  __syncthreads();
  before -= padded;
  for (int w = 0; w < warp; w++) before += totals[w];
  next[tid] = before;
  return own;
}

// By 1024 threads: gives every pair the next row of its expert. position [pairs]: a pair's row, or -1; source: the token
// of a row, if not null.
__device__ __forceinline__ void place_pairs(const int* ids, int pairs, int k, int E, int* next, int* position,
                                            int* source) {
#pragma unroll 4
  for (int n = threadIdx.x; n < pairs; n += 1024) {
    const int e = ids[n];
    const bool known = static_cast<unsigned>(e) < static_cast<unsigned>(E);
    const int row = known ? atomicAdd(&next[e], 1) : -1;
    position[n] = row;
    if (source && known) source[row] = n / k;
  }
}

// Plans tiles of CLASSES sizes: class c has 8 (FIRST + c) columns, each for a pair of one expert.
template <int FIRST, int CLASSES>
struct Planner {
  static constexpr int WIDEST = 8 * (FIRST + CLASSES - 1);

  // In global memory; the tiles follow.
  struct Plan {
    int tiles[CLASSES];     // number of tiles of each class
    int taken[2][CLASSES];  // pieces of work of down (0) and gate_up (1) that CTAs have taken after their first
  };

  // By 1024 threads. Bit c of `classes`: tiles may be of class c; the last one always may. position and source: see
  // place_pairs.
  static __device__ void plan(const int* ids, int pairs, int k, int E, uint32_t classes, Plan* plan, Tile* tiles,
                              int capacity, int* position, int* source) {
    __shared__ int counts[MAX_EXPERTS], next[MAX_EXPERTS], totals[32], of_class[CLASSES];
    const int tid = threadIdx.x;
    if (tid < CLASSES) of_class[tid] = 0;
    const int own = count_pairs(ids, pairs, E, counts, next, totals), before = next[tid];
    if (own) {
      const int size = divide_up(divide_up(own, divide_up(own, WIDEST)), 8) * 8;
      for (int first = 0; first < own; first += size) {
        const int count = min(size, own - first);
        const int least = max(0, divide_up(count, 8) - FIRST), c = least + __ffs(classes >> least) - 1;
        tiles[c * capacity + atomicAdd(&of_class[c], 1)] = Tile{tid, before + first, count};
      }
    }
    __syncthreads();
    if (tid < CLASSES) {
      plan->tiles[tid] = of_class[tid];
      plan->taken[0][tid] = plan->taken[1][tid] = 0;
    }
    place_pairs(ids, pairs, k, E, next, position, source);
  }
};

// A thread's part of the permutation of a token's activations to the order of moe_int4_grouped.cuh: reads values
// 8 (unit % 4) .. + 7 of the four groups of 32 in block unit / 4 of 128, writes four chunks of `to` [D / 8].
__device__ __forceinline__ void permute(const bf16* row, int unit, uint4* to) {
  const int block = unit / 4, word = unit % 4;
  union {
    uint4 v[4];
    uint16_t e[4][8];
  } run;
  const bf16* source = row + 128 * block + 8 * word;
#pragma unroll
  for (int t = 0; t < 4; t++) run.v[t] = load16(source + 32 * t);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    uint32_t pair[4];
#pragma unroll
    for (int t = 0; t < 4; t++) pair[t] = run.e[t][r] | static_cast<uint32_t>(run.e[t][r + 4]) << 16;
    to[16 * block + 4 * word + r] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

// y[t] = sum over j of weights[t, j] part[position[t, j]] in the order of j, then + shared[t].
// INTERLEAVED: every 8 of a row of part are columns 0, 4, 1, 5, 2, 6, 3, 7.
template <bool INTERLEAVED>
__global__ void combine_kernel(const bf16* part, const int* position, const float* weights, const bf16* shared, int k,
                               int D, float* y) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t token = blockIdx.x;
  const int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= D) return;
  float sum[8] = {};
  auto add = [&](uint4 v, float w, bool interleaved) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 f = widen(words[i]);
      sum[interleaved ? i : 2 * i] += w * f.x;
      sum[interleaved ? i + 4 : 2 * i + 1] += w * f.y;
    }
  };
#pragma unroll 8
  for (int j = 0; j < k; j++) {
    const int row = position[token * k + j];
    if (row >= 0) add(load16(part + static_cast<int64_t>(row) * D + column), weights[token * k + j], INTERLEAVED);
  }
  if (shared) add(load16(shared + token * D + column), 1.0f, false);
  float4* to = reinterpret_cast<float4*>(y + token * D + column);
  to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

}  // namespace
