// The MoE block for 128 to 512 tokens: grouped products on wgmma with tiles of 256 weight rows, so that an expert's few
// tokens are read from the second-level cache 16 to 28 times instead of 32 to 56. Contract in moe_int4_tall.py.
//
// prepare: pairs (token, choice) get rows sorted by expert, each expert's rows starting at a multiple of 8, and every
// expert's rows are cut into tiles of at most 96 columns; x is copied once in the order of k of moe_int4_grouped.cuh.
// gate_up and down: one launch per width N of tiles, one CTA per SM. Four warpgroups multiply, 64 rows each; a thread
// of a fifth asks for weights and scales, boxes of 128 rows and 256 k of tensor maps; another warp of it brings
// activations: of gate_up by index from x, of down from h, which lies as slabs (wgmma.cuh). combine: the weighted sum
// of a token's rows.
//
// CTAs take work from a counter, so that a launch that starts on some SMs while the one before still runs on others
// ends everywhere at the same time. The launches of one product do not wait for each other: the last CTA of each waits
// at its end, so that what waits for the last launch waits for all.
//
// A thread's rows: row g of the tensor core's A is row g / 2 + 4 (g mod 2) of 8, so that the 8 lanes that read 16 bytes
// at a time find rows 4 apart: their swizzled chunks share no bank. Rows of down come out in that order: `combine` puts
// them back.
#include "cuda/tensor_map.cuh"
#include "moe/sm90/int4_wgmma.cuh"
#include "moe/sm90/token_permute.cuh"

