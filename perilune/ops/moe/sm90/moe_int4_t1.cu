// The MoE block for one token. Contract in moe_int4.py.
//
// Two launches of one kernel: gate_up (+ SiLU) writes h, down writes rows of y; or one launch (JOINED), in which a CTA
// goes on from gate_up to down (moe_int4_t1_joined.cuh). A tile is 16 rows of weights: the rows of the tensor core's A.
// (gate_up: 8 gate rows and their 8 up rows.) RT tiles make a unit. A slot of the CTA's ring is KS chunks of 128 bytes
// of each of a unit's rows: one box of a tensor map, or two. A producer warp only issues these copies (issuing one per
// row took longer than the transfers). KS consumer warps split the k of a tile, a chunk of the slot each, and their sums
// are added through shared memory.
//
// INT4: products of bytes in fixed point (int4_fixed.cuh), in fewer than half of the instructions of bf16 products. Once
// x or h is there, slots wait for instructions, not for memory. The shared expert (bf16 or e4m3) is multiplied in bf16;
// then all columns of B are the token.
//
// Work: before x is ready, every CTA of gate_up loads an equal part of the shared expert's weights. It multiplies them
// while the router still runs (router_mailbox.cuh). A slice's shared expert has few tiles, so its units are quarters of
// tiles (`quartered`): with whole tiles, a quarter of the CTAs began their first routed unit 4 us later than the others.
// CTAs start and run unevenly, so a CTA with a free slot takes the next unit of the chosen experts from a counter, the
// first one as soon as x is there: all of h waits for the last unit. WIDE: the first one is number blockIdx.x, if there
// are more units than CTAs, and the producer polls for the ids between two slots. down reads the ids before h is ready:
// every CTA takes a contiguous range of (choice, unit) besides units of the shared expert.
//
// For widths up to EARLY_WIDTH (a rank's slice), starting a kernel takes longer than streaming its weights. So down's
// CTAs are small: one fits beside two of gate_up on an SM, and has filled its first slots when gate_up ends.
//
// The ring of gate_up is no deeper than full bandwidth needs: loads of other kernels, such as the router, wait behind
// all slots requested before them.
#include "moe/sm90/moe_int4_t1_joined.cuh"

#include <type_traits>

using namespace hopper;
using namespace moe;

namespace {

template <bool GATE_UP, bool COMPACT, int KS, int RT, bool EARLY, bool JOINED = false>
struct Kernel : OneToken<GATE_UP, COMPACT, KS, RT> {
  using Base = OneToken<GATE_UP, COMPACT, KS, RT>;
  using typename Base::Asked;
  using typename Base::Lane;
  using typename Base::Window;
  using Base::add_lanes;
  using Base::ask;
  using Base::barriers;
  using Base::before;
  using Base::bf16_at;
  using Base::choice_of;
  using Base::convert;
  using Base::CONSUMERS;
  using Base::dealt;
  using Base::int4_share;
  using Base::lane_of;
  using Base::meet_all;
  using Base::memory;
  using Base::PIECE;
  using Base::plan;
  using Base::plan_of;
  using Base::release;
  using Base::ROWS;
  using Base::SHARE;
  using Base::SLOT;
  using Base::stage_both;
  using Base::stage_fresh;
  using Base::UNIT_ROWS;
  using Base::WARPS;

  static constexpr bool BOTH = !GATE_UP && EARLY, WIDE = GATE_UP && !EARLY;
  static constexpr int MOST_SLOTS = GATE_UP ? GATE_UP_SLOTS : EARLY ? EARLY_SLOTS : MAX_SLOTS;

  // ---- the producer warp ----

