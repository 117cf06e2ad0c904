// Products of 256 weight rows with a few tokens of one expert, of moe_int4_tall.cu and moe_int4_cluster.cuh. Weights
// with their scales and activations come through rings in shared memory; four warpgroups multiply, 64 rows each.
//
// A thread's rows: row g of the tensor core's A is row g / 2 + 4 (g mod 2) of 8, so that the 8 lanes that read 16 bytes
// at a time find rows 4 apart: their swizzled chunks share no bank. Rows of down come out in that order: `combine` puts
// them back.
#pragma once
#include "cuda/tensor_map.cuh"
#include "moe/sm90/int4_wgmma.cuh"
#include "moe/sm90/token_permute.cuh"

namespace {

using namespace hopper;

constexpr int GROUPS = 4;  // multiplying warpgroups
constexpr int WARPS = 4 * GROUPS;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int REGISTERS = 112, PRODUCER_REGISTERS = 32;  // per thread; in sum as 640 threads of 96
constexpr int BOX = 128;       // rows of a box
constexpr int ROWS = 2 * BOX;  // rows of a stage of weights
constexpr int DEEP = 256;      // k of a stage of weights; of activations half
constexpr int WEIGHTS = ROWS * DEEP / 2, STAGE = WEIGHTS + ROWS * 16;

template <bool GATE_UP>
constexpr int RESULTS = GATE_UP ? BOX : ROWS;  // results of 256 weight rows
template <bool GATE_UP>
constexpr int STAGED = 32 * (GATE_UP ? 64 : 128);  // bytes: results of 32 columns of a warpgroup

struct Maps {
  CUtensorMap weights, scales;
};

// Makes the maps of weights [rows, K] and their scales; false if the driver refuses.
inline bool describe(Maps* m, const void* packed, const void* scale, int64_t rows, int64_t K, bool compact) {
  const int64_t scales = compact ? K / 32 : K / 16;
  const int64_t deep = K / DEEP;
  return maps::describe(&m->weights, packed, maps::SWIZZLED_BYTES, {128, rows, deep}, {K / 2, 128}, {128, BOX, 1}) &&
         maps::describe(&m->scales, scale, maps::BYTES, {scales, rows, 1}, {scales, scales * rows}, {16, BOX, 1});
}

struct Ring {
  int at, phase;
  __device__ __forceinline__ void advance(int size) {
    if (++at == size) at = 0, phase ^= 1;
  }
};

// Shared memory: rings of STAGES stages of weights and of INPUTS stages of activations (128 k, two slabs SLAB bytes
// apart, multicast to all CTAs of a cluster); staged results; barriers.
template <bool GATE_UP, int STAGES_, int INPUTS_, int SLAB_, int CLUSTER_>
struct Rings {
  static constexpr int STAGES = STAGES_, INPUTS = INPUTS_, SLAB = SLAB_, INPUT = 2 * SLAB, CLUSTER = CLUSTER_;
  static constexpr int REST = 1024 + 512;  // bytes to align; for barriers
  static constexpr int BYTES = REST + STAGES * STAGE + GROUPS * STAGED<GATE_UP> + INPUTS * INPUT;
  uint8_t *weights, *inputs, *staged;
  uint64_t *full, *empty, *in_full, *in_empty;  // full, empty: of weights

  __device__ __forceinline__ explicit Rings(uint8_t* memory) {
    weights = memory + (-shared_address(memory) & 1023);
    inputs = weights + STAGES * STAGE;
    staged = inputs + INPUTS * INPUT;
    full = reinterpret_cast<uint64_t*>(staged + GROUPS * STAGED<GATE_UP>);
    empty = full + STAGES;
    in_full = empty + STAGES;
    in_empty = in_full + INPUTS;
  }
  __device__ __forceinline__ uint64_t* end() const { return in_empty + INPUTS; }
  __device__ __forceinline__ void init() const {  // by one thread
    for (int i = 0; i < STAGES; i++) barrier_init(full + i, 1), barrier_init(empty + i, WARPS);
    for (int i = 0; i < INPUTS; i++) barrier_init(in_full + i, 1), barrier_init(in_empty + i, CLUSTER * WARPS);
  }
};

// By one thread: issues copies of 256 k of weights and their scales, of 128 rows from `first` on and of 128 rows from
// `first` + `apart` on.
template <bool COMPACT>
__device__ __forceinline__ void load_weights(uint8_t* stage, const Maps& maps, int first, int apart, int block,
                                             uint64_t* barrier) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first + half * apart;
    tensor_load_once(stage + half * BOX * 128, &maps.weights, 0, row, block, barrier);
    tensor_load_once(stage + WEIGHTS + half * BOX * 16, &maps.scales, (COMPACT ? block / 2 : block) * 16, row, 0,
                     barrier);
  }
}

