// gate_up and down of one token in one launch (moe_int4_t1.cu, JOINED): what comes after gate_up.
//
// While the last of h is computed, the ring fills with weights of down. A unit is 112 rows, 16 of each of 7 warps, and
// a slot 128 bytes of each of these rows: as many bytes as a slot of gate_up. A warp has whole rows, and its sums need
// no exchange. In down's own launch the KS warps of a tile each sum every KS-th 128 bytes of a row; here one warp
// computes these `parts` one after the other, so that y has the same bits.
//
// h travels through a mailbox in global memory: a row of I values for every choice and one for the shared expert, as
// pairs that are never zero (`written` in router_mailbox.cuh). Launches use its halves in turn and clear the other half
// after their wait, when the launch before has ended.
//
// All CTAs must be resident at once.
#pragma once
#include "moe/sm90/moe_int4_t1.cuh"

namespace moe {

struct Joint {
  Args down;
  Maps maps;
  int parts;         // parts of a row
  uint32_t* counts;  // CTAs that have started, of all launches; CTAs of this launch that have ended gate_up
  uint32_t* h;       // [2, half]: the mailbox
  int half;          // words
};

// A place in the ring: the slot, the parity to wait for, and whether the slot has been filled before.
struct Place {
  int at, phase;
  bool refills;
};

template <bool COMPACT>
struct Down : OneToken<false, COMPACT, 1, 7> {
  using Base = OneToken<false, COMPACT, 1, 7>;
  using typename Base::Lane;
  using typename Base::Window;
  using Base::add_lanes;
  using Base::barriers;
  using Base::before;
  using Base::bf16_at;
  using Base::choice_of;
  using Base::CONSUMERS;
  using Base::dealt;
  using Base::int4_share;
  using Base::lane_of;
  using Base::meet_all;
  using Base::memory;
  using Base::PIECE;
  using Base::plan_of;
  using Base::release;
  using Base::SLOT;
  using Base::THREADS;
  using Base::UNIT_ROWS;
  static constexpr int TILES = 7;  // tiles of a unit, one per warp
  static constexpr int ENDED = 3;  // named barrier: this CTA needs the router's mailbox and the counter no more

  // The mailbox's row of choice `number` in this launch; number k: of the shared expert.
  static __device__ __forceinline__ uint32_t* row_of(const Joint& j, int number) {
    return j.h + barriers().half * j.half + number * (j.down.K / 2);
  }
  // Clears the CTA's part of the half that this launch does not use. Called by one thread.
  static __device__ __forceinline__ void clear(const Joint& j) {
    uint32_t* other = j.h + (1 - barriers().half) * j.half;
    for (int n = blockIdx.x * 4; n < j.half; n += gridDim.x * 4) mailbox::put16(other + n, uint4{});
  }
  // Writes 8 adjacent values of h, one of each of the warp's first 8 lanes, which call this.
  static __device__ __forceinline__ void hand_on(uint32_t* to, float v) {
    constexpr unsigned LANES = 0xff;
    const uint32_t mine = __bfloat16_as_ushort(__float2bfloat16(v));
    const uint32_t pair = mailbox::written(mine | __shfl_down_sync(LANES, mine, 1) << 16);
    const uint32_t y = __shfl_sync(LANES, pair, 2), z = __shfl_sync(LANES, pair, 4), w = __shfl_sync(LANES, pair, 6);
    if (threadIdx.x % 32 == 0) mailbox::put16(to, make_uint4(pair, y, z, w));
  }
  // Writes 2 adjacent values of h, of the warp's first 2 lanes. Called by its first 8.
  static __device__ __forceinline__ void hand_on_pair(uint32_t* to, float v) {
    const uint32_t mine = __bfloat16_as_ushort(__float2bfloat16(v)), next = __shfl_down_sync(0xff, mine, 1);
    if (threadIdx.x % 32 == 0) mailbox::put(to, mailbox::written(mine | next << 16));
  }