  static __device__ void produce(const Args& a, const Maps& maps, const Joint& j, Range shared_units, Asked asked,
                                 Range own) {
    const int lane = threadIdx.x % 32;
    int into = 0, phase = 1, buffer = 0;
    bool refills = false;  // whether the next slot has been filled before
    if (lane == 0 && a.shared.tiles > 0) prefetch_map(&maps.shared);
    if (lane == 1) prefetch_map(&maps.routed);
    if (lane == 2 && GATE_UP && a.quartered) prefetch_map(&maps.quartered);
    bool planned = false;
    int ahead = blockIdx.x;  // gate_up: a unit taken before it is needed
    int opened = 0;          // WIDE: slots filled for the first time
    uint32_t heard = 0;      // WIDE: the mailbox word of choice `lane`, as read one slot ago
    auto take = [&] { return lane == 0 ? static_cast<int>(a.dealt + atomicAdd(a.counter, 1)) : 0; };
    auto plan_if_arrived = [&](uint32_t word) {
      if (!__all_sync(~0u, lane >= a.k || mailbox::arrived(word, a.launch))) return;
      plan(a, {lane < a.k ? mailbox::choice_of(word) : -1, 1}, own);
      planned = true;
    };
    auto copy = [&](const Matrix& w, const CUtensorMap& map, int expert, int unit, int taken) {
      const int slots = divide_up(w.row, PIECE);
      const int64_t first = expert * w.expert + static_cast<int64_t>(unit) * RT * ROWS;
      const int64_t second = GATE_UP ? w.second : UNIT_ROWS / 2;  // from the unit's first half of rows to its second
      for (int n = 0; n < slots; n++) {
        uint64_t* barrier = &barriers().full[into];
        if (WIDE && opened < a.slots) {  // one by one: a mailbox read returns after all copies issued before it
          if (opened > 0) barrier_wait(&barriers().full[opened - 1], 0);
          opened++;
        }
        if (refills) barrier_wait_to_refill(&barriers().empty[into], phase);  // the fence may wait for loads of ids
        if (elected()) {
          const int scales = n == 0 && w.scale != nullptr ? a.scales : 0;
          const int factors = n == 0 && w.factor != nullptr ? UNIT_ROWS * (w.scale == nullptr ? 4 : 2) : 0;
          if (GATE_UP && n == 0) barriers().taken[into] = taken;
          barrier_expect(barrier, SLOT + scales + factors);
          uint8_t* slot = memory(into * SLOT);
          const int row = static_cast<int>(first), chunk = n * (a.chunk == 128 ? PIECE / 128 : PIECE / 64);
          tensor_load_once(slot, &map, 0, row, chunk, barrier);
          if (GATE_UP) tensor_load_once(slot + SLOT / 2, &map, 0, row + static_cast<int>(w.second), chunk, barrier);
          uint8_t* to = memory(a.held) + buffer * a.block;
          if (scales) {
            bulk_load_once(to, w.scale + first * a.scale_row, scales / 2, barrier);
            bulk_load_once(to + scales / 2, w.scale + (first + second) * a.scale_row, scales / 2, barrier);
          }
          if (factors) {
            const int each = factors / UNIT_ROWS;
            bulk_load_once(to + a.scales, w.factor + first * each, factors / 2, barrier);
            bulk_load_once(to + a.scales + factors / 2, w.factor + (first + second) * each, factors / 2, barrier);
          }
        }
        __syncwarp();
        if (++into == a.slots) into = 0, phase ^= 1, refills = true;
        if (WIDE && a.launch && !planned) {  // the words requested one slot ago have arrived
          plan_if_arrived(heard);
          heard = mailbox::glance_choice(a.mailbox, a.k);
        }
      }
      if (++buffer == a.scale_buffers) buffer = 0;
    };
    auto copy_quarters = [&](int unit) {
      const int row = unit * Base::QUARTERED_ROWS, chunks = a.shared.row / 512;  // of a quarter
      for (int n = 0; n < a.quartered; n++) {
        uint64_t* barrier = &barriers().full[into];
        if (refills) barrier_wait_to_refill(&barriers().empty[into], phase);
        if (elected()) {
          const int factors = n == 0 && a.shared.factor != nullptr ? 16 : 0;
          barrier_expect(barrier, SLOT + 2 * factors);
#pragma unroll
          for (int side = 0; side < 2; side++) {
            for (int q = 0; q < 4; q++) {
              tensor_load_once(memory(into * SLOT + side * (SLOT / 2) + q * Base::QUARTER_BOX), &maps.quartered, 0,
                               row + side * static_cast<int>(a.shared.second), q * chunks + n * KS, barrier);
            }
            if (factors) {
              const uint8_t* of_rows = a.shared.factor + (row / 4 * 4 + side * a.shared.second) * 4;
              bulk_load_once(memory(a.quarters + into * 32 + side * 16), of_rows, 16, barrier);
            }
          }
        }
        __syncwarp();
        if (++into == a.slots) into = 0, phase ^= 1, refills = true;
      }
    };
    // down: ids arrive while the shared expert's copies are issued. If these exceed the ring and BOTH, plan first:
    // consumers wait for the plan before they free a slot.
    const int shared_slots = (shared_units.end - shared_units.first) * divide_up(a.shared.row, PIECE);
    const bool plans_first = shared_slots == 0 || (BOTH && shared_slots > a.slots);
    if (!GATE_UP && plans_first) plan(a, asked, own);
    for (int u = shared_units.first; u < shared_units.end; u++) {
      if (GATE_UP && a.quartered) {
        copy_quarters(u);
      } else {
        copy(a.shared, maps.shared, 0, u, 0);
      }
    }
    if (!GATE_UP && !plans_first) plan(a, asked, own);
    if (GATE_UP && !a.launch) {
      wait_for_predecessor();
      plan(a, ask(a), own);
    }
    if (GATE_UP && !a.dealt) {  // a CTA that gets x late must not keep the first units waiting
      barrier_wait(&barriers().ready, 0);
      ahead = take();
    }
    while (GATE_UP && a.launch && !planned) plan_if_arrived(mailbox::glance_choice(a.mailbox, a.k));
    const Plan& p = plan_of();
    const int per_expert = a.routed.tiles / RT;
    if constexpr (GATE_UP) {
      for (;; ahead = take()) {
        const int u = __shfl_sync(~0u, ahead, 0);
        if (u >= p.units.end) break;
        const int s = choice_of(a, u);
        copy(a.routed, maps.routed, p.chosen[s].expert, u - s * per_expert, u);
        barrier_wait(&barriers().empty[into], phase);  // take the next unit only when a slot is free
      }
      if constexpr (JOINED) {
        Down<COMPACT>::produce(a, j, {into, phase, refills});
        return;
      }
      barrier_wait(&barriers().empty[into], phase);
      if (lane == 0) {
        barriers().taken[into] = -1;
        barrier_arrive(&barriers().full[into]);
      }
    } else {
      for (int u = p.units.first; u < p.units.end; u++) {
        const int s = choice_of(a, u);
        copy(a.routed, maps.routed, p.chosen[s].expert, u - s * per_expert, 0);
      }
    }
  }

