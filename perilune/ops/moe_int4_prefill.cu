// The MoE block for many tokens: grouped products of INT4 weights, dequantised in registers, with tokens in bf16.
// Contract in moe_int4_prefill.py.
//
// plan: pairs (token, choice) get rows sorted by expert, each expert's rows starting at a multiple of 8, and every
// expert's rows are cut into tiles of at most 256 columns. gather: copies each token's activations to its pairs' rows.
// gate_up and down: one launch per width N of tiles (a product's width is part of the instruction, and one kernel for
// all would not fit the registers), persistent CTAs of one producing thread and two warpgroups of 64 weight rows; every
// warp keeps a ring of its own packed weights on their way. combine: the weighted sum of a token's rows.
//
// Activations lie as slabs (wgmma.cuh), [K / 64][rows / 8][1024 bytes]: B of 64 k is one contiguous copy. Inside each
// 128 k the order is permuted so that a lane's 16 bytes of packed weights, one whole group of 32, are what it
// multiplies in 8 steps of 16 k: position 16 s + 8 half + 2 t + j holds k = 32 t + 8 (s / 2) + 2 (s mod 2) + half + 4 j
// (t is the lane mod 4; nibbles r and r + 4 of a word come out together). So a lane needs one scale per row and 128 k.
//
// The rows of a gate_up tile are 32 of the gate and their 32 of up per warpgroup, a gate row and its up row in one
// thread, chosen so that the CTA makes one slab of h in that order.
#include "wgmma.cuh"

using namespace hopper;

namespace {

constexpr int WIDEST = 256;  // columns of a tile
constexpr int CLASSES = 15;  // of tiles, by width
__host__ __device__ constexpr int width_of(int c) {
  const int widths[CLASSES] = {16, 32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256};
  return widths[c];
}
constexpr int DEPTH = 4;     // blocks of 128 k of weights on their way to a warp
constexpr int PIECE = 1152;  // bytes of a warp's block: 16 of two rows for each lane, 8 of scales for each of 16 rows
constexpr int MAX_EXPERTS = 1024;
constexpr int CONSUMERS = 256;
constexpr int WARPS = CONSUMERS / 32;
constexpr int THREADS = CONSUMERS + 128;
constexpr int SHARED = 227 * 1024;
constexpr int CLUSTERED = 64;  // from this width on, two CTAs share every copy of activations

struct Tile {
  int expert, row, count;  // row: the first, a multiple of 8
};

struct Plan {
  int tiles[CLASSES];  // of each width; the tiles themselves lie behind
};

struct Args {
  const uint32_t* packed;  // [E, rows, K / 8]
  const uint16_t* scale;   // [E, rows, K / 32]
  const uint8_t* in;       // slabs of K
  void* out;               // gate_up: slabs of h; down: [8 groups, rows] bf16
  const int* count;        // tiles of this width
  const Tile* tiles;
  int64_t groups;  // rows / 8 of the slabs
  int K, rows, units;  // units: tiles of weight rows
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// ---- plan, gather, combine ----

__global__ void __launch_bounds__(1024) plan_kernel(const int* ids, int pairs, int E, Plan* plan, Tile* tiles,
                                                    int capacity, int* position) {
  __shared__ int counts[MAX_EXPERTS], next[MAX_EXPERTS], totals[32], of_width[CLASSES], widths[CLASSES];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  wait_for_predecessor();
  let_successor_start();
  counts[tid] = 0;
  if (tid < CLASSES) {
    of_width[tid] = 0;
    widths[tid] = width_of(tid);
  }
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
      int c = 0;
      while (widths[c] < count) c++;
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

// ---- the grouped product ----

template <bool GATE_UP, int N>
struct Sizes {
  static constexpr int CTAS = N <= 32 ? 2 : 1;  // per SM
  static constexpr int REGISTERS = CTAS == 2 ? 96 : 224, PRODUCER_REGISTERS = CTAS == 2 ? 48 : 56;
  static constexpr int STAGE = N * 128;         // 64 k
  static constexpr int OUT = GATE_UP ? N * 128 : 2 * 64 * 128;
  static constexpr int RING = DEPTH * WARPS * PIECE;
  static constexpr int FIT = (SHARED / CTAS - 2048 - OUT - RING) / STAGE;
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  static constexpr int BYTES = STAGES * STAGE + OUT + RING + 2 * 8 * STAGES + 1024;  // 1024: to align
};

// Constants in registers that the compiler cannot see through: as literals they would cost an instruction per use.
struct Magic {
  uint32_t exponent, offset;
  __device__ __forceinline__ Magic() {
    asm volatile("mov.b32 %0, 0x43004300; mov.b32 %1, 0x43084308;" : "=r"(exponent), "=r"(offset));
  }
};

// Two values, nibbles r and r + 4 of the word shifted by 4 r, times the scale: exact, then rounded once.
__device__ __forceinline__ uint32_t dequantize(uint32_t word, uint32_t scale, const Magic& magic) {
  uint32_t v;
  asm("{ .reg .b32 q; lop3.b32 q, %1, 0x000f000f, %2, 0xea;"  // 128 + q
      " sub.rn.bf16x2 q, q, %3; mul.rn.bf16x2 %0, q, %4; }"
      : "=r"(v)
      : "r"(word), "r"(magic.exponent), "r"(magic.offset), "r"(scale));
  return v;
}

// A of 4 steps of 16 k from two words of the thread's two rows.
__device__ __forceinline__ void unpack(uint32_t (&a)[16], const uint32_t* low, const uint32_t* high,
                                       uint32_t low_scale, uint32_t high_scale, const Magic& magic) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int shift = 4 * (2 * (s % 2) + half);
      a[4 * s + 2 * half] = dequantize(low[s / 2] >> shift, low_scale, magic);
      a[4 * s + 2 * half + 1] = dequantize(high[s / 2] >> shift, high_scale, magic);
    }
  }
}

