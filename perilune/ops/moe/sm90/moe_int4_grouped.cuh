// The MoE block for many tokens: grouped products of INT4 weights, dequantised in registers, with tokens in bf16.
// Contract in moe_int4_grouped.py; one source for scales in bf16, one for compact ones.
//
// plan: pairs (token, choice) get rows sorted by expert, each expert's rows starting at a multiple of 8, and every
// expert's rows are cut into tiles of at most 256 columns. gather: copies each token's activations to its pairs' rows.
// gate_up and down: one launch per width N of tiles (a product's width is part of the wgmma instruction, and one kernel
// for all would not fit the registers), persistent CTAs of one producer thread and two warpgroups of 64 weight rows;
// every warp prefetches its own packed weights into a ring. combine: the weighted sum of a token's rows.
// The launches of one product overlap: one fills SMs that another leaves. Each waits for its predecessor at its end, so
// a kernel that waits for the last launch waits for all.
//
// Activations are stored as slabs (wgmma.cuh), [K / 64][rows / 8][1024 bytes]: B of 64 k is one contiguous copy. Each
// 128 k are permuted so that a lane multiplies its 16 bytes of packed weights, one whole group of 32, in 8 steps of
// 16 k: position 16 s + 8 half + 2 t + j holds k = 32 t + 8 (s / 2) + 2 (s mod 2) + half + 4 j (t is the lane mod 4;
// nibbles r and r + 4 of a word are unpacked together). So a lane needs one scale per row and 128 k.
//
// The rows of a gate_up tile are 32 of the gate and their 32 of up per warpgroup, a gate row and its up row in one
// thread, chosen so that the CTA's results are one slab of h in that order.
#pragma once
#include "moe/sm90/int4_wgmma.cuh"
#include "moe/sm90/token_gather.cuh"

using namespace hopper;

namespace {

constexpr int DEPTH = 4;  // blocks of 128 k in a warp's ring of weights
constexpr int CONSUMERS = 256;
constexpr int WARPS = CONSUMERS / 32;
constexpr int THREADS = CONSUMERS + 128;
constexpr int SHARED = 227 * 1024;
constexpr int CLUSTERED = 64;  // from this width on, two CTAs share every copy of activations

constexpr int CLASSES = 31;  // widths of tiles
__host__ __device__ constexpr int width_of(int c) { return 16 + 8 * c; }
using Planned = Planner<2, CLASSES>;

__global__ void __launch_bounds__(1024) plan_kernel(const int* ids, int pairs, int E, uint32_t classes,
                                                    Planned::Plan* plan, Tile* tiles, int capacity, int* position) {
  wait_for_predecessor();
  let_successor_start();
  Planned::plan(ids, pairs, 1, E, classes, plan, tiles, capacity, position, nullptr);
}

struct Args {
  const uint32_t* packed;  // [E, rows, K / 8]
  const uint8_t* scale;    // [E, rows, K / 32], bf16, or 8 bits
  const bf16* row;         // [E, rows], row scales of compact scales
  const uint8_t* in;       // slabs of K
  void* out;               // gate_up: slabs of h; down: [8 groups, rows] bf16
  const int* count;        // tiles of this width
  const Tile* tiles;
  int64_t groups;  // rows / 8 of the slabs
  int K, rows, units;  // units: tiles of weight rows
  int chained;         // the predecessor is a launch of the same product
};

template <bool GATE_UP, bool COMPACT, int N>
struct Sizes {
  static constexpr int CTAS = N <= 32 ? 2 : 1;  // per SM
  static constexpr int REGISTERS = CTAS == 2 ? 96 : 224, PRODUCER_REGISTERS = CTAS == 2 ? 48 : 56;
  static constexpr int SLABS = N <= 64 ? 2 : 1;  // slabs of 64 k in a stage
  static constexpr int STAGE = SLABS * N * 128;
  static constexpr int OUT = GATE_UP ? N * 128 : 2 * 64 * 128;
  static constexpr int SCALES = COMPACT ? 4 : 8;    // bytes for a row of a block
  static constexpr int PIECE = 1024 + 16 * SCALES;  // a warp's block: for each lane 16 bytes of two rows, and scales
  static constexpr int RING = DEPTH * WARPS * PIECE;
  static constexpr int FIT = (SHARED / CTAS - 2048 - OUT - RING) / STAGE;
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  static constexpr int BYTES = STAGES * STAGE + OUT + RING + 2 * 8 * STAGES + 1024;  // 1024: to align
};

template <int bytes>
__device__ __forceinline__ void copy_few(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(bytes)
               : "memory");
}