  // ---- the consumer warps ----

  static __device__ void consume(const Args& a, const Joint& j, Range shared_units) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int ks = warp % KS, rt = warp / KS, own = ks * SHARE;
    int from = 0, phase = 0, buffer = 0, turn = 0;
    // Adds a tile's sums over its KS warps; `has`: in lanes that have row g. One barrier of these warps is enough: two
    // buffers of sums alternate.
    auto finish = [&](bool has, float upper, float lower, auto result) {
      float* sums = reinterpret_cast<float*>(memory(a.sums)) + turn % 2 * WARPS * 16;
      if (has) sums[warp * 16 + g] = upper, sums[warp * 16 + g + 8] = lower;
      if (KS == 1) __syncwarp();
#pragma unroll
      for (int n = 0; n < RT; n++) {  // with a variable barrier number the compiler reserves all 16 barriers
        if (KS > 1 && rt == n) named_sync(2 + n, KS * 32);
      }
      if ((ks + turn) % KS == 0 && lane < ROWS) {
        const float* at = sums + rt * KS * 16 + lane;
        float v = 0, up = 0;
#pragma unroll
        for (int s = 0; s < KS; s++) {
          v += at[s * 16];
          if (GATE_UP) up += at[s * 16 + 8];
        }
        result(lane, v, up);
      }
      turn++;
    };

