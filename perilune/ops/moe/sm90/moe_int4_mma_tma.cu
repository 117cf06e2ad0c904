// The MoE block for 2 to 128 tokens, with compact scales for up to 256: bound by reading expert weights. Contract in
// moe_int4.py.
//
// Two phases, as two launches or JOINED in one: gate_up (+ SiLU) writes h, down writes rows of y. A tile is 16 rows of
// weights: the rows of the tensor core's A. (gate_up: 8 gate rows and their 8 up rows, so that one thread has both.) A
// producer warp only fills slots of the CTA's ring: GROUP chunks of 128 bytes of each of a tile's rows, copied as boxes of tensor maps. A
// consumer warp multiplies the same chunk of every slot of its group, so its k are always the same: it keeps their
// activations in registers and reads only weights and scales. A last warp groups the pairs, adds the sums of a tile's
// warps and writes the result; the others never wait for each other within a phase.
//
// JOINED: while the last of h is written, the ring fills with weights of down. As two launches, memory idles meanwhile,
// 6 us on a slice of four: CTAs end, start and ask. down's products need all of a segment's h: `Units` counts finished
// tiles. The producer reads the count when it issues copies, when most segments are complete, and else marks the item
// WAITS: the consumers then wait for the count. All CTAs must be resident at once.
//
// INT4: ldmatrix hands lane (g, t) word t of a group's 16 bytes in row g (int4_mma.cuh).
//
// The 8 columns of B are N tokens times 8 / N groups of 32 k: a column's activations are zero except for its own
// groups, so that one accumulator holds the sums of 8 / N groups, each of which is multiplied by its own scale in fp32:
// exact. Lane (g, t) has two neighbouring groups in its two columns. Whatever N is, the groups' sums are added in the
// same order: a token's result does not depend on the expert's other tokens.
//
// Where a row is 128, 256 or 512 bytes (down of a rank's slice), a slot has 8, 4 or 2 tiles, and fewer warps share each.
//
// Work: the routed pairs are grouped by expert into segments of up to 4 pairs. CTAs start and run unevenly, so each
// takes ranges of (segment, tile) one by one (`Ranges`).
#include "moe/sm90/moe_int4_tile.cuh"

#include <type_traits>

using namespace hopper;
using namespace moe;

namespace {

enum Phases { GATE_UP = 1, DOWN = 2, BOTH = 3 };

// Counters in global memory, zero at first. Launches of one stream use the halves in turn; each clears the other's half
// after its wait, when the launch before has ended.
struct Units {
  static constexpr int WORDS = MAX_PAIRS + 4;
  uint32_t ctas;  // that have started in this launch and the one before: says which half
  uint32_t apart[3];  // ranges taken, of gate_up's launch and of down's: each clears the other's
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
  using Base::VISIT;
  using Base::WARPS;

  // ---- the producer warp: one thread ----