// A consumer thread and its positions in the rings.
template <bool GATE_UP>
struct Consumer {
  int group, w, lane, g, t, p, low_row, high_row;  // rows of a stage
  Ring from{0, 0}, in{0, 0};
  __device__ __forceinline__ Consumer() {
    const int tid = threadIdx.x;
    lane = tid % 32, group = tid / 32 / 4, w = tid / 32 % 4, g = lane / 4, t = lane % 4;
    p = g / 2 + g % 2 * 4;  // this lane's row of 8
    low_row = (GATE_UP ? 32 * w + 8 * group : 64 * group + 16 * w) + p;
    high_row = low_row + (GATE_UP ? BOX : 8);
  }
};

// d += 256 weight rows times the N columns of a tile. Factors: row scales / 255 of the thread's two rows, if COMPACT.
template <bool COMPACT, int N, bool GATE_UP, int STAGES, int INPUTS, int SLAB, int CLUSTER>
__device__ __forceinline__ void multiply_tile(float (&d)[N / 2],
                                              const Rings<GATE_UP, STAGES, INPUTS, SLAB, CLUSTER>& rings,
                                              Consumer<GATE_UP>& me, int blocks, float low_factor, float high_factor) {
  const auto release_inputs = [&](int which) {
    __syncwarp();
    if (CLUSTER > 1) {
      if (me.lane < CLUSTER) barrier_arrive_at(rings.in_empty + which, me.lane);
    } else {
      if (me.lane == 0) barrier_arrive(rings.in_empty + which);
    }
  };
  uint32_t even[16], odd[16];
  int before = 0;  // the activation stage of the products that were issued last
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    barrier_wait(rings.full + me.from.at, me.from.phase);
    const uint8_t* stage = rings.weights + me.from.at * STAGE;
#pragma unroll
    for (int part = 0; part < 2; part++) {  // 128 k each
      const int chunk = ((4 * part + me.t) ^ me.p) * 16;
      const uint4 low = *reinterpret_cast<const uint4*>(stage + me.low_row * 128 + chunk);
      const uint4 high = *reinterpret_cast<const uint4*>(stage + me.high_row * 128 + chunk);
      const auto scale_of = [&](int row, float factor) {
        const uint8_t* at = stage + WEIGHTS + row * 16 + (COMPACT ? block % 2 * 8 + 4 * part : 8 * part + me.t) + me.t;
        if (!COMPACT) return Scale(*reinterpret_cast<const uint16_t*>(at) * 0x10001u);
        const float scale = *at * factor;  // a box has compact scales of 512 k
        return Scale(narrow(scale, scale));
      };
      const Scale ls = scale_of(me.low_row, low_factor), hs = scale_of(me.high_row, high_factor);
      const uint32_t low_words[4] = {low.x, low.y, low.z, low.w};
      const uint32_t high_words[4] = {high.x, high.y, high.z, high.w};
      const auto multiply = [&](uint32_t(&x)[16], int half) {
        unpack(x, low_words + 2 * half, high_words + 2 * half, ls, hs);
        if (half == 0) barrier_wait(rings.in_full + me.in.at + part, me.in.phase);
        const uint64_t b = slab_descriptor(rings.inputs + (me.in.at + part) * 2 * SLAB + half * SLAB);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) wgmma<N>(d, x + 4 * s, b + 2 * s);
        wgmma_commit();
        wgmma_wait<1>();  // for the other half's products
        if (half) return;
        if (part == 1) release_inputs(me.in.at);
        if (part == 0 && block > 0) release_inputs(before);
      };
      multiply(even, 0);
      if (part == 1) {
        __syncwarp();
        if (me.lane == 0) barrier_arrive(rings.empty + me.from.at);
      }
      multiply(odd, 1);
    }
    me.from.advance(STAGES);
    before = me.in.at + 1;
    me.in.advance(INPUTS), me.in.advance(INPUTS);
  }
  wgmma_wait<0>();
  release_inputs(before);
}