    bool waited = false;
    auto wait = [&] {
      if (waited) return;
      wait_for_predecessor();
      if (GATE_UP) let_successor_start();  // not before: the next kernel reads the ids as soon as it starts
      waited = true;
    };
    uint32_t started = 0;
    if (JOINED && tid == 0) {
      started = atomicAdd(j.counts, 1);
      barriers().down[0] = Down<COMPACT>::shared_units(j.down), barriers().down[1] = Down<COMPACT>::dealt(j.down);
    }
    if (tid < 4) *reinterpret_cast<uint4*>(memory(a.zeros) + tid * 16) = uint4{};  // read after `meet_all`
    Window window{0, 0};
    if (GATE_UP && a.launch && a.fresh != nullptr) {
      stage_fresh(a);
      window.end = a.K / 8;
    } else if (GATE_UP && a.launch) {
      mailbox::wait_for_x(a.mailbox, a.launch);
    } else {
      wait();
    }
    if (GATE_UP && tid == 0) barrier_arrive(&barriers().ready);
    if (GATE_UP && window.end == 0 && (a.quartered || shared_units.first == shared_units.end)) {
      Base::template stage<false>(a, a.in, a.K / 8);
      window.end = a.K / 8;
    }
    int staged = -1;
    if constexpr (BOTH) {
      barrier_wait(&barriers().planned, 0);
      const Plan& p = plan_of();
      if (p.units.first < p.units.end) staged = p.chosen[choice_of(a, p.units.first)].number;
      stage_both(a, staged < 0 ? nullptr : a.in + staged * a.K, shared_units.first < shared_units.end);
    }
    if (JOINED && tid == 0) {
      barriers().half = started / gridDim.x % 2;  // other warps read it after a tile's barrier, or after `planned`
      barrier_arrive(&barriers().planned);
    }
    if (!GATE_UP && blockIdx.x == 0 && warp == 0) {
      if (lane == 0) *a.counter = 0;
      if (a.launch) mailbox::wipe(a.mailbox);
    }
    for (int u = shared_units.first; u < shared_units.end; u++) {
      if constexpr (GATE_UP) {
        if (a.quartered) {
          float gate, up;
          if (a.shared.factor == nullptr) {
            Base::template quartered_unit<false>(a, u, from, phase, gate, up);
          } else {
            Base::template quartered_unit<true>(a, u, from, phase, gate, up);
          }
          finish(t == g / 4, gate, up, [&](int row, float v, float w) {
            constexpr unsigned LANES = 0xff;
            v += __shfl_xor_sync(LANES, v, 2), w += __shfl_xor_sync(LANES, w, 2);
            v += __shfl_xor_sync(LANES, v, 4), w += __shfl_xor_sync(LANES, w, 4);
            const float h = v / (1 + __expf(-v)) * w;
            if constexpr (JOINED) {
              Down<COMPACT>::hand_on_pair(Down<COMPACT>::row_of(j, a.k) + u, h);
            } else if (row < Base::QUARTERED_ROWS) {
              a.out_shared[u * Base::QUARTERED_ROWS + row] = __float2bfloat16(h);
            }
          });
          continue;
        }
      }
      float total[4];
      if (a.shared.factor == nullptr) {
        Base::template dense_tile<false, BOTH>(a, buffer, window, from, phase, total);
      } else {
        Base::template dense_tile<true, BOTH>(a, buffer, window, from, phase, total);
      }
      if (++buffer == a.scale_buffers) buffer = 0;
      if (!GATE_UP || !a.launch) wait();  // with a.launch, x is ready: all readers of the old h have ended
      finish(t == 0, total[0], total[2], [&](int row, float v, float up) {
        const int at = (u * RT + rt) * ROWS + row;
        if constexpr (JOINED) {
          Down<COMPACT>::hand_on(Down<COMPACT>::row_of(j, a.k) + u * ROWS / 2, v / (1 + __expf(-v)) * up);
        } else if (GATE_UP) {
          a.out_shared[at] = __float2bfloat16(v / (1 + __expf(-v)) * up);
        } else {
          static_cast<float*>(a.out)[static_cast<int64_t>(a.P - 1) * a.shared.tiles * ROWS + at] = v;
        }
      });
    }
    if (!GATE_UP || !a.launch) wait();
    if (GATE_UP) convert(a);
    barrier_wait(&barriers().planned, 0);
    if (GATE_UP && EARLY) wait();  // the ids are published, so the router is about to end
    if (JOINED && tid == 0) Down<COMPACT>::clear(j);

