// What stands around the grouped products of moe_int4_grouped.cuh: pairs (token, choice) get rows sorted by expert,
// tokens are copied there, and a token's results are added up.
#pragma once
#include "cuda/hopper.cuh"

namespace {

using namespace hopper;

constexpr int WIDEST = 256;  // columns of a tile
constexpr int CLASSES = 31;  // of tiles, by width
__host__ __device__ constexpr int width_of(int c) { return 16 + 8 * c; }
constexpr int MAX_EXPERTS = 1024;

struct Tile {
  int expert, row, count;  // row: the first, a multiple of 8
};

struct Plan {
  int tiles[CLASSES];  // of each width; the tiles themselves lie behind
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// Bit c of `classes`: tiles may have width_of(c); the last one is always set.
__global__ void __launch_bounds__(1024) plan_kernel(const int* ids, int pairs, int E, uint32_t classes, Plan* plan,
                                                    Tile* tiles, int capacity, int* position) {
  __shared__ int counts[MAX_EXPERTS], next[MAX_EXPERTS], totals[32], of_width[CLASSES];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  wait_for_predecessor();
  let_successor_start();
  counts[tid] = 0;
  if (tid < CLASSES) of_width[tid] = 0;
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
  if (own) {
    const int size = divide_up(divide_up(own, divide_up(own, WIDEST)), 8) * 8;
    for (int first = 0; first < own; first += size) {
      const int count = min(size, own - first);
      const int least = max(0, divide_up(count, 8) - 2), c = least + __ffs(classes >> least) - 1;
      tiles[c * capacity + atomicAdd(&of_width[c], 1)] = Tile{tid, before + first, count};
    }
  }
  __syncthreads();
  if (tid < CLASSES) plan->tiles[tid] = of_width[tid];
#pragma unroll 4
  for (int n = tid; n < pairs; n += 1024) {
    const int e = ids[n];
    const bool known = static_cast<unsigned>(e) < static_cast<unsigned>(E);
    position[n] = known ? atomicAdd(&next[e], 1) : -1;
  }
}

// One token per CTA. The row is put in order in shared memory, so that eight lanes write a whole line.
__global__ void __launch_bounds__(256) gather_kernel(const bf16* x, int64_t stride, const int* position, int k, int D,
                                                     int64_t groups, uint8_t* out) {
  extern __shared__ uint4 ordered[];  // [D / 8] chunks
  const int token = blockIdx.x;
  wait_for_predecessor();
  let_successor_start();
  // A thread takes word `word` of the four groups of a block of 128.
  for (int unit = threadIdx.x; unit < D / 32; unit += blockDim.x) {
    const int block = unit / 4, word = unit % 4;
    union {
      uint4 v[4];
      uint16_t e[4][8];
    } run;
    const bf16* source = x + token * stride + 128 * block + 8 * word;
#pragma unroll
    for (int t = 0; t < 4; t++) run.v[t] = load16(source + 32 * t);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      uint32_t pair[4];
#pragma unroll
      for (int t = 0; t < 4; t++) pair[t] = run.e[t][r] | static_cast<uint32_t>(run.e[t][r + 4]) << 16;
      ordered[16 * block + 4 * word + r] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
  }
  __syncthreads();
  for (int j = 0; j < k; j++) {
    const int row = position[token * k + j];
    if (row < 0) continue;
    uint8_t* to = out + static_cast<int64_t>(row / 8) * 1024 + (row % 8) * 128;
    for (int chunk = threadIdx.x; chunk < D / 8; chunk += blockDim.x)
      *reinterpret_cast<uint4*>(to + chunk / 8 * groups * 1024 + ((chunk ^ row) % 8) * 16) = ordered[chunk];
  }
}

// y[t] = sum over j of weights[t, j] part[position[t, j]] in the order of j, then + shared[t].
__global__ void combine_kernel(const bf16* part, const int* position, const float* weights, const bf16* shared, int k,
                               int D, float* y) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t token = blockIdx.x;
  const int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= D) return;
  float sum[8] = {};
  auto add = [&](uint4 v, float w) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 f = widen(words[i]);
      sum[2 * i] += w * f.x;
      sum[2 * i + 1] += w * f.y;
    }
  };
#pragma unroll 8
  for (int j = 0; j < k; j++) {
    const int row = position[token * k + j];
    if (row >= 0) add(load16(part + static_cast<int64_t>(row) * D + column), weights[token * k + j]);
  }
  if (shared) add(load16(shared + token * D + column), 1.0f);
  float4* to = reinterpret_cast<float4*>(y + token * D + column);
  to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

}  // namespace