// Destination of results: slabs of h for gate_up, [8 groups, rows] bf16 for down.
struct Output {
  void* out;
  int64_t groups;  // rows / 8 of the slabs
  int rows;
};

// h = silu(gate) * up of 32 columns of a tile, from `first` on. `mine`: STAGED bytes of the warpgroup.
template <int N>
__device__ __forceinline__ void store_results(const float (&d)[N / 2], int first, const Output& to, uint8_t* mine,
                                              const Consumer<true>& me, const Tile& tile, int unit) {
  named_sync(1 + me.group, 128);
#pragma unroll
  for (int i = first / 2; i < (first + 32 < N ? first + 32 : N) / 2; i += 4) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float gate = d[i + e] * SMALL, up = d[i + e + 2] * SMALL;
      const int column = i * 2 - first + 2 * me.t + e;
      *reinterpret_cast<bf16*>(mine + column * 64 + (me.g / 2 ^ me.t) * 16 + 4 * me.w + me.g % 2 * 2) =
          __float2bfloat16(__fdividef(gate, 1.0f + __expf(-gate)) * up);
    }
  }
  named_sync(1 + me.group, 128);
  const int column = threadIdx.x % 128 / 4, chunk = threadIdx.x % 4;
  if (first + column < tile.count) {
    const int slab = unit * 2 + me.group / 2;
    uint8_t* h = static_cast<uint8_t*>(to.out) + (slab * to.groups + (tile.row + first + column) / 8) * 1024;
    *reinterpret_cast<uint4*>(h + column % 8 * 128 + ((me.group % 2 * 4 + chunk) ^ column % 8) * 16) =
        *reinterpret_cast<const uint4*>(mine + column * 64 + (chunk ^ column / 2 % 4) * 16);
  }
}

// Rows of down of 32 columns of a tile.
template <int N>
__device__ __forceinline__ void store_results(const float (&d)[N / 2], int first, const Output& to, uint8_t* mine,
                                              const Consumer<false>& me, const Tile& tile, int unit) {
  named_sync(1 + me.group, 128);
#pragma unroll
  for (int c = first; c < (first + 32 < N ? first + 32 : N); c += 16) {
    const int column = c - first + me.lane / 16 * 8 + me.lane % 8, chunk = 2 * me.w + me.lane / 8 % 2;
    const float* v = d + c / 2;
    uint8_t* at = mine + column * 128 + (chunk ^ (me.lane % 8)) * 16;
    const uint32_t a0 = narrow(v[0] * SMALL, v[1] * SMALL), a1 = narrow(v[2] * SMALL, v[3] * SMALL);
    if (c + 16 <= N) {
      store_transposed(at, a0, a1, narrow(v[4] * SMALL, v[5] * SMALL), narrow(v[6] * SMALL, v[7] * SMALL));
    } else {
      store_transposed(at, a0, a1);
    }
  }
  named_sync(1 + me.group, 128);
  const int row = unit * RESULTS<false> + 64 * me.group;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = 16 * i + threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
    if (first + column < tile.count && row < to.rows) {
      bf16* at = static_cast<bf16*>(to.out) + static_cast<int64_t>(tile.row + first + column) * to.rows + row;
      *reinterpret_cast<uint4*>(at + 8 * chunk) =
          *reinterpret_cast<const uint4*>(mine + column * 128 + (chunk ^ (column % 8)) * 16);
    }
  }
}

}  // namespace