// The first of a thread's two rows of an expert's weights in a tile; the second is rows_apart rows after it.
template <bool GATE_UP>
__device__ __forceinline__ int first_row(int unit) {
  const int tid = threadIdx.x, group = tid / 128, w = tid / 32 % 4, g = tid % 32 / 4;
  return GATE_UP ? 128 * (unit / 2) + 32 * w + 8 * (2 * (unit % 2) + group) + g : 128 * unit + 64 * group + 16 * w + g;
}
template <bool GATE_UP>
__device__ __forceinline__ int rows_apart(const Args& a) {
  return GATE_UP ? a.rows / 2 : 8;
}

// A thread's loads of a tile's weights: 128 k of its two rows at a time. Of the four lanes with the same rows, lane 0
// loads the scales of the first row, lane 1 those of the second.
template <bool GATE_UP, int SCALES>
struct Stream {
  const uint32_t *low, *high;
  const uint8_t* scale;

  __device__ __forceinline__ void start(const Args& a, int expert, int unit) {
    const int t = threadIdx.x % 4, first = first_row<GATE_UP>(unit), second = first + rows_apart<GATE_UP>(a);
    const int64_t base = static_cast<int64_t>(expert) * a.rows;
    low = a.packed + (base + first) * (a.K / 8) + 4 * t;
    high = a.packed + (base + second) * (a.K / 8) + 4 * t;
    scale = a.scale + (base + (t % 2 ? second : first)) * (a.K / 128 * SCALES);
  }
  __device__ __forceinline__ void fetch(uint8_t* piece) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    copy16(piece + 16 * lane, low);
    copy16(piece + 512 + 16 * lane, high);
    if (t < 2) copy_few<SCALES>(piece + 1024 + SCALES * (lane / 4 + 8 * t), scale);
    low += 16;
    high += 16;
    scale += SCALES;
  }
};

