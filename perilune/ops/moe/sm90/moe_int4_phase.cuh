// A phase of moe_int4_mma_tma.cu, gate_up or down: what a CTA's producer, consumer and finishing warps do in it.
#pragma once
#include "moe/sm90/moe_int4_tile.cuh"

namespace moe {

enum Phases { GATE_UP = 1, DOWN = 2, BOTH = 3 };

// Counters in global memory, zero at first. Launches of one stream use the halves in turn; each clears the other's half
// after its wait, when the launch before has ended.
struct Units {
  static constexpr int WORDS = MAX_PAIRS + 4;  // words of a half
  uint32_t ctas;  // CTAs started, modulo the CTAs of two launches: selects the half
  uint32_t apart[3];  // with two launches: ranges taken in gate_up's, in down's; each launch clears the other's
  uint32_t half[2][WORDS];
  // Indices in a half: ranges taken after every CTA's first, of gate_up and of down; finished tiles of gate_up, of the
  // shared expert and of each segment.
  static constexpr int TAKEN = 0, SHARED = 2, SEGMENTS = 3;
};

struct Both {
  Args up, down;
  Maps up_maps, down_maps;
  Units* units;
};

__device__ __forceinline__ uint32_t count_at(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Called by a whole warp, after its writes of `tiles` tiles of h.
__device__ __forceinline__ void add_finished(uint32_t* p, int tiles) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    atomicAdd(p, static_cast<uint32_t>(tiles));
  }
}

// One phase's part of a CTA's work.
template <bool UP, bool COMPACT, int WIDE, bool JOINED>
struct Phase : Tile<UP, COMPACT, WIDE> {
  using Base = Tile<UP, COMPACT, WIDE>;
  using typename Base::Held;
  using typename Base::Warp;
  using Base::BOXES;
  using Base::FACTORS_PITCH;
  using Base::GROUP;
  using Base::GROUPS;
  using Base::halves;
  using Base::hand;
  using Base::KS;
  using Base::memory;
  using Base::plan_of;
  using Base::planes;
  using Base::RT;
  using Base::SCALES_PITCH;
  using Base::SLOT;
  using Base::SLOT_PITCH;
  using Base::sums_ring;
  using Base::TURNS;
  using Base::UNIT_ROWS;
  using Base::WARPS;

  // ---- the producer warp: one thread ----

