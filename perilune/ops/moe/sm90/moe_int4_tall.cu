// The MoE block for 128 to 512 tokens: grouped products on wgmma with tiles of 256 weight rows, so that an expert's few
// tokens are read from L2 16 to 28 times instead of 32 to 56. Contract in moe_int4_tall.py.
//
// prepare: makes the plan of moe_int4_grouped.cuh, with tiles of at most 96 columns, and copies x once in its order of
// k. gate_up and down: one launch per width N of tiles, one CTA per SM. Four warpgroups multiply (moe_int4_tall.cuh).
// In a fifth, one thread issues copies of weights and scales (boxes of 128 rows and 256 k of tensor maps), another warp
// copies of activations: for gate_up by index from x, for down from h, stored as slabs (wgmma.cuh). combine: the
// weighted sum of a token's rows.
//
// CTAs take work from a counter, so that a launch that starts on some SMs while the one before still runs on others
// ends everywhere at the same time. The launches of one product overlap: the last CTA of each waits for the predecessor
// at its end, so a kernel that waits for the last launch waits for all.
#include "moe/sm90/moe_int4_tall.cuh"

namespace {

using namespace hopper;

constexpr int CLASSES = 12;  // widths of tiles: 8, 16, .. 96 columns
constexpr int width_of(int c) { return 8 + 8 * c; }
using Planned = Planner<1, CLASSES>;

constexpr int SHARED = 226 * 1024;
constexpr int ITEMS = 16;           // ring of work numbers: at most one in use per stage, and 2 more

struct Args {
  const uint8_t* in;    // gate_up: x [T, K], permuted; down: slabs of h
  const int* source;    // gate_up: the token of a row
  Output to;
  const int* count;     // tiles of this width
  int* taken;           // pieces of their work that CTAs have taken after their first
  const Tile* tiles;
  int K, units;  // units: tiles of weight rows
  int chained;         // the predecessor is a launch of the same product
};

template <bool GATE_UP, int N>
struct Sizes {
  static constexpr int STAGES = N <= 40 ? 4 : 3;
  static constexpr int SLAB = N * 128;
  static constexpr int FIT = (SHARED - Rings<GATE_UP, STAGES, 0, SLAB, 1>::BYTES) / (2 * SLAB) / 2 * 2;
  using Shared = Rings<GATE_UP, STAGES, FIT < 8 ? FIT : 8, SLAB, 1>;
  static_assert(Shared::INPUTS >= 4, "activations of one stage of weights, and the next");
};

template <bool GATE_UP, int N>
__global__ void __launch_bounds__(THREADS, 1) product_kernel(const __grid_constant__ Args a,
                                                             const __grid_constant__ Maps maps) {
  using S = typename Sizes<GATE_UP, N>::Shared;
  extern __shared__ uint8_t memory[];
  __shared__ int items[ITEMS];
  const S rings(memory);
  uint64_t* known = rings.end();  // barriers of `items`
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  if (tid == 0) {
    rings.init();
    for (int i = 0; i < ITEMS; i++) barrier_init(known + i, 1);
    barriers_visible();
  }
  __syncthreads();
  const int blocks = a.K / DEEP;

  if (warp >= WARPS) {
    registers_give<PRODUCER_REGISTERS>();
    if (warp == WARPS) {
      if (elected()) {
        // down may load weights before its wait: the plan is older than gate_up's first launch.
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
          const int first = a.tiles[work / a.units].expert * a.to.rows + work % a.units * RESULTS<GATE_UP>;
          work = gridDim.x + atomicAdd(a.taken, 1);
          for (int block = 0; block < blocks; block++) {
            uint8_t* stage = rings.weights + to.at * STAGE;
            uint64_t* barrier = rings.full + to.at;
            barrier_wait_to_refill(rings.empty + to.at, to.phase);
            barrier_expect(barrier, STAGE);
            load_weights<false>(stage, maps, first, GATE_UP ? a.to.rows / 2 : BOX, block, barrier);
            to.advance(S::STAGES);
            if (block == 0) publish(n);  // the atomic has returned by now; activations are loaded ahead of weights
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
        constexpr int AHEAD = S::INPUTS / 2;  // stages of copies in flight
        int pending = 0, oldest = 0;
        auto hand_over = [&] {
          shared_writes_visible();
          __syncwarp();
          if (lane == 0) barrier_arrive(rings.in_full + oldest);
          oldest = oldest + 1 == S::INPUTS ? 0 : oldest + 1;
          pending--;
        };
        const int half = lane / 16, chunk = lane % 16;
        auto hand_all_over = [&] {
          copies_wait<0>();
          while (pending > 0) hand_over();
        };
        for (int n = 0;; n++) {
          // Hand over all stages before this warp waits: the thread that publishes the next piece may wait for them.
          if (!__all_sync(~0u, barrier_passed(known + n % ITEMS, n / ITEMS & 1))) hand_all_over();
          const int work = work_of(n);
          if (work < 0) break;
          const Tile tile = a.tiles[work / a.units];
          uint32_t rows[(N + 31) / 32];  // byte offsets of the tile's rows in x
#pragma unroll
          for (int i = 0; i < (N + 31) / 32; i++) {
            rows[i] = a.source[tile.row + min(32 * i + lane, tile.count - 1)] * static_cast<uint32_t>(a.K * 2);
          }
          const uint8_t* from = a.in + chunk * 16;
          for (int block = 0; block < 2 * blocks; block++, from += 256) {
            if (!__all_sync(~0u, barrier_passed(rings.in_empty + to.at, to.phase))) {  // all lanes decide alike
              hand_all_over();
              barrier_wait(rings.in_empty + to.at, to.phase);
            }
            const uint32_t into = shared_address(rings.inputs + to.at * S::INPUT + chunk / 8 * S::SLAB + half * 128) +
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
            uint8_t* into = rings.inputs + to.at * S::INPUT;
            barrier_wait(rings.in_empty + to.at, to.phase);
            barrier_expect(rings.in_full + to.at, S::INPUT);
#pragma unroll
            for (int slab = 0; slab < 2; slab++) {
              bulk_load(into + slab * S::SLAB, from, S::SLAB, rings.in_full + to.at);
              from += a.to.groups * 1024;
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
    Consumer<GATE_UP> me;
    float d[N / 2];
    for (int n = 0;; n++) {
      barrier_wait(known + n % ITEMS, n / ITEMS & 1);
      const int work = *const_cast<volatile int*>(items + n % ITEMS);
      if (work < 0) break;
      const Tile tile = a.tiles[work / a.units];
      const int unit = work % a.units;
#pragma unroll
      for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
      multiply_tile<false, N>(d, rings, me, blocks, 0.0f, 0.0f);
      uint8_t* mine = rings.staged + me.group * STAGED<GATE_UP>;
#pragma unroll
      for (int first = 0; first < N; first += 32) store_results<N>(d, first, a.to, mine, me, tile, unit);
    }
  }
  if (a.chained && blockIdx.x == gridDim.x - 1) wait_for_predecessor();
}

// One CTA plans; the others copy and permute x, 4 tokens each.
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
  using S = typename Sizes<GATE_UP, N>::Shared;
  if (classes >> CLASS & 1) {
    a.count = plan->tiles + CLASS;
    a.taken = plan->taken[GATE_UP] + CLASS;
    a.tiles = tiles + static_cast<int64_t>(CLASS) * capacity;
    a.units = divide_up(GATE_UP ? a.to.rows / 2 : a.to.rows, RESULTS<GATE_UP>);
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

}  // namespace

// x [T, D] with rows `stride` apart, ids and weights [T, k], shared [T, D] or null; y [T, D]. classes: plan's.
// Workspace: plan int32 [36 + 36 * capacity], position int32 [T k], source int32 [8 groups], ordered bf16 [T, D],
// h bf16 [8 groups, I], part bf16 [8 groups, D]. capacity >= T k / 96 + E tiles;
// 8 groups >= T k + 7 min(E, T k) + 96 rows. Returns 0, CUDA's error number, or -1 if the driver makes no tensor maps
// of these sizes.
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
  if (!describe(&up, gate_up, gate_up_scale, E * 2 * I, D, false) ||
      !describe(&back, down, down_scale, E * D, I, false)) return -1;
  int failed = launch(prepare_kernel, dim3(1 + (tokens + 3) / 4), dim3(1024), 0, stream, 1, static_cast<const bf16*>(x),
                      stride, static_cast<const int*>(ids), tokens, choices, static_cast<int>(E), width, used, plan,
                      tiles, room, position, static_cast<int*>(source), static_cast<uint4*>(ordered));
  if (failed) return failed;
  Args a = {};
  a.in = static_cast<const uint8_t*>(ordered), a.source = static_cast<const int*>(source), a.K = width;
  a.to = {h, groups, static_cast<int>(2 * I)};
  failed = products<true>(a, up, used, plan, tiles, room, sms, stream);
  if (failed) return failed;
  a = {};
  a.in = static_cast<const uint8_t*>(h), a.K = static_cast<int>(I);
  a.to = {part, groups, width};
  failed = products<false>(a, back, used, plan, tiles, room, sms, stream);
  if (failed) return failed;
  return launch(combine_kernel<true>, dim3(tokens, (width / 8 + 255) / 256), dim3(256), 0, stream, 1,
                static_cast<const bf16*>(part), static_cast<const int*>(position), static_cast<const float*>(weights),
                static_cast<const bf16*>(shared), choices, width, static_cast<float*>(y));
}