namespace {

using namespace hopper;

constexpr int CLASSES = 12;  // of tiles: 8, 16, .. 96 columns
constexpr int width_of(int c) { return 8 + 8 * c; }
using Planned = Planner<1, CLASSES>;

constexpr int GROUPS = 4;  // multiplying warpgroups
constexpr int WARPS = 4 * GROUPS;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int REGISTERS = 112, PRODUCER_REGISTERS = 32;
constexpr int SHARED = 226 * 1024;
constexpr int BOX = 128;            // rows of a box
constexpr int ROWS = 2 * BOX;       // of a stage of weights
constexpr int DEEP = 256;           // k of a stage of weights; of activations half
constexpr int ITEMS = 16;           // places for pieces of work on their way: at most one for each stage, and 2

struct Args {
  const uint8_t* in;    // gate_up: x [T, K], in order; down: slabs of h
  const int* source;    // gate_up: the token of a row
  void* out;            // gate_up: slabs of h; down: [8 groups, rows] bf16
  const int* count;     // tiles of this width
  int* taken;           // of their work, beyond the first piece of every CTA
  const Tile* tiles;
  int64_t groups;  // rows / 8 of the slabs
  int K, rows, units;  // units: tiles of weight rows
  int chained;         // the kernel before is one of the same product
};

struct Maps {
  CUtensorMap weights, scales;
};

template <bool GATE_UP, int N>
struct Sizes {
  static constexpr int RESULTS = GATE_UP ? BOX : ROWS;  // of a tile
  static constexpr int WEIGHTS = ROWS * 128, STAGE = WEIGHTS + ROWS * 16;
  static constexpr int STAGES = N <= 40 ? 4 : 3;
  static constexpr int SLAB = N * 128, INPUT = 2 * SLAB;
  static constexpr int STAGED = 32 * (GATE_UP ? 64 : 128);  // results of 32 columns of a warpgroup
  static constexpr int REST = 1024 + 512;  // to align; barriers
  static constexpr int FIT = (SHARED - REST - STAGES * STAGE - GROUPS * STAGED) / INPUT / 2 * 2;
  static constexpr int INPUTS = FIT < 8 ? FIT : 8;
  static constexpr int BYTES = REST + STAGES * STAGE + GROUPS * STAGED + INPUTS * INPUT;
  static_assert(INPUTS >= 4, "activations of one stage of weights, and the next");
};

struct Ring {
  int at, phase;
  __device__ __forceinline__ void advance(int size) {
    if (++at == size) at = 0, phase ^= 1;
  }
};

template <bool GATE_UP, int N>
__global__ void __launch_bounds__(THREADS, 1) product_kernel(const __grid_constant__ Args a,
                                                             const __grid_constant__ Maps maps) {
  using S = Sizes<GATE_UP, N>;
  extern __shared__ uint8_t memory[];
  __shared__ int items[ITEMS];
  uint8_t* weights = memory + (-shared_address(memory) & 1023);
  uint8_t* inputs = weights + S::STAGES * S::STAGE;
  uint8_t* staged = inputs + S::INPUTS * S::INPUT;
  uint64_t* full = reinterpret_cast<uint64_t*>(staged + GROUPS * S::STAGED);  // of weights
  uint64_t* empty = full + S::STAGES;
  uint64_t* in_full = empty + S::STAGES;
  uint64_t* in_empty = in_full + S::INPUTS;
  uint64_t* known = in_empty + S::INPUTS;  // items
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  if (tid == 0) {
    for (int i = 0; i < S::STAGES; i++) barrier_init(full + i, 1), barrier_init(empty + i, WARPS);
    for (int i = 0; i < S::INPUTS; i++) barrier_init(in_full + i, 1), barrier_init(in_empty + i, WARPS);
    for (int i = 0; i < ITEMS; i++) barrier_init(known + i, 1);
    barriers_visible();
  }
  __syncthreads();
  const int blocks = a.K / DEEP;

  if (warp >= WARPS) {
    registers_give<PRODUCER_REGISTERS>();
    if (warp == WARPS) {
      if (elected()) {
        // down may ask for weights before h is there: the plan was made before gate_up's first launch.
        if (GATE_UP && !a.chained) wait_for_predecessor();
        const int all = *a.count * a.units;
        Ring to{0, 1};
        int work = blockIdx.x;
        auto publish = [&](int n) {
          items[n % ITEMS] = work < all ? work : -1;
          barrier_arrive(known + n % ITEMS);
        };
        publish(0);
        for (int n = 1; work < all; n++) {
          const int first = a.tiles[work / a.units].expert * a.rows + work % a.units * S::RESULTS;
          work = gridDim.x + atomicAdd(a.taken, 1);
          for (int block = 0; block < blocks; block++) {
            uint8_t* stage = weights + to.at * S::STAGE;
            uint64_t* barrier = full + to.at;
            barrier_wait_to_refill(empty + to.at, to.phase);
            barrier_expect(barrier, S::STAGE);
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int row = first + half * (GATE_UP ? a.rows / 2 : BOX);
              tensor_load_once(stage + half * BOX * 128, &maps.weights, 0, row, block, barrier);
              tensor_load_once(stage + S::WEIGHTS + half * BOX * 16, &maps.scales, block * 16, row, 0, barrier);
            }
            to.advance(S::STAGES);
            if (block == 0) publish(n);  // the number has come meanwhile; activations are brought ahead of weights
          }
        }
      }
    } else if (warp == WARPS + 1) {
      if (!a.chained) wait_for_predecessor();
      Ring to{0, 1};
      auto work_of = [&](int n) {
        barrier_wait(known + n % ITEMS, n / ITEMS & 1);
        return *const_cast<volatile int*>(items + n % ITEMS);
      };
      if (GATE_UP) {
        constexpr int AHEAD = S::INPUTS / 2;  // stages asked for and not yet handed over
        int pending = 0, oldest = 0;
        auto hand_over = [&] {
          shared_writes_visible();
          __syncwarp();
          if (lane == 0) barrier_arrive(in_full + oldest);
          oldest = oldest + 1 == S::INPUTS ? 0 : oldest + 1;
          pending--;
        };
        const int half = lane / 16, chunk = lane % 16;
        auto hand_all_over = [&] {
          copies_wait<0>();
          while (pending > 0) hand_over();
        };
        for (int n = 0;; n++) {
          // Nothing may be held back while this warp waits: who knows the next piece of work may wait for these.
          if (!__all_sync(~0u, barrier_passed(known + n % ITEMS, n / ITEMS & 1))) hand_all_over();
          const int work = work_of(n);
          if (work < 0) break;
          const Tile tile = a.tiles[work / a.units];
          uint32_t rows[(N + 31) / 32];  // where they are
#pragma unroll
          for (int i = 0; i < (N + 31) / 32; i++) {
            rows[i] = a.source[tile.row + min(32 * i + lane, tile.count - 1)] * static_cast<uint32_t>(a.K * 2);
          }
          const uint8_t* from = a.in + chunk * 16;
          for (int block = 0; block < 2 * blocks; block++, from += 256) {
            if (!__all_sync(~0u, barrier_passed(in_empty + to.at, to.phase))) {  // all lanes decide alike
              hand_all_over();
              barrier_wait(in_empty + to.at, to.phase);
            }
            const uint32_t into = shared_address(inputs + to.at * S::INPUT + chunk / 8 * S::SLAB + half * 128) +
                                  (chunk % 8 ^ half) * 16;
#pragma unroll
            for (int i = 0; i < (N + 31) / 32; i++) {
#pragma unroll 4
              for (int r = 0; r < (N - 32 * i < 32 ? N - 32 * i : 32); r += 2) {
                const uint32_t row = __shfl_sync(~0u, rows[i], r + half);
                if (32 * i + r + half < tile.count) {
                  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((into ^ (r % 8 * 16)) +
                                                                                          (32 * i + r) * 128),
                               "l"(from + row)
                               : "memory");
                }
              }
            }
            copies_commit();
            to.advance(S::INPUTS);
            if (++pending > AHEAD) {
              copies_wait<AHEAD>();
              hand_over();
            }
          }
        }
        hand_all_over();
      } else if (elected()) {
        for (int n = 0;; n++) {
          const int work = work_of(n);
          if (work < 0) break;
          const uint8_t* from = a.in + static_cast<int64_t>(a.tiles[work / a.units].row / 8) * 1024;
          for (int block = 0; block < 2 * blocks; block++) {
            uint8_t* into = inputs + to.at * S::INPUT;
            barrier_wait(in_empty + to.at, to.phase);
            barrier_expect(in_full + to.at, S::INPUT);
#pragma unroll
            for (int slab = 0; slab < 2; slab++) {
              bulk_load(into + slab * S::SLAB, from, S::SLAB, in_full + to.at);
              from += a.groups * 1024;
            }
            to.advance(S::INPUTS);
          }
        }
      }
    }
  } else {
    registers_take<REGISTERS>();
    if (!a.chained) wait_for_predecessor();
    let_successor_start();
    const int group = warp / 4, w = warp % 4, g = lane / 4, t = lane % 4;
    const int p = g / 2 + g % 2 * 4;  // of 8 rows
    const int low_row = (GATE_UP ? 32 * w + 8 * group : 64 * group + 16 * w) + p;  // of a stage
    const int high_row = low_row + (GATE_UP ? BOX : 8);
    float d[N / 2];
    uint32_t even[16], odd[16];
    Ring from{0, 0}, in{0, 0};
    auto release = [&](uint64_t* barrier) {
      __syncwarp();
      if (lane == 0) barrier_arrive(barrier);
    };
    for (int n = 0;; n++) {
      barrier_wait(known + n % ITEMS, n / ITEMS & 1);
      const int work = *const_cast<volatile int*>(items + n % ITEMS);
      if (work < 0) break;
      const Tile tile = a.tiles[work / a.units];
      const int unit = work % a.units;
#pragma unroll
      for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
      int before = 0;  // the stage of activations of the products that were asked for last
#pragma unroll 1
      for (int block = 0; block < blocks; block++) {
        barrier_wait(full + from.at, from.phase);
        const uint8_t* stage = weights + from.at * S::STAGE;
#pragma unroll
        for (int part = 0; part < 2; part++) {  // of 128 k
          const int chunk = ((4 * part + t) ^ p) * 16;
          const uint4 low = *reinterpret_cast<const uint4*>(stage + low_row * 128 + chunk);
          const uint4 high = *reinterpret_cast<const uint4*>(stage + high_row * 128 + chunk);
          auto scale_of = [&](int row) {
            const uint8_t* at = stage + S::WEIGHTS + row * 16 + 8 * part + 2 * t;
            return Scale(*reinterpret_cast<const uint16_t*>(at) * 0x10001u);
          };
          const Scale ls = scale_of(low_row), hs = scale_of(high_row);
          const uint32_t low_words[4] = {low.x, low.y, low.z, low.w};
          const uint32_t high_words[4] = {high.x, high.y, high.z, high.w};
          auto multiply = [&](uint32_t(&x)[16], int half) {
            unpack(x, low_words + 2 * half, high_words + 2 * half, ls, hs);
            if (half == 0) barrier_wait(in_full + in.at + part, in.phase);
            const uint64_t b = slab_descriptor(inputs + (in.at + part) * S::INPUT + half * S::SLAB);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++) wgmma<N>(d, x + 4 * s, b + 2 * s);
            wgmma_commit();
            wgmma_wait<1>();  // the other half's
            if (half) return;
            if (part == 1) release(in_empty + in.at);
            if (part == 0 && block > 0) release(in_empty + before);
          };
          multiply(even, 0);
          if (part == 1) release(empty + from.at);
          multiply(odd, 1);
        }
        from.advance(S::STAGES);
        before = in.at + 1;
        in.advance(S::INPUTS), in.advance(S::INPUTS);
      }
      wgmma_wait<0>();
      release(in_empty + before);

      uint8_t* mine = staged + group * S::STAGED;
#pragma unroll
      for (int first = 0; first < N; first += 32) {
        constexpr int MOST = 32;
        const int width = N - first < MOST ? N - first : MOST;
        named_sync(1 + group, 128);
        if (GATE_UP) {
#pragma unroll
          for (int i = first / 2; i < (first + width) / 2; i += 4) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const float gate = d[i + e] * SMALL, up = d[i + e + 2] * SMALL;
              const int column = i * 2 - first + 2 * t + e;
              *reinterpret_cast<bf16*>(mine + column * 64 + (g / 2 ^ t) * 16 + 4 * w + g % 2 * 2) =
                  __float2bfloat16(__fdividef(gate, 1.0f + __expf(-gate)) * up);
            }
          }
          named_sync(1 + group, 128);
          const int column = tid % 128 / 4, chunk = tid % 4;
          if (first + column < tile.count) {
            const int slab = unit * 2 + group / 2;
            uint8_t* h = static_cast<uint8_t*>(a.out) + (slab * a.groups + (tile.row + first + column) / 8) * 1024;
            *reinterpret_cast<uint4*>(h + column % 8 * 128 + ((group % 2 * 4 + chunk) ^ column % 8) * 16) =
                *reinterpret_cast<const uint4*>(mine + column * 64 + (chunk ^ column / 2 % 4) * 16);
          }
        } else {
#pragma unroll
          for (int c = first; c < first + width; c += 16) {
            const int i = c / 2, column = c - first + lane / 16 * 8 + lane % 8, chunk = 2 * w + lane / 8 % 2;
            const float* v = d + i;
            uint8_t* to = mine + column * 128 + (chunk ^ (lane % 8)) * 16;
            const uint32_t a0 = narrow(v[0] * SMALL, v[1] * SMALL), a1 = narrow(v[2] * SMALL, v[3] * SMALL);
            if (c + 16 <= N) {
              store_transposed(to, a0, a1, narrow(v[4] * SMALL, v[5] * SMALL), narrow(v[6] * SMALL, v[7] * SMALL));
            } else {
              store_transposed(to, a0, a1);
            }
          }
          named_sync(1 + group, 128);
          const int row = unit * S::RESULTS + 64 * group;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int column = 16 * i + tid % 128 / 8, chunk = tid % 8;
            if (first + column < tile.count && row < a.rows) {
              bf16* to = static_cast<bf16*>(a.out) + static_cast<int64_t>(tile.row + first + column) * a.rows + row;
              *reinterpret_cast<uint4*>(to + 8 * chunk) =
                  *reinterpret_cast<const uint4*>(mine + column * 128 + (chunk ^ (column % 8)) * 16);
            }
          }
        }
      }
    }
  }
  if (a.chained && blockIdx.x == gridDim.x - 1) wait_for_predecessor();
}