  // This CTA's units of the shared expert.
  static __device__ __forceinline__ Range shared_units(const Args& a) {
    const int all = a.shared.tiles / TILES, c = blockIdx.x;
    return {before(a, c, all), before(a, c + 1, all)};
  }
  // This CTA's units of chosen experts: as in down's own launch, an equal part of all bytes; an equal part of the units
  // left if some ids are no experts.
  static __device__ __forceinline__ Range routed_units(const Args& a) {
    const int count = plan_of().count, all = count * (a.routed.tiles / TILES), c = blockIdx.x;
    return count == a.k ? dealt(a) : Range{before(a, c, all), before(a, c + 1, all)};
  }

  // The producer warp, after its last copy of gate_up, which has the arguments `up`.
  static __device__ void produce(const Args& up, const Joint& j, Place to) {
    const Args& a = j.down;
    const int lane = threadIdx.x % 32;
    int buffer = 0;
    bool first = true;
    const auto copy = [&](const Matrix& w, const CUtensorMap& map, int expert, int unit) {
      const int64_t row = expert * w.expert + static_cast<int64_t>(unit) * UNIT_ROWS;
      const int chunks = w.row / PIECE;
      for (int part = 0; part < j.parts; part++) {
        for (int chunk = part; chunk < chunks; chunk += j.parts) {
          uint64_t* barrier = &barriers().full[to.at];
          if (to.refills) barrier_wait_to_refill(&barriers().empty[to.at], to.phase);
          if (elected()) {
            const int scales = chunk == 0 && w.scale != nullptr ? a.scales : 0;
            const int factors = chunk == 0 && w.factor != nullptr ? UNIT_ROWS * (w.scale == nullptr ? 4 : 2) : 0;
            if (first) barriers().taken[to.at] = -1;  // gate_up has no more units
            barrier_expect(barrier, SLOT + scales + factors);
            tensor_load_once(memory(to.at * SLOT), &map, 0, static_cast<int>(row), chunk, barrier);
            uint8_t* held = memory(a.held) + buffer * a.block;
            if (scales) bulk_load_once(held, w.scale + row * a.scale_row, scales, barrier);
            if (factors) bulk_load_once(held + a.scales, w.factor + row * (factors / UNIT_ROWS), factors, barrier);
          }
          __syncwarp();
          first = false;
          if (++to.at == a.slots) to.at = 0, to.phase ^= 1, to.refills = true;
        }
      }
      if (++buffer == a.scale_buffers) buffer = 0;
    };
    const Range shared = shared_units(a), routed = routed_units(a);
    for (int u = shared.first; u < shared.end; u++) copy(a.shared, j.maps.shared, 0, u);
    for (int u = routed.first; u < routed.end; u++) {
      const int s = choice_of(a, u);
      copy(a.routed, j.maps.routed, plan_of().chosen[s].expert, u - s * (a.routed.tiles / TILES));
    }
    if (first) {  // this CTA has no units of down
      if (to.refills) barrier_wait(&barriers().empty[to.at], to.phase);
      if (lane == 0) {
        barriers().taken[to.at] = -1;
        barrier_arrive(&barriers().full[to.at]);
      }
    }
    named_sync(ENDED, THREADS);
    uint32_t ended = 0;
    if (lane == 0) ended = atomicAdd(j.counts + 1, 1);
    if (__shfl_sync(~0u, ended, 0) != gridDim.x - 1) return;
    if (lane == 0) j.counts[1] = 0, *up.counter = 0;
    if (up.launch) mailbox::wipe(up.mailbox);
  }

  // Waits for h of choice `number` and copies it to shared memory, as OneToken::stage does.
  template <bool ROUTED>
  static __device__ __forceinline__ void stage_h(const Joint& j, int number, int values) {
    const Args& a = j.down;
    meet_all();  // all warps have read the previous activations
    const uint32_t* words = row_of(j, number);
    for (int piece = threadIdx.x; piece < values / 8; piece += CONSUMERS) {
      uint4 v;
      do v = mailbox::glance16(words + piece * 4);
      while (mailbox::misses(v));
      v = make_uint4(~v.x, ~v.y, ~v.z, ~v.w);
      if (ROUTED) {
        Base::put(a, v, piece);
      } else {
        Base::put_raised(a.xs, v, piece);
      }
    }
    meet_all();
  }