template <bool GATE_UP, bool COMPACT, int N, int CLUSTER>
__global__ void __launch_bounds__(THREADS, Sizes<GATE_UP, COMPACT, N>::CTAS) product_kernel(const Args a) {
  using S = Sizes<GATE_UP, COMPACT, N>;
  extern __shared__ uint8_t memory[];
  uint8_t* stages = memory + (-shared_address(memory) & 1023);
  uint8_t* staged = stages + S::STAGES * S::STAGE;
  uint8_t* ring = staged + S::OUT;
  uint64_t* full = reinterpret_cast<uint64_t*>(ring + S::RING);
  uint64_t* empty = full + S::STAGES;
  const int tid = threadIdx.x, rank = CLUSTER > 1 ? cluster_rank() : 0;
  // The routing decides which weights are read, so no load may precede the wait.
  if (!a.chained) wait_for_predecessor();
  let_successor_start();

  // Work: (tile, CLUSTER neighbouring units), the units of a tile one after the other.
  const int per_tile = divide_up(a.units, CLUSTER), all = *a.count * per_tile;
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER, slabs = a.K / 64;
  if (all == 0) {
    if (a.chained) wait_for_predecessor();
    return;
  }
  if (tid == 0) {
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, CLUSTER * CONSUMERS / 32);
    }
    barriers_visible();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  if (tid >= CONSUMERS) {
    registers_give<S::PRODUCER_REGISTERS>();
    if (tid == CONSUMERS) {
      int stage = 0, phase = 1;
      for (int work = first; work < all; work += step) {
        const uint8_t* source = a.in + static_cast<int64_t>(a.tiles[work / per_tile].row / 8) * 1024;
        constexpr int PART = N * 128 / CLUSTER;
        for (int slab = 0; slab < slabs; slab += S::SLABS) {
          barrier_wait(empty + stage, phase);
          barrier_expect(full + stage, S::STAGE);
#pragma unroll
          for (int i = 0; i < S::SLABS; i++) {
            const uint8_t* from = source + (slab + i) * a.groups * 1024 + rank * PART;
            uint8_t* to = stages + stage * S::STAGE + i * N * 128 + rank * PART;
            if (CLUSTER > 1) bulk_load_to(to, from, PART, full + stage, (1 << CLUSTER) - 1);
            else bulk_load(to, from, PART, full + stage);
          }
          if (++stage == S::STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {
    registers_take<S::REGISTERS>();
    const int lane = tid % 32, group = tid / 128, w = tid / 32 % 4, g = lane / 4, t = lane % 4;
    float d[N / 2];
    uint32_t even[16], odd[16];
    int stage = 0, phase = 0, last = 0;
    auto release = [&](int which) {
      if (CLUSTER > 1) {
        if (lane < CLUSTER) barrier_arrive_at(empty + which, lane);
      } else {
        if (lane == 0) barrier_arrive(empty + which);
      }
    };
    auto unit_of = [&](int work) { return min(work % per_tile * CLUSTER + rank, a.units - 1); };
    // The weights of this CTA's tiles, block after block, DEPTH - 1 blocks ahead of the products.
    uint8_t* pieces = ring + tid / 32 * S::PIECE;
    Stream<GATE_UP, S::SCALES> stream;
    const int blocks = slabs / 2;
    int ahead_work = first, ahead_block = 0;
    uint32_t slot = 0, ahead_slot = 0;
    auto fetch = [&] {
      if (ahead_work < all) {
        if (ahead_block == 0) stream.start(a, a.tiles[ahead_work / per_tile].expert, unit_of(ahead_work));
        stream.fetch(pieces + ahead_slot * WARPS * S::PIECE);
        if (++ahead_block == blocks) {
          ahead_block = 0;
          ahead_work += step;
        }
      }
      copies_commit();
      ahead_slot = (ahead_slot + 1) % DEPTH;
    };
#pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) fetch();
    for (int work = first; work < all; work += step) {
      const Tile tile = a.tiles[work / per_tile];
      const int unit = unit_of(work);
      const bool real = work % per_tile * CLUSTER + rank < a.units;
      float low_factor = 0.0f, high_factor = 0.0f;
      if (COMPACT) {
        const bf16* factor = a.row + static_cast<int64_t>(tile.expert) * a.rows + first_row<GATE_UP>(unit);
        low_factor = __bfloat162float(factor[0]) * (1.0f / 255.0f);
        high_factor = __bfloat162float(factor[rows_apart<GATE_UP>(a)]) * (1.0f / 255.0f);
      }
#pragma unroll
      for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
      for (int block = 0; block < blocks; block++) {
        copies_wait<DEPTH - 2>();
        __syncwarp();
        const uint8_t* piece = pieces + slot * WARPS * S::PIECE;
        const uint4 low = *reinterpret_cast<const uint4*>(piece + 16 * lane);
        const uint4 high = *reinterpret_cast<const uint4*>(piece + 512 + 16 * lane);
        // The scale of the warp's row `row` (g or g + 8) for its group t of 32 k.
        auto scale_of = [&](int row, float factor) {
          const uint8_t* at = piece + 1024 + S::SCALES * row + S::SCALES / 4 * t;
          if (!COMPACT) return Scale(*reinterpret_cast<const uint16_t*>(at) * 0x10001u);
          const float scale = *at * factor;
          return Scale(narrow(scale, scale));
        };
        const Scale ls = scale_of(g, low_factor), hs = scale_of(g + 8, high_factor);
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
        slot = (slot + 1) % DEPTH;
        fetch();
        auto multiply = [&](uint32_t(&a)[16], int half) {
          unpack(a, low_words + 2 * half, high_words + 2 * half, ls, hs);
          const bool fresh = S::SLABS == 1 || half == 0;
          if (fresh) barrier_wait(full + stage, phase);
          const uint64_t b = slab_descriptor(stages + stage * S::STAGE + (fresh ? 0 : N * 128));
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < 4; s++) wgmma<N>(d, a + 4 * s, b + 2 * s);
          wgmma_commit();
          wgmma_wait<1>();  // for the other half's products
          if (fresh && (block || half)) release(last);
          if (S::SLABS == 2 && half == 0) return;
          last = stage;
          if (++stage == S::STAGES) {
            stage = 0;
            phase ^= 1;
          }
        };
        multiply(even, 0);
        multiply(odd, 1);
      }
      wgmma_wait<0>();
      release(last);

      if (GATE_UP) {
        if (tid == 0) bulk_stores_read();
        named_sync(1, CONSUMERS);
        const int chunk = 4 * group + (g & 3);
        uint8_t* to = staged + 4 * w + 2 * (g >> 2);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
          const float gate = d[4 * (i / 2) + i % 2] * SMALL, up = d[4 * (i / 2) + i % 2 + 2] * SMALL;
          const int column = 2 * t + i % 2;  // mod 8
          *reinterpret_cast<bf16*>(to + (8 * (i / 2) + column) * 128 + (chunk ^ column) * 16) =
              __float2bfloat16(__fdividef(gate, 1.0f + __expf(-gate)) * up);
        }
        shared_writes_visible();
        named_sync(1, CONSUMERS);
        if (tid == 0 && real) {
          uint8_t* h = static_cast<uint8_t*>(a.out) + (unit * a.groups + tile.row / 8) * 1024;
          bulk_store(h, staged, divide_up(tile.count, 8) * 1024);  // not into the next expert's rows
        }
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; i++) d[i] *= SMALL;
        uint8_t* mine = staged + group * 64 * 128;
        bf16* part = static_cast<bf16*>(a.out) + static_cast<int64_t>(tile.row) * a.rows + 128 * unit + 64 * group;
#pragma unroll
        for (int pass = 0; pass < N; pass += 64) {
          named_sync(1 + group, 128);
#pragma unroll
          for (int c = pass; c < (pass + 64 < N ? pass + 64 : N); c += 16) {
            const int i = c / 2, column = c - pass + lane / 16 * 8 + lane % 8, chunk = 2 * w + lane / 8 % 2;
            uint8_t* to = mine + column * 128 + (chunk ^ (lane % 8)) * 16;
            const uint32_t a0 = narrow(d[i], d[i + 1]), a1 = narrow(d[i + 2], d[i + 3]);
            if (c + 16 <= N) store_transposed(to, a0, a1, narrow(d[i + 4], d[i + 5]), narrow(d[i + 6], d[i + 7]));
            else store_transposed(to, a0, a1);
          }
          named_sync(1 + group, 128);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int column = 16 * i + tid % 128 / 8, chunk = tid % 8;
            if (real && pass + column < tile.count)
              *reinterpret_cast<uint4*>(part + static_cast<int64_t>(pass + column) * a.rows + 8 * chunk) =
                  *reinterpret_cast<const uint4*>(mine + column * 128 + (chunk ^ (column % 8)) * 16);
          }
        }
      }
    }
    if (GATE_UP && tid == 0) bulk_stores_done();
  }
  if (a.chained) wait_for_predecessor();
  if (CLUSTER > 1) cluster_sync();
}