// One CTA plans; the others copy x in order, 4 tokens each.
__global__ void __launch_bounds__(1024) prepare_kernel(const bf16* x, int64_t stride, const int* ids, int T, int k,
                                                       int E, int D, uint32_t classes, Planned::Plan* plan, Tile* tiles,
                                                       int capacity, int* position, int* source, uint4* ordered) {
  wait_for_predecessor();
  let_successor_start();
  if (blockIdx.x == 0) {
    Planned::plan(ids, T * k, k, E, classes, plan, tiles, capacity, position, source);
    return;
  }
  const int64_t token = (blockIdx.x - 1) * 4 + threadIdx.x / 256;
  if (token >= T) return;
  uint4* to = ordered + token * (D / 8);
  for (int unit = threadIdx.x % 256; unit < D / 32; unit += 256) permute(x + token * stride, unit, to);
}

template <bool GATE_UP, int CLASS = CLASSES - 1>
int products(Args a, const Maps& maps, uint32_t classes, Planned::Plan* plan, const Tile* tiles, int capacity,
             int processors, void* stream) {
  constexpr int N = width_of(CLASS);
  using S = Sizes<GATE_UP, N>;
  if (classes >> CLASS & 1) {
    a.count = plan->tiles + CLASS;
    a.taken = plan->taken[GATE_UP] + CLASS;
    a.tiles = tiles + static_cast<int64_t>(CLASS) * capacity;
    a.units = divide_up(GATE_UP ? a.rows / 2 : a.rows, S::RESULTS);
    const int failed = launch(product_kernel<GATE_UP, N>, dim3(processors), dim3(THREADS), S::BYTES, stream, 1,
                              a, maps);
    if (failed) return failed;
    a.chained = 1;
  }
  if constexpr (CLASS > 0) {
    return products<GATE_UP, CLASS - 1>(a, maps, classes, plan, tiles, capacity, processors, stream);
  }
  return 0;
}