    const Plan& p = plan_of();
    const Range units = p.units;
    const int per_expert = a.routed.tiles / RT, slots = divide_up(a.routed.row, PIECE);
    const int row_upper = GATE_UP ? rt * 8 + g : rt * 16 + g, rows_between = GATE_UP ? RT * 8 : 8;
    const Lane v = lane_of(a, ks, rt);
    const uint8_t* scale_upper = memory(a.held) + row_upper * a.scale_row + (own / 16 + t) * Lane::SCALE;
    for (int u = units.first; GATE_UP || u < units.end; u++) {
      if constexpr (GATE_UP) {
        barrier_wait(&barriers().full[from], phase);
        u = barriers().taken[from];
        if (u < 0) break;
      }
      const int s = choice_of(a, u), unit = u - s * per_expert;
      const Chosen chosen = p.chosen[s];
      if (!GATE_UP && staged != chosen.number) {
        if (staged >= 0 || window.end > 0) meet_all();  // all warps have read the previous activations
        Base::template stage<true>(a, a.in + static_cast<int64_t>(chosen.number) * a.K, a.K / 8);
        staged = chosen.number;
      }
      float sums[2] = {};
      const uint8_t* scale = scale_upper + buffer * a.block;
      const uint8_t* factor = memory(a.held) + buffer * a.block + a.scales + row_upper * 2;
      float factor_upper = 1, factor_lower = 1;
      if (++buffer == a.scale_buffers) buffer = 0;
      int left = a.routed.row - own;
      for (int n = 0; n < slots; n++) {
        barrier_wait(&barriers().full[from], phase);
        if (COMPACT && n == 0) {
          factor_upper = bf16_at(factor) * (1.0f / 255);
          factor_lower = bf16_at(factor + rows_between * 2) * (1.0f / 255);
        }
        int4_share(from, v, n, left, scale, scale + rows_between * a.scale_row, sums);
        release(a, from, phase);
        left -= PIECE;
        scale += PIECE / 16 * Lane::SCALE;
      }
      add_lanes(sums);
      wait();
      finish(t == 0, sums[0] * factor_upper, sums[1] * factor_lower, [&](int row, float v, float up) {
        const int64_t at = static_cast<int64_t>(chosen.number) * a.routed.tiles * ROWS + (unit * RT + rt) * ROWS + row;
        if constexpr (JOINED) {
          Down<COMPACT>::hand_on(Down<COMPACT>::row_of(j, chosen.number) + unit * ROWS / 2, v / (1 + __expf(-v)) * up);
        } else if (GATE_UP) {
          static_cast<bf16*>(a.out)[at] = __float2bfloat16(v / (1 + __expf(-v)) * up);
        } else {
          static_cast<float*>(a.out)[at] = v * chosen.weight;
        }
      });
    }
    wait();
    if constexpr (JOINED) Down<COMPACT>::consume(j, from, phase);
  }