template <bool GATE_UP, bool COMPACT, int N, int CLUSTER>
int product(const Args& a, int processors, void* stream) {
  using S = Sizes<GATE_UP, COMPACT, N>;
  return launch(product_kernel<GATE_UP, COMPACT, N, CLUSTER>, dim3(processors / CLUSTER * CLUSTER * S::CTAS),
                dim3(THREADS), S::BYTES, stream, CLUSTER, a);
}

// A launch for each of `classes`, the widest tiles first: the last pieces of work are short.
template <bool GATE_UP, bool COMPACT, int CLASS = CLASSES - 1>
int products(Args a, uint32_t classes, const Planned::Plan* plan, const Tile* tiles, int capacity, int processors,
             void* stream) {
  constexpr int N = width_of(CLASS), CLUSTER = N >= CLUSTERED ? 2 : 1;
  if (classes >> CLASS & 1) {
    a.count = plan->tiles + CLASS;
    a.tiles = tiles + static_cast<int64_t>(CLASS) * capacity;
    const int failed = product<GATE_UP, COMPACT, N, CLUSTER>(a, processors, stream);
    if (failed) return failed;
    a.chained = 1;
  }
  if constexpr (CLASS > 0)
    return products<GATE_UP, COMPACT, CLASS - 1>(a, classes, plan, tiles, capacity, processors, stream);
  return 0;
}