// Of weights [rows, K] and their scales.
bool describe(Maps* m, const void* packed, const void* scale, int64_t rows, int64_t K) {
  const int64_t scales = K / 16;
  const int64_t deep = K / DEEP;
  return maps::describe(&m->weights, packed, maps::SWIZZLED_BYTES, {128, rows, deep}, {K / 2, 128}, {128, BOX, 1}) &&
         maps::describe(&m->scales, scale, maps::BYTES, {scales, rows, 1}, {scales, scales * rows}, {16, BOX, 1});
}

// Of weights [rows, K] and their scales.

}  // namespace

// x [T, D] with rows `stride` apart, ids and weights [T, k], shared [T, D] or null; y [T, D]. classes: plan's.
// Workspace: plan int32 [36 + 36 * capacity], position int32 [T k], source int32 [8 groups], ordered bf16 [T, D],
// h bf16 [8 groups, I], part bf16 [8 groups, D]. capacity >= T k / 96 + E tiles;
// 8 groups >= T k + 7 min(E, T k) + 96 rows. 0, CUDA's error number, or -1 for sizes or a driver that cannot.
API int moe_int4_tall(const void* x, int64_t stride, const void* ids, const void* weights, const void* gate_up,
                      const void* gate_up_scale, const void* down, const void* down_scale, const void* shared, void* y,
                      void* plan_memory, void* position_memory, void* source, void* ordered, void* h, void* part,
                      int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int64_t classes, int64_t capacity,
                      int64_t groups, int64_t processors, void* stream) {
  auto* plan = static_cast<Planned::Plan*>(plan_memory);
  auto* tiles = reinterpret_cast<Tile*>(plan + 1);
  int* position = static_cast<int*>(position_memory);
  const int tokens = static_cast<int>(T), choices = static_cast<int>(k), width = static_cast<int>(D);
  const int room = static_cast<int>(capacity), sms = static_cast<int>(processors);
  const uint32_t used = static_cast<uint32_t>(classes) | 1u << (CLASSES - 1);
  Maps up, back;
  if (!describe(&up, gate_up, gate_up_scale, E * 2 * I, D) || !describe(&back, down, down_scale, E * D, I)) return -1;
  int failed = launch(prepare_kernel, dim3(1 + (tokens + 3) / 4), dim3(1024), 0, stream, 1, static_cast<const bf16*>(x),
                      stride, static_cast<const int*>(ids), tokens, choices, static_cast<int>(E), width, used, plan,
                      tiles, room, position, static_cast<int*>(source), static_cast<uint4*>(ordered));
  if (failed) return failed;
  Args a = {};
  a.in = static_cast<const uint8_t*>(ordered), a.source = static_cast<const int*>(source), a.out = h;
  a.groups = groups, a.K = width, a.rows = static_cast<int>(2 * I);
  failed = products<true>(a, up, used, plan, tiles, room, sms, stream);
  if (failed) return failed;
  a = {};
  a.in = static_cast<const uint8_t*>(h), a.out = part;
  a.groups = groups, a.K = static_cast<int>(I), a.rows = width;
  failed = products<false>(a, back, used, plan, tiles, room, sms, stream);
  if (failed) return failed;
  return launch(combine_kernel<true, float>, dim3(tokens, (width / 8 + 255) / 256), dim3(256), 0, stream, 1,
                static_cast<const bf16*>(part), static_cast<const int*>(position), static_cast<const float*>(weights),
                static_cast<const bf16*>(shared), choices, width, static_cast<float*>(y));
}