  // tiles_of_h: gate_up's tiles per segment; down's products need all of them.
  static __device__ void produce(const Args& a, const Maps& maps, uint32_t tiles_of_h, Place& into) {
    Control& c = control();
    auto put = [&](const Matrix& m, const CUtensorMap& map, int row, int chunk, int item, bool begins) {
      uint64_t* barrier = &c.full[into.at];
      barrier_wait_to_refill(&c.empty[into.at], into.phase);
      c.item[into.at] = item;
      const bool scaled = m.scale != nullptr;
      const int whole = 16 * RT * a.scale_row, factor = !begins || m.factor == nullptr ? 0 : scaled ? 2 : 4;  // bytes
      barrier_expect(barrier, SLOT + (!scaled ? 0 : a.whole_scales ? whole : 16 * a.scale_pitch) + 16 * RT * factor);
      uint8_t* slot = memory(into.at * SLOT_PITCH);
      uint8_t* scales = memory(a.scales + into.at * SCALES_PITCH);
      const int x = m.chunk == 128 ? chunk : chunk * 2;
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        const int first = row + box * m.second;
        tensor_load_once(slot + box * (SLOT / 2), &map, 0, first, x, barrier);
        if (scaled && !a.whole_scales) {
          uint8_t* to = scales + box * 8 * a.scale_pitch;
          tensor_load_once(to, &maps.scales, chunk * Base::SCALE_UNIT & ~15, first, 0, barrier);
        }
      }
      const auto rows = [&](uint8_t* to, const uint8_t* from, int each) {  // `each` bytes of a row
        const int bytes = 16 * RT / BOXES * each;
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
          bulk_load_once(to + box * bytes, from + (row + static_cast<int64_t>(box) * m.second) * each, bytes, barrier);
        }
      };
      if (scaled && a.whole_scales) rows(scales, m.scale, a.scale_row);
      if (factor) rows(memory(a.factors + into.at * FACTORS_PITCH), m.factor, factor);
      into.advance(1, a.slots);
    };
    const Range tiles = equal_part(a.shared.tiles);
    if (JOINED && !UP && tiles.first < tiles.end) {  // wait for the shared expert's h, which gate_up computes first
      while (count_at(c.units + Units::SHARED) < static_cast<uint32_t>(a.shared_tiles_of_h)) {
      }
    }
    for (int tile = tiles.first; tile < tiles.end; tile++) {
      for (int half = 0; half < halves(a); half++) {
        for (int j = 0; j < a.shared_visit; j++) {
          for (int part = 0; part < a.parts; part++) {
            put(a.shared, maps.shared, tile * UNIT_ROWS, (part * a.shared_visit + j) * KS, 0, j == 0);
          }
        }
      }
    }
    barrier_wait(&c.planned, 0);
    const int all = c.segments * a.routed.tiles;
    const Segment* segments = plan_of(a).segments;
    uint32_t* taken = JOINED ? c.units + Units::TAKEN + !UP : a.taken;
    int seen = -1;  // the last segment found with complete h
    Ranges<UP ? 2 : 3> ranges(all, a.per_round);
    for (int i = blockIdx.x;;) {
      const Range items = ranges.number(i);
      if (items.first >= all) break;
      int segment = items.first / a.routed.tiles, tile = items.first - segment * a.routed.tiles;
      for (int n = items.first; n < items.end; n++) {
        if (n == items.end - 1) {
          wait_for_predecessor();
          i = gridDim.x + atomicAdd(taken, 1);
        }
        const int row = segments[segment].expert() * a.routed.expert + tile * UNIT_ROWS;
        int item = segment << TILE_BITS | tile;
        if (UP) {
          if (n == items.end - 1 || tile == a.routed.tiles - 1) item |= LAST;
        } else if (JOINED && segment != seen) {
          if (count_at(c.units + Units::SEGMENTS + segment) >= tiles_of_h) {
            seen = segment;
          } else {
            item |= WAITS;
          }
        }
        for (int j = 0; j < a.visit; j++) {
          for (int part = 0; part < a.parts; part++) {
            put(a.routed, maps.routed, row, (part * a.visit + j) * KS, item, j == 0);
          }
        }
        if (++tile == a.routed.tiles) tile = 0, segment++;
      }
    }
    if (JOINED && UP) {
      c.down = {into.at, into.phase ^ 1};  // consumers begin with the other parity
      c.down.advance(GROUPS, a.slots);
    }
    for (int n = 0; n < GROUPS; n++) {  // the end mark: a slot with item -1 for each group of warps
      barrier_wait(&c.empty[into.at], into.phase);
      c.item[into.at] = -1;
      barrier_arrive(&c.full[into.at]);
      into.advance(1, a.slots);
    }
  }

  // ---- the consumer warps ----

  template <bool FP8>
  static __device__ void consume_shared(const Args& a, Warp& w, int rt, int lanes, Held& b) {
    const Range tiles = equal_part(a.shared.tiles);
    const int items = (tiles.end - tiles.first) * halves(a), skip = (lanes - 1) * a.shared_visit * a.parts;
    w.from.advance(rt * a.shared_visit * a.parts + w.part, a.slots);
    int held = -1;
    for (int n = rt; n < items; n += lanes) {
      const int half = n % halves(a);
      if (half != held) {
        if (JOINED && !UP) barrier_wait(&control().full[w.from.at], w.from.phase);  // filled only once h was complete
        Base::template hold_tokens<FP8>(a, w, half, b);
      }
      held = half;
      float upper = 1 / RAISED, lower = upper;
      if (FP8) {
        barrier_wait(&control().full[w.from.at], w.from.phase);
        const float* factor =
            reinterpret_cast<const float*>(memory(a.factors + w.from.at * FACTORS_PITCH)) + w.rt * 16 + w.g;
        upper = factor[0] * (0x1p120f / RAISED), lower = factor[8] * (0x1p120f / RAISED);
      }
      float d[4];
      Base::template multiply_tokens<FP8>(a, w, b, d);
      for (int plane = 0; plane < planes(a); plane++) {
        w.turn = n * planes(a) + plane;
        hand(a, w, make_float2((plane ? d[1] : d[0]) * upper, (plane ? d[3] : d[2]) * lower), 0);
      }
      w.from.advance(skip, a.slots);
    }
  }

  // begin: the phase's first slot.
  static __device__ void consume(const Args& a, uint32_t tiles_of_h, Place begin) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / GROUP;
    const int rt = group / a.parts, lanes = GROUPS / a.parts;  // tiles that are worked on at a time
    if (rt >= lanes) return;
    Warp w{lane, lane / 4, lane % 4, warp % KS, group % a.parts, 0, begin, nullptr, 0, 0};
    if (RT > 1) w.rt = warp % GROUP / KS;
    w.starts = reinterpret_cast<float*>(memory(a.starts)) + warp * (2 * COLUMNS * 8);
    Held b;
    const Range tiles = equal_part(a.shared.tiles);
    const int items = (tiles.end - tiles.first) * halves(a);
    if (!UP) wait_for_predecessor();
    if (items > 0) {
      if (a.shared.factor == nullptr) {
        consume_shared<false>(a, w, rt, lanes, b);
      } else {
        consume_shared<true>(a, w, rt, lanes, b);
      }
    }
    wait_for_predecessor();
    if (lanes > 1 && a.shared.tiles) named_sync(1, WARPS * 32);  // other groups of warps read the slots from here on

    Control& c = control();
    const Segment* segments = plan_of(a).segments;
    const int near = Base::near_of(a.routed.chunk, w.ks, w.rt * 16 + lane % 16, lane / 16);
    const int far = Base::far_of(a.routed.chunk, near);
    const int first_scale = Base::scale_of(a, w.rt * 16 + w.g, w.ks * Base::SCALE_UNIT);
    const uint8_t* scales = memory(a.scales) + first_scale;
    w.odd = Base::scale_of(a, w.rt * 16 + w.g, w.ks * Base::SCALE_UNIT + 8) - first_scale;
    w.from = begin;
    w.from.advance((items * a.shared_visit + rt * a.visit) * a.parts + w.part, a.slots);
    w.turn = items * planes(a) + rt;
    const int skip = (lanes - 1) * a.visit * a.parts;
    int held = -1, count = 0;
    for (;; w.turn += lanes) {
      barrier_wait(&c.full[w.from.at], w.from.phase);
      const int item = c.item[w.from.at];
      if (item < 0) break;
      const int number = (item & (LAST - 1)) >> TILE_BITS;
      if (number != held) {
        held = number;
        if (JOINED && !UP && item & WAITS) {
          if (lane == 0) {
            while (count_at(c.units + Units::SEGMENTS + number) < tiles_of_h) {
            }
          }
          __syncwarp();
        }
        const Segment segment = segments[held];
        count = segment.count();
        if (count == 1) {
          Base::template hold<1>(a, w, segment, b);
        } else if (count == 2) {
          Base::template hold<2>(a, w, segment, b);
        } else {
          Base::template hold<4>(a, w, segment, b);
        }
      }
      float upper = 1, lower = 1;
      if (COMPACT) {
        const bf16* factor =
            reinterpret_cast<const bf16*>(memory(a.factors + w.from.at * FACTORS_PITCH)) + w.rt * 16 + w.g;
        upper = __bfloat162float(factor[0]) * (1.0f / 255);
        lower = __bfloat162float(factor[8]) * (1.0f / 255);
      }
      float2 sums;
      if (count == 1) {
        sums = Base::template multiply<1>(a, w, b, near, far, scales);
      } else if (count == 2) {
        sums = Base::template multiply<2>(a, w, b, near, far, scales);
      } else {
        sums = Base::template multiply<4>(a, w, b, near, far, scales);
      }
      if (COMPACT) sums.x *= upper, sums.y *= lower;
      hand(a, w, sums, item);
      w.from.advance(skip, a.slots);
    }
    Base::release(a, w);
    hand(a, w, make_float2(0, 0), -1);
  }

  // ---- the warp that finishes ----

  static __device__ void finish(const Args& a) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, share = GROUP * a.parts;
    Sums& c = sums_ring();
    uint32_t* units = control().units;
    float* weights = reinterpret_cast<float*>(memory(a.places));  // the pairs' weights, in place of `places`
    if (!UP) {
      for (int n = lane; n < a.T * a.k; n += 32) weights[n] = __ldcg(a.weights + n) * RESULT;
      __syncwarp();
    }
    Place from{0, 0};
    struct Sum {
      float2 of[RT];
    };
    auto take = [&](int& item) {
      barrier_wait(&c.added[from.at], from.phase);
      item = c.result[from.at];
      const float2* at = reinterpret_cast<const float2*>(memory(a.sums)) + from.at * share * 32 + lane;
      Sum sum = {};
#pragma unroll
      for (int rt = 0; rt < RT; rt++) {
#pragma unroll 4
        for (int n = 0; n < (RT == 1 ? share : KS); n++) {
          const float2 v = at[(rt * KS + n) * 32];
          sum.of[rt].x += v.x, sum.of[rt].y += v.y;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&c.free[from.at]);
      from.advance(1, TURNS);
      return sum;
    };
    auto activated = [](float gate, float up) { return __float2bfloat16(gate / (1 + __expf(-gate)) * up); };
    int item;
    const Range tiles = equal_part(a.shared.tiles);
    for (int n = tiles.first * halves(a); n < tiles.end * halves(a); n++) {
      const int tile = n / halves(a), half = n % halves(a);
      for (int plane = 0; plane < planes(a); plane++) {
        const Sum v = take(item);
        const int token = half * TOKENS + 2 * t + plane;
        if (token >= a.T) continue;
        if (UP) {
          a.out_shared[static_cast<int64_t>(token) * a.shared.tiles * UNIT_ROWS + tile * UNIT_ROWS + g] =
              activated(v.of[0].x, v.of[0].y);
        } else {
          const int64_t row = static_cast<int64_t>(token) * a.P + a.P - 1;
          float* y = static_cast<float*>(a.out) + row * a.shared.tiles * UNIT_ROWS;
#pragma unroll
          for (int rt = 0; rt < RT; rt++) {
            y[tile * UNIT_ROWS + rt * 16 + g] = v.of[rt].x;
            y[tile * UNIT_ROWS + rt * 16 + g + 8] = v.of[rt].y;
          }
        }
      }
    }
    if (JOINED && UP && tiles.first < tiles.end) add_finished(units + Units::SHARED, tiles.end - tiles.first);
    const int64_t width = a.routed.tiles * UNIT_ROWS;
    int held = -1, finished = 0;
    bool mine = false;
    float weight = RESULT;
    void* to = nullptr;
    for (;;) {
      const Sum v = take(item);
      if (item < 0) break;
      const int number = (item & (LAST - 1)) >> TILE_BITS;
      if (number != held) {
        held = number;
        const Segment segment = plan_of(a).segments[held];
        const int count = segment.count(), lanes = count == 1 ? 4 : count == 2 ? 2 : 1;  // lanes per token
        mine = t % lanes == 0 && t / lanes < count;
        if (mine) {
          const int pair = plan_of(a).sorted[segment.first() + t / lanes];
          if (UP) {
            to = static_cast<bf16*>(a.out) + pair * width + g;
          } else {
            to = static_cast<float*>(a.out) + (static_cast<int64_t>(pair / a.k) * a.P + pair % a.k) * width + g;
            weight = weights[pair];
          }
        }
      }
      const int row = (item & ((1 << TILE_BITS) - 1)) * UNIT_ROWS;
      if (UP) {
        if (mine) static_cast<bf16*>(to)[row] = activated(v.of[0].x * RESULT, v.of[0].y * RESULT);
        finished++;
        if (JOINED && item & LAST) add_finished(units + Units::SEGMENTS + number, finished), finished = 0;
      } else if (mine) {
#pragma unroll
        for (int rt = 0; rt < RT; rt++) {
          static_cast<float*>(to)[row + rt * 16] = v.of[rt].x * weight;
          static_cast<float*>(to)[row + rt * 16 + 8] = v.of[rt].y * weight;
        }
      }
    }
  }
};

}  // namespace moe