  // tiles_of_h: of a segment, of which down's products need all.
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
    if (JOINED && !UP && tiles.first < tiles.end) {  // gate_up's CTAs compute the shared expert before all else
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
    int seen = -1;  // the last segment of which h was complete
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
    for (int n = 0; n < GROUPS; n++) {  // a slot for each group of warps says that there is no more
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
        if (JOINED && !UP) barrier_wait(&control().full[w.from.at], w.from.phase);  // issued when h was complete
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
    float* weights = reinterpret_cast<float*>(memory(a.places));  // of pairs, in the memory of the plan's `places`
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
        const int count = segment.count(), lanes = count == 1 ? 4 : count == 2 ? 2 : 1;  // per token
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

// PHASES of a launch. JOINED: both; then CTAs wait for each other.
template <bool COMPACT, int WIDE, int PHASES>
struct Kernel {
  static constexpr bool JOINED = PHASES == BOTH;
  using Up = Phase<true, COMPACT, WIDE, JOINED>;
  using Down = Phase<false, COMPACT, WIDE, JOINED>;
  static constexpr int WARPS = PHASES == GATE_UP ? Up::WARPS : Down::WARPS;
  // JOINED: the producer and the finishing warp share the SM's parts that have fewer of gate_up's warps (14 of 16).
  static constexpr int PRODUCER = WARPS + (JOINED ? 2 : 0), THREADS = (PRODUCER + 2) * 32;
  // JOINED: registers per thread at the launch, of consumers, of the other warpgroup. More than the launch got: a hang.
  static constexpr int REGISTERS = 96, MANY = 112, FEW = 32;
  static_assert(!JOINED || (WARPS * MANY + 4 * FEW <= (WARPS + 4) * REGISTERS && THREADS == (WARPS + 4) * 32));

  // Lays out shared memory and returns its bytes.
  static int arrange(Both& b) {
    Args& a = b.up;
    const int pairs = a.T * a.k;
    a.scales = a.slots * Up::SLOT_PITCH;
    a.factors = a.scales + a.slots * Up::SCALES_PITCH;
    a.sums = a.factors + a.slots * Up::FACTORS_PITCH;
    b.down.sums = a.sums + Up::TURNS * Up::GROUP * a.parts * 256;
    a.starts = b.down.sums + Down::TURNS * Down::GROUP * b.down.parts * 256;
    a.segments = a.starts + Down::WARPS * (2 * COLUMNS * 32);
    a.sorted = a.segments + most_segments(pairs, a.E) * static_cast<int>(sizeof(Segment));
    a.counts = a.sorted + divide_up(pairs, 2) * 4;
    a.places = a.counts + a.E * 4;
    b.down.slots = a.slots, b.down.scales = a.scales, b.down.factors = a.factors, b.down.starts = a.starts;
    b.down.segments = a.segments, b.down.sorted = a.sorted, b.down.counts = a.counts, b.down.places = a.places;
    return a.places + pairs * 4;
  }

  static __device__ __forceinline__ void consume(const Both& b) {
    Place begin{0, 0};
    if (PHASES & GATE_UP) Up::consume(b.up, 0, begin);
    if (JOINED) {
      named_sync(2, WARPS * 32);  // a parity distinguishes two phases: all warps have read gate_up's slots
      begin = control().down;
    }
    if (PHASES & DOWN) Down::consume(b.down, b.up.routed.tiles, begin);
  }

  static __device__ __forceinline__ void produce(const Both& b) {
    Place into{0, 1};
    const auto prefetch = [](const Args& a, const Maps& maps) {
      if (a.shared.tiles) prefetch_map(&maps.shared);
      prefetch_map(&maps.routed);
      if (!a.whole_scales) prefetch_map(&maps.scales);
    };
    if (PHASES & GATE_UP) prefetch(b.up, b.up_maps);
    if (PHASES & DOWN) prefetch(b.down, b.down_maps);
    if (PHASES & GATE_UP) Up::produce(b.up, b.up_maps, 0, into);
    if (PHASES & DOWN) Down::produce(b.down, b.down_maps, b.up.routed.tiles, into);
  }

  // Plans, adds and writes.
  static __device__ __forceinline__ void finish(const Both& b) {
    Control& c = control();
    const int lane = threadIdx.x % 32;
    // As a launch of its own, down reads ids before its wait: they are older than gate_up, which lets down start only
    // after gate_up's own wait.
    if (PHASES & GATE_UP) wait_for_predecessor();
    let_successor_start();
    uint32_t started = 0;
    if (JOINED && lane == 0) started = atomicInc(&b.units->ctas, 2 * gridDim.x - 1);
    const int segments = group_pairs(b.up.ids, b.up.T, b.up.k, b.up.E, Up::plan_of(b.up));
    const int half = JOINED && __shfl_sync(~0u, started, 0) >= gridDim.x;
    if (lane == 0) {
      c.segments = segments;
      c.units = b.units->half[half];
      barrier_arrive(&c.planned);
    }
    wait_for_predecessor();
    if (JOINED) {
      for (int n = blockIdx.x * 32 + lane; n < Units::WORDS; n += gridDim.x * 32) b.units->half[1 - half][n] = 0;
    } else if (blockIdx.x == 0 && lane == 0) {
      b.units->apart[PHASES == GATE_UP] = 0;
    }
    __syncwarp();
    if (PHASES & GATE_UP) Up::finish(b.up);
    if (PHASES & DOWN) Down::finish(b.down);
  }

  static __device__ void run(const Both& b) {
    Control& c = control();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < b.up.slots) {
      barrier_init(&c.full[threadIdx.x], 1);
      barrier_init(&c.empty[threadIdx.x], Down::GROUP);
    }
    if (threadIdx.x == 31) barrier_init(&c.planned, 1);
    if (threadIdx.x < Sums::TURNS) {
      barrier_init(&c.sums[1].added[threadIdx.x], Up::GROUP * b.up.parts);
      barrier_init(&c.sums[0].added[threadIdx.x], Down::GROUP * b.down.parts);
      for (int n = 0; n < 2; n++) barrier_init(&c.sums[n].free[threadIdx.x], 1);
    }
    if (b.up.whole_scales || b.down.whole_scales) {  // bytes behind a short row are multiplied by zeros: no nan
      for (int n = threadIdx.x; n < b.up.slots * Up::SCALES_PITCH / 4; n += THREADS) {
        reinterpret_cast<uint32_t*>(Up::memory(b.up.scales))[n] = 0;
      }
      shared_writes_visible();
    }
    barriers_visible();
    __syncthreads();
    if (warp < WARPS) {
      if (JOINED) registers_take<MANY>();
      consume(b);
    } else {
      if (JOINED) registers_give<FEW>();
      if (warp == PRODUCER) {
        if (elected()) produce(b);  // not `lane == 0`: the compiler would make loops over lanes
      } else if (warp > PRODUCER) {
        finish(b);
      }
    }
  }
};

template <bool COMPACT, int WIDE, int PHASES>
__global__ __launch_bounds__(Kernel<COMPACT, WIDE, PHASES>::THREADS, 1) void moe_int4_mma_tma_kernel(
    const __grid_constant__ Both b) {
  Kernel<COMPACT, WIDE, PHASES>::run(b);
}

template <typename P>
bool describe(CUtensorMap* map, const Matrix& m) {
  return maps::describe(map, m.data, m.chunk == 128 ? maps::SWIZZLED_BYTES : maps::SWIZZLED_HALF,
                        {m.chunk, m.rows, m.row / m.chunk}, {m.row, m.chunk},
                        {m.chunk, P::BOX_ROWS, P::PIECE / m.chunk});
}

// Sizes of a phase; false if it cannot take them.
template <typename P>
bool size(Args& a) {
  a.routed.tiles /= P::RT, a.shared.tiles /= P::RT;
  a.visit = divide_up(a.routed.row, P::PIECE);
  a.parts = a.visit > 1 ? P::GROUPS : 1;
  a.visit = divide_up(a.visit, a.parts);
  a.shared_visit = divide_up(divide_up(a.shared.row, P::PIECE), a.parts);
  a.scale_row = a.K / (P::SCALE_UNIT == 8 ? 32 : 16);
  a.whole_scales = P::RT > 1 || a.scale_row % 16 != 0;
  a.scale_pitch = a.whole_scales ? a.scale_row : P::SCALE_PITCH;
  a.scale_swizzle = !a.whole_scales && (a.scale_pitch == 128 || a.scale_pitch == 64);
  const int most_shared = P::VISIT * (a.shared.factor == nullptr ? 4 : 2);
  return a.visit <= P::VISIT && !(a.whole_scales && a.parts * a.visit > 1) && a.E <= MAX_EXPERTS &&
         a.T * a.k <= MAX_PAIRS && a.routed.tiles <= 1 << TILE_BITS &&
         !(a.shared.tiles && a.shared_visit > most_shared);
}

// Slots of the ring must be a multiple of this number. The same warps must read all contents of a slot: a barrier's
// parity distinguishes only two phases. The shared expert's slots restrict the ring only if they go around it.
template <typename P>
int unit_of(const Args& a, int sms) {
  const bool around = divide_up(a.shared.tiles, sms) * P::halves(a) * a.shared_visit > a.slots;
  return a.parts > 1 || !around ? P::GROUPS : P::GROUPS * a.shared_visit;
}

template <typename P>
bool describe_all(Maps& maps, const Args& a) {
  if (!describe<P>(&maps.routed, a.routed) || (a.shared.tiles && !describe<P>(&maps.shared, a.shared))) return false;
  const maps::Kind kind = !a.scale_swizzle        ? maps::BYTES
                          : P::SCALE_PITCH == 128 ? maps::SWIZZLED_BYTES
                                                  : maps::SWIZZLED_HALF;
  return a.whole_scales ||
         maps::describe(&maps.scales, a.routed.scale, kind, {a.scale_row, a.routed.rows, 1},
                        {a.scale_row, a.scale_row * a.routed.rows}, {P::SCALE_PITCH, P::BOX_ROWS, 1});
}

template <bool COMPACT, int WIDE, int PHASES>
int start(Both b, int sms, void* stream) {
  using K = Kernel<COMPACT, WIDE, PHASES>;
  constexpr int MOST = 226 * 1024;  // bytes, beside static shared memory
  if (!size<typename K::Up>(b.up) || !size<typename K::Down>(b.down)) return -1;
  b.down.shared_tiles_of_h = b.up.shared.tiles;
  b.up.per_round = b.down.per_round = static_cast<uint32_t>(((int64_t(1) << 32) + 4 * sms - 1) / (4 * sms));
  b.up.slots = MAX_SLOTS;
  while (b.up.slots > 0 &&
         (K::arrange(b) > MOST || (PHASES & GATE_UP && b.up.slots % unit_of<typename K::Up>(b.up, sms)) ||
          (PHASES & DOWN && b.up.slots % unit_of<typename K::Down>(b.down, sms)))) {
    b.up.slots--;
  }
  if (b.up.slots <= K::Up::GROUPS * K::Up::VISIT) return -1;
  const int bytes = K::arrange(b);
  if (!describe_all<typename K::Up>(b.up_maps, b.up) || !describe_all<typename K::Down>(b.down_maps, b.down)) return -1;
  return launch(moe_int4_mma_tma_kernel<COMPACT, WIDE, PHASES>, dim3(sms), dim3(K::THREADS), bytes, stream, 1, b);
}

Matrix matrix(const void* data, const void* scale, const void* factor, int64_t rows, int64_t expert, int64_t second,
              int64_t row, int64_t tiles) {
  return {static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(scale), static_cast<const uint8_t*>(factor),
          rows, static_cast<int>(expert), static_cast<int>(second), static_cast<int>(row), static_cast<int>(tiles),
          row % 128 ? 64 : 128};
}

}  // namespace

// y [T, P, D] from x [T, D] by way of h [T k, I] and h_shared [T, S]; S = 0: no shared expert. P = k + 1 with a row of
// y for the shared expert, written if S > 0. `row`s are null unless scales are compact, `shared_scale`s unless the
// shared expert is e4m3. units: `Units`, for launches with this `sms` on this stream. apart: two launches, in which no
// CTA waits for another. Returns -1 for sizes it cannot take.
API int moe_int4_mma_tma(const void* x, const void* ids, const void* weights, const void* up_packed,
                         const void* up_scale, const void* up_row, const void* up_shared, const void* up_shared_scale,
                         const void* down_packed, const void* down_scale, const void* down_row,
                         const void* down_shared, const void* down_shared_scale, void* h, void* h_shared, void* y,
                         void* units, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int64_t S, int64_t P,
                         int64_t apart, int64_t sms, void* stream) {
  Both b = {};
  Args a = {};
  a.ids = static_cast<const int*>(ids);
  a.weights = static_cast<const float*>(weights);
  a.T = static_cast<int>(T), a.k = static_cast<int>(k), a.E = static_cast<int>(E), a.P = static_cast<int>(P);
  b.up = b.down = a;
  b.up.routed = matrix(up_packed, up_scale, up_row, 2 * I * E, 2 * I, I, D / 2, I / 8);
  b.up.shared = matrix(up_shared, nullptr, up_shared_scale, 2 * S, 0, S, up_shared_scale == nullptr ? 2 * D : D, S / 8);
  b.up.in = b.up.in_shared = static_cast<const bf16*>(x);
  b.up.out = h;
  b.up.out_shared = static_cast<bf16*>(h_shared);
  b.up.K = b.up.width = static_cast<int>(D);
  b.down.routed = matrix(down_packed, down_scale, down_row, D * E, D, 8, I / 2, D / 16);
  b.down.shared = matrix(down_shared, nullptr, down_shared_scale, D, 0, 8, down_shared_scale == nullptr ? 2 * S : S,
                         S ? D / 16 : 0);
  b.down.in = static_cast<const bf16*>(h);
  b.down.in_shared = static_cast<const bf16*>(h_shared);
  b.down.out = y;
  b.down.K = static_cast<int>(I), b.down.width = static_cast<int>(S);
  b.units = static_cast<Units*>(units);
  b.up.taken = b.units->apart, b.down.taken = b.units->apart + 1;
  const auto launched = [&](auto wide, auto phases) {
    constexpr int WIDE = decltype(wide)::value, PHASES = decltype(phases)::value;
    return up_row == nullptr ? start<false, WIDE, PHASES>(b, static_cast<int>(sms), stream)
                             : start<true, WIDE, PHASES>(b, static_cast<int>(sms), stream);
  };
  const auto of = [&](auto wide) {
    if constexpr (decltype(wide)::value >= 4) {
      if (!apart) return launched(wide, std::integral_constant<int, BOTH>());
    }
    const int failed = launched(wide, std::integral_constant<int, GATE_UP>());
    return failed ? failed : launched(wide, std::integral_constant<int, DOWN>());
  };
  const int64_t fitting = 2048 / I;  // tiles per slot, with whole rows
  if (fitting * I != 2048 || D / 16 % fitting) return of(std::integral_constant<int, 1>());
  switch (fitting) {
    case 2: return of(std::integral_constant<int, 2>());
    case 4: return of(std::integral_constant<int, 4>());
    case 8: return of(std::integral_constant<int, 8>());
    default: return of(std::integral_constant<int, 1>());
  }
}