// x [T, D] with rows `stride` apart, ids and weights [T, k], shared [T, D] or null; y [T, D], or null: the pairs'
// results stay in slabs, unsummed. classes: plan_kernel's.
// Workspace: plan int32 [93 + 3 * 31 * capacity], position int32 [T k], slabs bf16 [8 groups, D] (of x, then the rows
// of down), h bf16 [8 groups, I]. capacity >= T k / 256 + E tiles; 8 groups >= T k + 7 min(E, T k) + 256 rows.
struct Block {
  const void* x;
  int64_t stride;
  const void *ids, *weights, *gate_up, *gate_up_scale, *gate_up_row, *down, *down_scale, *down_row, *shared;
  void *y, *plan, *position, *slabs, *h;
  int64_t T, k, E, D, I, classes, capacity, groups, processors;
  void* stream;
};

template <bool COMPACT>
int run(const Block& b) {
  Planned::Plan* plan = static_cast<Planned::Plan*>(b.plan);
  Tile* tiles = reinterpret_cast<Tile*>(plan + 1);
  int* position = static_cast<int*>(b.position);
  const int pairs = static_cast<int>(b.T * b.k), capacity = static_cast<int>(b.capacity);
  const int D = static_cast<int>(b.D), I = static_cast<int>(b.I), sms = static_cast<int>(b.processors);
  const uint32_t classes = static_cast<uint32_t>(b.classes) | 1u << (CLASSES - 1);
  int failed = launch(plan_kernel, dim3(1), dim3(1024), 0, b.stream, 1, static_cast<const int*>(b.ids), pairs,
                      static_cast<int>(b.E), classes, plan, tiles, capacity, position);
  if (failed) return failed;
  failed = launch(gather_kernel, dim3(b.T), dim3(256), 2 * D, b.stream, 1, static_cast<const bf16*>(b.x), b.stride,
                  static_cast<const int*>(position), static_cast<int>(b.k), D, b.groups,
                  static_cast<uint8_t*>(b.slabs));
  if (failed) return failed;
  Args a = {static_cast<const uint32_t*>(b.gate_up),  static_cast<const uint8_t*>(b.gate_up_scale),
            static_cast<const bf16*>(b.gate_up_row),  static_cast<const uint8_t*>(b.slabs), b.h, nullptr, nullptr,
            b.groups, D, 2 * I, I / 64, 0};
  failed = products<true, COMPACT>(a, classes, plan, tiles, capacity, sms, b.stream);
  if (failed) return failed;
  a = {static_cast<const uint32_t*>(b.down),  static_cast<const uint8_t*>(b.down_scale),
       static_cast<const bf16*>(b.down_row),  static_cast<const uint8_t*>(b.h), b.slabs, nullptr, nullptr,
       b.groups, I, D, D / 128, 0};
  failed = products<false, COMPACT>(a, classes, plan, tiles, capacity, sms, b.stream);
  if (failed || !b.y) return failed;
  return launch(combine_kernel<false>, dim3(b.T, (D / 8 + 255) / 256), dim3(256), 0, b.stream, 1,
                static_cast<const bf16*>(b.slabs), static_cast<const int*>(position),
                static_cast<const float*>(b.weights), static_cast<const bf16*>(b.shared), static_cast<int>(b.k), D,
                static_cast<float*>(b.y));
}

}  // namespace