__device__ __forceinline__ void store_transposed(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void copy8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// A thread's place in the weights of a tile: its two rows, of which it fetches 128 k at a time; of the four lanes with
// the same rows, the first two fetch the scales of the one and the other.
template <bool GATE_UP>
struct Stream {
  const uint32_t *low, *high;
  const uint16_t* scale;

  __device__ __forceinline__ void start(const Args& a, int expert, int unit) {
    const int tid = threadIdx.x, group = tid / 128, w = tid / 32 % 4, g = tid % 32 / 4, t = tid % 4;
    const int first = GATE_UP ? 128 * (unit / 2) + 32 * w + 8 * (2 * (unit % 2) + group) + g
                              : 128 * unit + 64 * group + 16 * w + g;
    const int second = first + (GATE_UP ? a.rows / 2 : 8);
    const int64_t base = static_cast<int64_t>(expert) * a.rows;
    low = a.packed + (base + first) * (a.K / 8) + 4 * t;
    high = a.packed + (base + second) * (a.K / 8) + 4 * t;
    scale = a.scale + (base + (t % 2 ? second : first)) * (a.K / 32);
  }
  __device__ __forceinline__ void fetch(uint8_t* piece) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    copy16(piece + 16 * lane, low);
    copy16(piece + 512 + 16 * lane, high);
    if (t < 2) copy8(piece + 1024 + 8 * (lane / 4 + 8 * t), scale);
    low += 16;
    high += 16;
    scale += 4;
  }
};