  // j: used if JOINED.
  static __device__ void run(const Args& a, const Maps& maps, const Joint& j) {
    const int c = blockIdx.x;
    const int shared_all = GATE_UP && a.quartered ? a.shared.tiles * ROWS / Base::QUARTERED_ROWS : a.shared.tiles / RT;
    const Range shared_units{before(a, c, shared_all), before(a, c + 1, shared_all)};
    const bool copies = threadIdx.x >= CONSUMERS;
    Asked asked{};
    Range own{0, 0};
    if (!GATE_UP && copies) {  // down's ids are older than its predecessor: read them before the wait
      let_successor_start();
      asked = ask(a);
      own = dealt(a);
    }
    if (copies) {
      if (elected()) {
#pragma unroll
        for (int n = 0; n < MOST_SLOTS; n++) {
          barrier_init(&barriers().full[n], 1);
          barrier_init(&barriers().empty[n], WARPS);
        }
        barrier_init(&barriers().planned, JOINED ? 2 : 1);
        barrier_init(&barriers().ready, 1);
        barriers_visible();
      }
      __syncwarp();
    }
    barriers_known<Base::THREADS>(copies);
    if (copies) {
      produce(a, maps, j, shared_units, asked, own);
    } else {
      consume(a, j, shared_units);
    }
  }
};

// Registers: two CTAs of gate_up fit on an SM beside mla_decode_router_t1.cu's. EARLY: one of down fits beside the two.
template <bool GATE_UP, bool COMPACT, int KS, int RT, int CTAS, bool EARLY>
__global__ __maxnreg__(GATE_UP ? 88 : EARLY ? 64 : 72) void moe_int4_t1_kernel(
    const __grid_constant__ Args a, const __grid_constant__ Maps maps) {
  Kernel<GATE_UP, COMPACT, KS, RT, EARLY>::run(a, maps, Joint{});
}

template <bool COMPACT>
__global__ __maxnreg__(88) void moe_int4_t1_joined_kernel(const __grid_constant__ Args a,
                                                          const __grid_constant__ Maps maps,
                                                          const __grid_constant__ Joint j) {
  Kernel<true, COMPACT, 7, 1, true, true>::run(a, maps, j);
}

template <typename K>
bool describe(CUtensorMap* map, const Matrix& m, int64_t rows, int chunk) {
  return maps::describe(map, m.data, chunk == 128 ? maps::SWIZZLED_BYTES : maps::SWIZZLED_HALF,
                        {chunk, rows, m.row / chunk}, {m.row, chunk}, {chunk, K::BOX_ROWS, K::PIECE / chunk});
}

// j: the second part of a launch of both products, or null.
template <bool GATE_UP, bool COMPACT, int KS, int RT, int CTAS, bool EARLY>
int start(Args a, int sms, void* stream, Joint* j = nullptr) {
  using K = Kernel<GATE_UP, COMPACT, KS, RT, EARLY>;
  constexpr int FIXED = 3072;  // bytes, more than static shared memory and the driver's
  constexpr int MOST = 228 * 1024 / CTAS - FIXED;
  // Without a shared expert its map is never used.
  const bool shares = a.shared.tiles > 0;
  if (!shares) a.shared.row = a.routed.row;
  a.chunk = a.routed.row % 128 || a.shared.row % 128 ? 64 : 128;
  const int ctas = CTAS * sms, per_unit = divide_up(min(a.routed.row, a.shared.row), K::PIECE);
  const auto bytes = [&] {
    const int of_one = K::arrange(a, K::BOTH);
    return j == nullptr ? of_one : Down<COMPACT>::arrange(a, j->down, of_one);
  };
  auto fits = [&](int slots) {
    a.slots = slots;
    // The slot that brings new scales must have held the old unit's last piece, or a later one: then all warps have
    // read the old scales.
    a.scale_buffers = divide_up(slots - 1, per_unit) + 1;
    return bytes() <= MOST;
  };
  int slots = K::MOST_SLOTS;
  while (slots > 2 && !fits(slots)) slots--;
  if (!fits(slots) || a.k > MAX_CHOICES || a.routed.tiles < 2 * RT) return -1;
  const int64_t per_expert = a.routed.tiles / RT;
  a.reciprocal = static_cast<uint32_t>(((int64_t(1) << 32) + per_expert - 1) / per_expert);
  Maps maps = {};
  if (!describe<K>(&maps.routed, a.routed, a.routed_rows, a.chunk) ||
      (shares && !describe<K>(&maps.shared, a.shared, a.shared_rows, a.chunk))) {
    return -1;
  }
  if (GATE_UP && EARLY && shares && a.shared.row % (4 * K::PIECE) == 0) {
    a.quartered = a.shared.row / (4 * K::PIECE);
    if (!maps::describe(&maps.quartered, a.shared.data, maps::BYTES, {128, a.shared_rows, a.shared.row / 128},
                        {a.shared.row, 128}, {128, K::QUARTERED_ROWS, KS})) {
      return -1;
    }
  }
  a.dealt = K::WIDE && a.k * per_expert > ctas ? ctas : 0;
  K::deal(a, ctas);
  if constexpr (GATE_UP && EARLY) {
    if (j != nullptr) {
      using D = Down<COMPACT>;
      Args& d = j->down;
      const bool rows_fill = d.routed.row % 128 == 0 && d.shared.row % 128 == 0 && d.routed.tiles % D::TILES == 0;
      if (a.chunk != 128 || !rows_fill || !describe<D>(&j->maps.routed, d.routed, d.routed_rows, 128) ||
          (shares && !describe<D>(&j->maps.shared, d.shared, d.shared_rows, 128))) {
        return -1;
      }
      const int units = d.routed.tiles / D::TILES;
      d.chunk = 128, d.reciprocal = static_cast<uint32_t>(((int64_t(1) << 32) + units - 1) / units);
      D::deal(d, ctas);
      return launch(moe_int4_t1_joined_kernel<COMPACT>, dim3(ctas), dim3(K::THREADS), bytes(), stream, 1, a, maps, *j);
    }
  }
  return launch(moe_int4_t1_kernel<GATE_UP, COMPACT, KS, RT, CTAS, EARLY>, dim3(ctas), dim3(K::THREADS), bytes(),
                stream, 1, a, maps);
}

}  // namespace

