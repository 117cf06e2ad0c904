// The MoE block for 128 to some thousand tokens: grouped products on wgmma. A cluster of two CTAs multiplies 512 weight
// rows with at most 96 pairs of one expert, and activations are read from L2 once for both.
// Contract in moe_int4_cluster.py; one source for scales in bf16, one for compact ones.
//
// plan, gather and combine: as in moe_int4_grouped.cuh, with tiles of at most 96 columns. gate_up and down: one launch
// each, one CTA per SM. Four warpgroups multiply (moe_int4_tall.cuh). In a fifth, a thread issues copies of weights and
// scales (boxes of 128 rows and 256 k of tensor maps), another one of activations: each CTA multicasts half of them to
// both.
//
// The width N of a product is part of the wgmma instruction. The kernel holds the code of all twelve widths, so that
// every tile uses the narrowest that fits and a product is one launch. Of n clusters, each takes every n-th piece of
// work (tile, two units of 256 weight rows), the widest tiles first: the pieces that clusters compute at the same time
// take equally long, and the last ones are short.
#pragma once
#include "moe/sm90/moe_int4_tall.cuh"
#include "moe/sm90/token_gather.cuh"

using namespace hopper;

namespace {

constexpr int STEP = 8, WIDEST = 96, CLASSES = WIDEST / STEP;  // pairs of a tile: class c has 8 (c + 1) columns
constexpr int CLUSTER = 2;

template <bool GATE_UP>
using Shared = Rings<GATE_UP, 3, 4, WIDEST * 128, CLUSTER>;
static_assert(Shared<false>::BYTES <= 227 * 1024, "shared memory of a CTA");

struct Plan {
  int ends[CLASSES];  // number of tiles of this class and of wider ones, which come first
  Tile tiles[1];
};

struct Args {
  const uint8_t* in;  // slabs of K
  Output to;
  const bf16* row;  // [E, rows], row scales of compact scales
  const Plan* plan;
  int K, units;  // units: of 256 weight rows
};

// The pieces of work of a cluster: every `step`-th one of (tile, CLUSTER neighbouring units), the units of a tile one
// after the other.
struct Pieces {
  int per_tile, first, step;
  __device__ __forceinline__ explicit Pieces(const Args& a)
      : per_tile(divide_up(a.units, CLUSTER)), first(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER) {}
  __device__ __forceinline__ int end(const Args& a, int c) const { return a.plan->ends[c] * per_tile; }
  __device__ __forceinline__ int unit(int work) const { return work % per_tile * CLUSTER + cluster_rank(); }
};

// The pieces of work of class CLASS, then those of the narrower ones.
template <bool GATE_UP, bool COMPACT, int CLASS = CLASSES - 1>
__device__ __forceinline__ void compute(const Args& a, const Shared<GATE_UP>& rings, Consumer<GATE_UP>& me, int work) {
  constexpr int N = STEP * (CLASS + 1);
  const Pieces pieces(a);
#pragma unroll 1
  for (const int end = pieces.end(a, CLASS); work < end; work += pieces.step) {
    const Tile tile = a.plan->tiles[work / pieces.per_tile];
    const int wanted = pieces.unit(work), unit = min(wanted, a.units - 1);
    float low_factor = 0.0f, high_factor = 0.0f;
    if (COMPACT) {
      const bf16* low = a.row + static_cast<int64_t>(tile.expert) * a.to.rows + unit * RESULTS<GATE_UP> + me.low_row;
      low_factor = __bfloat162float(*low) * (1.0f / 255.0f);
      high_factor = __bfloat162float(low[GATE_UP ? a.to.rows / 2 : 8]) * (1.0f / 255.0f);
    }
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
    multiply_tile<COMPACT, N>(d, rings, me, a.K / DEEP, low_factor, high_factor);
    if (wanted != unit) continue;  // past the last unit: this CTA only repeated the other CTA's work
    uint8_t* mine = rings.staged + me.group * STAGED<GATE_UP>;
#pragma unroll
    for (int first = 0; first < N; first += 32) store_results<N>(d, first, a.to, mine, me, tile, unit);
  }
  if constexpr (CLASS > 0) compute<GATE_UP, COMPACT, CLASS - 1>(a, rings, me, work);
}

template <bool GATE_UP, bool COMPACT>
__global__ void __launch_bounds__(THREADS, 1) product_kernel(const __grid_constant__ Args a,
                                                             const __grid_constant__ Maps maps) {
  using S = Shared<GATE_UP>;
  extern __shared__ uint8_t memory[];
  const S rings(memory);
  const int tid = threadIdx.x, warp = tid / 32;
  if (tid == 0) {
    rings.init();
    barriers_visible();
  }
  cluster_sync();
  const int blocks = a.K / DEEP;
  const Pieces pieces(a);

  if (warp >= WARPS) {
    registers_give<PRODUCER_REGISTERS>();
    if (warp == WARPS && elected()) {
      // Weights may be loaded before the wait: gather and gate_up let their successors start only after their own wait,
      // so the plan is complete.
      Ring to{0, 1};
      for (int work = pieces.first, end = pieces.end(a, 0); work < end; work += pieces.step) {
        const int unit = min(pieces.unit(work), a.units - 1);
        const int first = a.plan->tiles[work / pieces.per_tile].expert * a.to.rows + unit * RESULTS<GATE_UP>;
        for (int block = 0; block < blocks; block++) {
          uint8_t* stage = rings.weights + to.at * STAGE;
          uint64_t* barrier = rings.full + to.at;
          barrier_wait_to_refill(rings.empty + to.at, to.phase);
          barrier_expect(barrier, STAGE);
          load_weights<COMPACT>(stage, maps, first, GATE_UP ? a.to.rows / 2 : BOX, block, barrier);
          to.advance(S::STAGES);
        }
      }
    } else if (warp == WARPS + 1 && elected()) {
      wait_for_predecessor();
      const int rank = cluster_rank();
      Ring to{0, 1};
      int work = pieces.first;
      for (int c = CLASSES - 1; c >= 0; c--) {
        const int slab = STEP * (c + 1) * 128, share = slab / CLUSTER;
        for (const int end = pieces.end(a, c); work < end; work += pieces.step) {
          const int row = a.plan->tiles[work / pieces.per_tile].row;
          const uint8_t* from = a.in + static_cast<int64_t>(row / 8) * 1024 + rank * share;
          for (int block = 0; block < 2 * blocks; block++) {
            uint8_t* into = rings.inputs + to.at * S::INPUT + rank * share;
            barrier_wait(rings.in_empty + to.at, to.phase);
            barrier_expect(rings.in_full + to.at, 2 * slab);
#pragma unroll
            for (int i = 0; i < 2; i++) {
              bulk_load_to(into + i * S::SLAB, from, share, rings.in_full + to.at, (1 << CLUSTER) - 1);
              from += a.to.groups * 1024;
            }
            to.advance(S::INPUTS);
          }
        }
      }
    }
    __syncwarp();
  } else {
    registers_take<REGISTERS>();
    wait_for_predecessor();
    let_successor_start();  // only after the wait: down reads the plan before its own wait
    Consumer<GATE_UP> me;
    compute<GATE_UP, COMPACT>(a, rings, me, pieces.first);
  }
  cluster_sync();  // each CTA writes to the other's shared memory, so neither may end first
}

__global__ void __launch_bounds__(1024) plan_kernel(const int* ids, int pairs, int E, Plan* plan, int* position) {
  wait_for_predecessor();
  let_successor_start();
  __shared__ int counts[MAX_EXPERTS], next[MAX_EXPERTS], totals[32], of_class[CLASSES];
  const int tid = threadIdx.x;
  if (tid < CLASSES) of_class[tid] = 0;
  const int own = count_pairs(ids, pairs, E, counts, next, totals);
  // An expert's tiles follow each other and are of one class: CTAs that work at the same time read the same weights.
  const int number = divide_up(own, WIDEST), size = divide_up(divide_up(own, max(number, 1)), STEP) * STEP;
  int at = own ? atomicAdd(&of_class[size / STEP - 1], number) : 0;
  __syncthreads();
  if (tid < CLASSES) {
    int end = 0;
    for (int c = tid; c < CLASSES; c++) end += of_class[c];
    plan->ends[tid] = end;
  }
  if (own) {
    for (int c = size / STEP; c < CLASSES; c++) at += of_class[c];
    for (int first = 0; first < own; first += size) {
      plan->tiles[at++] = Tile{tid, next[tid] + first, min(size, own - first)};
    }
  }
  __syncthreads();
  place_pairs(ids, pairs, 1, E, next, position, nullptr);
}

template <bool GATE_UP, bool COMPACT>
int product(Args a, const Maps& maps, int processors, void* stream) {
  a.units = divide_up(GATE_UP ? a.to.rows / 2 : a.to.rows, RESULTS<GATE_UP>);
  return launch(product_kernel<GATE_UP, COMPACT>, dim3(processors / CLUSTER * CLUSTER), dim3(THREADS),
                Shared<GATE_UP>::BYTES, stream, CLUSTER, a, maps);
}

// x [T, D] with rows `stride` apart, ids and weights [T, k], shared [T, D] or null; y [T, D], or null: another kernel
// sums, from position and slabs.
// Workspace: plan int32 [12 + 3 (T k / 96 + E)], position int32 [T k], slabs bf16 [8 groups, D] (of x, then the rows of
// down), h bf16 [8 groups, I]. 8 groups >= T k + 7 min(E, T k) + 96 rows.
struct Block {
  const void* x;
  int64_t stride;
  const void *ids, *weights, *gate_up, *gate_up_scale, *gate_up_row, *down, *down_scale, *down_row, *shared;
  void *y, *plan, *position, *slabs, *h;
  int64_t T, k, E, D, I, groups, processors;
  void* stream;
};

// Returns 0, CUDA's error number, or -1 if the driver makes no tensor maps of these sizes.
template <bool COMPACT>
int run(const Block& b) {
  Plan* plan = static_cast<Plan*>(b.plan);
  int* position = static_cast<int*>(b.position);
  const int tokens = static_cast<int>(b.T), k = static_cast<int>(b.k), E = static_cast<int>(b.E);
  const int D = static_cast<int>(b.D), I = static_cast<int>(b.I), sms = static_cast<int>(b.processors);
  Maps up, back;
  if (!describe(&up, b.gate_up, b.gate_up_scale, b.E * 2 * I, D, COMPACT) ||
      !describe(&back, b.down, b.down_scale, b.E * D, I, COMPACT)) {
    return -1;
  }
  int failed = launch(plan_kernel, dim3(1), dim3(1024), 0, b.stream, 1, static_cast<const int*>(b.ids), tokens * k, E,
                      plan, position);
  if (failed) return failed;
  failed = launch(gather_kernel, dim3(tokens), dim3(256), 2 * D, b.stream, 1, static_cast<const bf16*>(b.x), b.stride,
                  static_cast<const int*>(position), k, D, b.groups, static_cast<uint8_t*>(b.slabs));
  if (failed) return failed;
  Args a = {static_cast<const uint8_t*>(b.slabs), {b.h, b.groups, 2 * I}, static_cast<const bf16*>(b.gate_up_row),
            plan, D, 0};
  failed = product<true, COMPACT>(a, up, sms, b.stream);
  if (failed) return failed;
  a = {static_cast<const uint8_t*>(b.h), {b.slabs, b.groups, D}, static_cast<const bf16*>(b.down_row), plan, I, 0};
  failed = product<false, COMPACT>(a, back, sms, b.stream);
  if (failed || !b.y) return failed;
  return launch(combine_kernel<true>, dim3(tokens, (D / 8 + 255) / 256), dim3(256), 0, b.stream, 1,
                static_cast<const bf16*>(b.slabs), static_cast<const int*>(position),
                static_cast<const float*>(b.weights), static_cast<const bf16*>(b.shared), k, D,
                static_cast<float*>(b.y));
}

}  // namespace