  // The consumer warps, after their last tile of gate_up.
  static __device__ void consume(const Joint& j, int from, int phase) {
    const Args& a = j.down;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    asm volatile("bar.arrive %0, %1;" ::"n"(ENDED), "n"(THREADS) : "memory");
    int buffer = 0;
    const int units = a.routed.tiles / TILES;  // of an expert
    float* const y = static_cast<float*>(a.out) + warp * 16 + g;
    const auto store = [&](int number, int unit, float upper, float lower) {
      if (t != 0) return;  // all lanes of a row have its sum
      float* to = y + (number * units + unit) * UNIT_ROWS;
      to[0] = upper, to[8] = lower;
    };
    const Range shared = barriers().down[0];  // computed before x was there: here, h would wait for it
    const Range routed = plan_of().count == a.k ? barriers().down[1] : routed_units(a);
    if (shared.first < shared.end) stage_h<false>(j, a.k, a.S);
    for (int u = shared.first; u < shared.end; u++) {
      Window window{0, 0};
      float upper = 0, lower = 0;
      for (int part = 0; part < j.parts; part++) {
        float total[4];
        if (a.shared.factor == nullptr) {
          Base::template dense_tile<false, true>(a, buffer, window, from, phase, total, part, j.parts);
        } else {
          Base::template dense_tile<true, true>(a, buffer, window, from, phase, total, part, j.parts);
        }
        upper += total[0], lower += total[2];
      }
      if (++buffer == a.scale_buffers) buffer = 0;
      store(a.P - 1, u, upper, lower);
    }
    const Lane v = lane_of(a, 0, warp);
    const int chunks = a.routed.row / PIECE;
    int staged = -1;
    float weight = 0;
    for (int u = routed.first; u < routed.end; u++) {
      const int s = choice_of(a, u);
      const int number = plan_of().chosen[s].number;
      if (number != staged) {
        weight = __ldcg(a.weights + number);
        stage_h<true>(j, number, a.K);
        staged = number;
      }
      const uint8_t* held = memory(a.held) + buffer * a.block;
      const uint8_t* scale = held + (warp * 16 + g) * a.scale_row + t * Lane::SCALE;
      float factor[2] = {1, 1}, row[2] = {};
      for (int part = 0; part < j.parts; part++) {
        float sums[2] = {};
        for (int chunk = part; chunk < chunks; chunk += j.parts) {
          barrier_wait(&barriers().full[from], phase);
          if (COMPACT && chunk == 0) {
            const uint8_t* of_row = held + a.scales + (warp * 16 + g) * 2;
            factor[0] = bf16_at(of_row) * (1.0f / 255), factor[1] = bf16_at(of_row + 16) * (1.0f / 255);
          }
          const uint8_t* above = scale + chunk * (PIECE / 16 * Lane::SCALE);
          int4_share(from, v, chunk, PIECE, above, above + 8 * a.scale_row, sums);
          release(a, from, phase);
        }
        add_lanes(sums);
        row[0] += __fmul_rn(sums[0], factor[0]), row[1] += __fmul_rn(sums[1], factor[1]);  // as in `finish`
      }
      if (++buffer == a.scale_buffers) buffer = 0;
      store(number, u - s * units, row[0] * weight, row[1] * weight);
    }
  }

  // Lays out what down needs beyond `bytes` bytes of gate_up's shared memory and returns the bytes of both.
  static int arrange(const Args& up, Args& a, int bytes) {
    a.slots = up.slots, a.zeros = up.zeros, a.xs = a.xs_shared = up.xs, a.units = up.units;
    a.scale_row = a.K / (COMPACT ? 32 : 16);
    a.scales = UNIT_ROWS * a.scale_row;
    a.block = a.scales + UNIT_ROWS * (a.shared.factor != nullptr ? 4 : COMPACT ? 2 : 0);
    const int least = a.shared.tiles ? min(a.routed.row, a.shared.row) : a.routed.row;
    a.scale_buffers = divide_up(a.slots - 1, least / PIECE) + 1;  // as for gate_up (`start` in moe_int4_t1.cu)
    a.held = bytes;
    return a.held + a.scale_buffers * a.block;
  }
};

}  // namespace moe