// h [k, I] and h_shared [S] from x [D]; S = 0: no shared expert. `row` is null unless scales are compact,
// `shared_scale` unless the shared expert is e4m3. counter: zero before, and after down. mailbox: of router_mailbox.cuh;
// launch: the number of the router launch that publishes its ids there, or 0. fresh, norm, eps: inputs to compute x
// from, D a multiple of 256; or null, and x is read. Returns -1 for sizes it cannot take.
API int moe_int4_t1_gate_up(const void* x, const void* ids, const void* packed, const void* scale, const void* row,
                              const void* shared, const void* shared_scale, void* h, void* h_shared, void* counter,
                              void* mailbox, int64_t launch, const void* fresh, const void* norm, float eps, int64_t k,
                              int64_t E, int64_t D, int64_t I, int64_t S, int64_t sms, void* stream) {
  Args a = gate_up_of(packed, scale, row, shared, shared_scale, k, E, D, I, S);
  a.fresh = static_cast<const uint32_t*>(fresh), a.norm = static_cast<const bf16*>(norm), a.eps = eps;
  a.in = a.in_shared = static_cast<const bf16*>(x);
  a.ids = static_cast<const int*>(ids);
  a.out = h;
  a.out_shared = static_cast<bf16*>(h_shared);
  a.counter = static_cast<uint32_t*>(counter);
  a.mailbox = static_cast<uint32_t*>(mailbox), a.launch = static_cast<uint32_t>(launch);
  const auto of = [&](auto early) {
    constexpr bool EARLY = decltype(early)::value;
    return row == nullptr ? start<true, false, 7, 1, 2, EARLY>(a, static_cast<int>(sms), stream)
                          : start<true, true, 7, 1, 2, EARLY>(a, static_cast<int>(sms), stream);
  };
  return I <= EARLY_WIDTH ? of(std::true_type()) : of(std::false_type());
}