template <bool GATE_UP, int N, int CLUSTER>
__global__ void __launch_bounds__(THREADS, Sizes<GATE_UP, N>::CTAS) product_kernel(const Args a) {
  using S = Sizes<GATE_UP, N>;
  extern __shared__ uint8_t memory[];
  uint8_t* stages = memory + (-shared_address(memory) & 1023);
  uint8_t* staged = stages + S::STAGES * S::STAGE;
  uint8_t* ring = staged + S::OUT;
  uint64_t* full = reinterpret_cast<uint64_t*>(ring + S::RING);
  uint64_t* empty = full + S::STAGES;
  const int tid = threadIdx.x, rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (tid == 0) {
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, CLUSTER * CONSUMERS / 32);
    }
    barriers_visible();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  // Nothing may come before the wait: which weights are read depends on the routing.
  wait_for_predecessor();
  let_successor_start();

  // Work: (tile, CLUSTER neighbouring units), the units of a tile one after the other.
  const int per_tile = divide_up(a.units, CLUSTER), all = *a.count * per_tile;
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER, slabs = a.K / 64;

  if (tid >= CONSUMERS) {
    registers_give<S::PRODUCER_REGISTERS>();
    if (tid == CONSUMERS) {
      int stage = 0, phase = 1;
      for (int work = first; work < all; work += step) {
        const uint8_t* source = a.in + static_cast<int64_t>(a.tiles[work / per_tile].row / 8) * 1024;
        constexpr int PART = S::STAGE / CLUSTER;
        for (int slab = 0; slab < slabs; slab++) {
          barrier_wait(empty + stage, phase);
          barrier_expect(full + stage, S::STAGE);
          const uint8_t* from = source + slab * a.groups * 1024 + rank * PART;
          uint8_t* to = stages + stage * S::STAGE + rank * PART;
          if (CLUSTER > 1) bulk_load_to(to, from, PART, full + stage, (1 << CLUSTER) - 1);
          else bulk_load(to, from, PART, full + stage);
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
    const Magic magic;
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
    uint8_t* pieces = ring + tid / 32 * PIECE;
    Stream<GATE_UP> stream;
    const int blocks = slabs / 2;
    int slot = 0, ahead_work = first, ahead_block = 0, ahead_slot = 0;
    auto fetch = [&] {
      if (ahead_work < all) {
        if (ahead_block == 0) stream.start(a, a.tiles[ahead_work / per_tile].expert, unit_of(ahead_work));
        stream.fetch(pieces + ahead_slot * WARPS * PIECE);
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
#pragma unroll
      for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
      for (int block = 0; block < blocks; block++) {
        copies_wait<DEPTH - 2>();
        __syncwarp();
        const uint8_t* piece = pieces + slot * WARPS * PIECE;
        const uint4 low = *reinterpret_cast<const uint4*>(piece + 16 * lane);
        const uint4 high = *reinterpret_cast<const uint4*>(piece + 512 + 16 * lane);
        const uint32_t ls = *reinterpret_cast<const uint16_t*>(piece + 1024 + 8 * g + 2 * t) * 0x10001u;
        const uint32_t hs = *reinterpret_cast<const uint16_t*>(piece + 1088 + 8 * g + 2 * t) * 0x10001u;
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
        slot = (slot + 1) % DEPTH;
        fetch();
        unpack(even, low_words, high_words, ls, hs, magic);
        barrier_wait(full + stage, phase);
        uint64_t b = slab_descriptor(stages + stage * S::STAGE);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) wgmma<N>(d, even + 4 * s, b + 2 * s);
        wgmma_commit();
        wgmma_wait<1>();
        if (block) release(last);
        last = stage;
        if (++stage == S::STAGES) {
          stage = 0;
          phase ^= 1;
        }

        unpack(odd, low_words + 2, high_words + 2, ls, hs, magic);
        barrier_wait(full + stage, phase);
        b = slab_descriptor(stages + stage * S::STAGE);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) wgmma<N>(d, odd + 4 * s, b + 2 * s);
        wgmma_commit();
        wgmma_wait<1>();
        release(last);
        last = stage;
        if (++stage == S::STAGES) {
          stage = 0;
          phase ^= 1;
        }
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
          const float gate = d[4 * (i / 2) + i % 2], up = d[4 * (i / 2) + i % 2 + 2];
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
        uint8_t* mine = staged + group * 64 * 128;
        bf16* part = static_cast<bf16*>(a.out) + static_cast<int64_t>(tile.row) * a.rows + 128 * unit + 64 * group;
#pragma unroll
        for (int pass = 0; pass < N; pass += 64) {
          named_sync(1 + group, 128);
#pragma unroll
          for (int c = pass; c < (pass + 64 < N ? pass + 64 : N); c += 16) {
            const int i = c / 2, column = c - pass + lane / 16 * 8 + lane % 8, chunk = 2 * w + lane / 8 % 2;
            store_transposed(mine + column * 128 + (chunk ^ (lane % 8)) * 16, narrow(d[i], d[i + 1]),
                             narrow(d[i + 2], d[i + 3]), narrow(d[i + 4], d[i + 5]), narrow(d[i + 6], d[i + 7]));
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
  if (CLUSTER > 1) cluster_sync();
}

template <bool GATE_UP, int N, int CLUSTER>
int product(Args a, const Plan* plan, const Tile* tiles, int capacity, int width, int processors, void* stream) {
  using S = Sizes<GATE_UP, N>;
  a.count = plan->tiles + width;
  a.tiles = tiles + static_cast<int64_t>(width) * capacity;
  return launch(product_kernel<GATE_UP, N, CLUSTER>, dim3(processors / CLUSTER * CLUSTER * S::CTAS), dim3(THREADS),
                S::BYTES, stream, CLUSTER, a);
}

template <bool GATE_UP, int WIDTH = 0>
int products(const Args& a, const Plan* plan, const Tile* tiles, int capacity, int processors, void* stream) {
  constexpr int N = width_of(WIDTH), CLUSTER = N >= CLUSTERED ? 2 : 1;
  const int failed = product<GATE_UP, N, CLUSTER>(a, plan, tiles, capacity, WIDTH, processors, stream);
  if (failed) return failed;
  if constexpr (WIDTH + 1 < CLASSES)
    return products<GATE_UP, WIDTH + 1>(a, plan, tiles, capacity, processors, stream);
  return 0;
}

}  // namespace

// x [T, D] with rows `stride` apart, ids and weights [T, k], shared [T, D] or null; y [T, D].
// Workspace: plan int32 [16 + 3 * 15 * capacity], position int32 [T k], slabs bf16 [8 groups, D] (of x, then the rows
// of down), h bf16 [8 groups, I]. capacity >= T k / 256 + E tiles; 8 groups >= T k + 7 min(E, T k) + 256 rows.
API int moe_int4_prefill(const void* x, int64_t stride, const void* ids, const void* weights, const void* gate_up,
                         const void* gate_up_scale, const void* down, const void* down_scale, const void* shared,
                         void* y, void* plan, void* position, void* slabs, void* h, int64_t T, int64_t k, int64_t E,
                         int64_t D, int64_t I, int64_t capacity, int64_t groups, int64_t processors, void* stream) {
  Plan* p = static_cast<Plan*>(plan);
  Tile* tiles = reinterpret_cast<Tile*>(static_cast<int*>(plan) + 16);
  int* at = static_cast<int*>(position);
  const int pairs = static_cast<int>(T * k), count = static_cast<int>(capacity);
  int failed = launch(plan_kernel, dim3(1), dim3(1024), 0, stream, 1, static_cast<const int*>(ids), pairs,
                      static_cast<int>(E), p, tiles, count, at);
  if (failed) return failed;
  failed = launch(gather_kernel, dim3(T), dim3(256), 2 * D, stream, 1,
                  static_cast<const bf16*>(x), stride, static_cast<const int*>(at), static_cast<int>(k),
                  static_cast<int>(D), groups, static_cast<uint8_t*>(slabs));
  if (failed) return failed;
  const int sms = static_cast<int>(processors);
  Args a = {static_cast<const uint32_t*>(gate_up), static_cast<const uint16_t*>(gate_up_scale),
            static_cast<const uint8_t*>(slabs), h, nullptr, nullptr, groups,
            static_cast<int>(D), static_cast<int>(2 * I), static_cast<int>(I / 64)};
  failed = products<true>(a, p, tiles, count, sms, stream);
  if (failed) return failed;
  a = {static_cast<const uint32_t*>(down), static_cast<const uint16_t*>(down_scale),
       static_cast<const uint8_t*>(h), slabs, nullptr, nullptr, groups,
       static_cast<int>(I), static_cast<int>(D), static_cast<int>(D / 128)};
  failed = products<false>(a, p, tiles, count, sms, stream);
  if (failed) return failed;
  return launch(combine_kernel, dim3(T, (D / 8 + 255) / 256), dim3(256), 0, stream, 1,
                static_cast<const bf16*>(slabs), static_cast<const int*>(at), static_cast<const float*>(weights),
                static_cast<const bf16*>(shared), static_cast<int>(k), static_cast<int>(D), static_cast<float*>(y));
}