// y [P, D] from h and h_shared; P = k + 1 with a row of y for the shared expert, written if S > 0.
API int moe_int4_t1_down(const void* h, const void* h_shared, const void* ids, const void* weights,
                           const void* packed, const void* scale, const void* row, const void* shared,
                           const void* shared_scale, void* y, void* counter, void* mailbox, int64_t launch, int64_t k,
                           int64_t E, int64_t D, int64_t I, int64_t S, int64_t P, int64_t sms, void* stream) {
  Args a = down_of(packed, scale, row, shared, shared_scale, k, E, D, I, S);
  a.in = static_cast<const bf16*>(h);
  a.in_shared = static_cast<const bf16*>(h_shared);
  a.ids = static_cast<const int*>(ids);
  a.weights = static_cast<const float*>(weights);
  a.out = y;
  a.P = static_cast<int>(P);
  a.counter = static_cast<uint32_t*>(counter);
  a.mailbox = static_cast<uint32_t*>(mailbox), a.launch = static_cast<uint32_t>(launch);
  const auto of = [&](auto warps, auto tiles, auto early) {
    constexpr int KS = decltype(warps)::value, RT = decltype(tiles)::value;
    constexpr bool EARLY = decltype(early)::value;
    return row == nullptr ? start<false, false, KS, RT, 3, EARLY>(a, static_cast<int>(sms), stream)
                          : start<false, true, KS, RT, 3, EARLY>(a, static_cast<int>(sms), stream);
  };
  const auto fills = [&](int tiles) { return I * tiles == 2048 && D % (16 * tiles) == 0; };  // rows fill a slot
  using std::integral_constant;
  if (fills(4)) return of(integral_constant<int, 2>(), integral_constant<int, 4>(), std::true_type());
  if (fills(8)) return of(integral_constant<int, 1>(), integral_constant<int, 8>(), std::true_type());
  return I <= EARLY_WIDTH ? of(integral_constant<int, 4>(), integral_constant<int, 2>(), std::true_type())
                          : of(integral_constant<int, 4>(), integral_constant<int, 2>(), std::false_type());
}

// y [P, D] from x [D] in one launch; the engine must have the GPU for itself. D a multiple of 1,792, I of 256, bytes of
// a row of the shared expert's down of 128; S at most I. memory: 4 words of counters, then the mailbox of h, (k + 1) I
// words; zero at first, and used by launches of these sizes only. Other arguments: as of the two launches.
API int moe_int4_t1(const void* x, const void* ids, const void* weights, const void* up_packed, const void* up_scale,
                    const void* up_row, const void* up_shared, const void* up_shared_scale, const void* down_packed,
                    const void* down_scale, const void* down_row, const void* down_shared,
                    const void* down_shared_scale, void* y, void* memory, void* mailbox, int64_t launch,
                    const void* fresh, const void* norm, float eps, int64_t k, int64_t E, int64_t D, int64_t I,
                    int64_t S, int64_t P, int64_t sms, void* stream) {
  uint32_t* words = static_cast<uint32_t*>(memory);
  Args a = gate_up_of(up_packed, up_scale, up_row, up_shared, up_shared_scale, k, E, D, I, S);
  a.fresh = static_cast<const uint32_t*>(fresh), a.norm = static_cast<const bf16*>(norm), a.eps = eps;
  a.in = a.in_shared = static_cast<const bf16*>(x);
  a.ids = static_cast<const int*>(ids);
  a.counter = words + 2;
  a.mailbox = static_cast<uint32_t*>(mailbox), a.launch = static_cast<uint32_t>(launch);
  Joint j = {};
  j.down = down_of(down_packed, down_scale, down_row, down_shared, down_shared_scale, k, E, D, I, S);
  j.down.weights = static_cast<const float*>(weights);
  j.down.out = y;
  j.down.P = static_cast<int>(P);
  j.parts = static_cast<int>(min(I / 256, int64_t(4)));  // KS of moe_int4_t1_down
  j.counts = words, j.h = words + 4, j.half = static_cast<int>((k + 1) * I / 2);
  return up_row == nullptr ? start<true, false, 7, 1, 2, true>(a, static_cast<int>(sms), stream, &j)
                           : start<true, true, 7, 1, 2, true>(a, static_cast<int>(sms), stream, &j);
}
