// The MoE block for 2 to 128 tokens, with compact scales for up to 256: bound by reading expert weights. Contract in
// moe_int4.py.
//
// Two launches of one kernel: gate_up (+ SiLU) writes h, down writes rows of y. A tile is 16 rows of weights: the rows
// of the tensor core's A. (gate_up: 8 gate rows and their 8 up rows, so that one thread has both.) A producer warp only
// fills slots of the CTA's ring: GROUP chunks of 128 bytes of each of a tile's rows, copied as boxes of tensor maps. A
// consumer warp multiplies the same chunk of every slot of its group, so its k are always the same: it keeps their
// activations in registers and reads only weights and scales. A last warp groups the pairs, adds the sums of a tile's
// warps and writes the result; the others never wait for each other.
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
// takes ranges of (segment, tile) one by one (`range_of`).
#include "moe/sm90/moe_int4_tile.cuh"

#include <type_traits>

using namespace hopper;
using namespace moe;

namespace {

template <bool GATE_UP, bool COMPACT, int RT>
struct Kernel : Tile<GATE_UP, COMPACT, RT> {
  using Base = Tile<GATE_UP, COMPACT, RT>;
  using typename Base::Control;
  using typename Base::Held;
  using typename Base::Place;
  using typename Base::Warp;
  using Base::BOXES;
  using Base::BOX_ROWS;
  using Base::control;
  using Base::FACTORS;
  using Base::GROUP;
  using Base::GROUPS;
  using Base::halves;
  using Base::hand;
  using Base::KS;
  using Base::memory;
  using Base::place;
  using Base::plan_of;
  using Base::planes;
  using Base::ROWS;
  using Base::SCALES;
  using Base::SLOT;
  using Base::THREADS;
  using Base::TURNS;
  using Base::UNIT_ROWS;
  using Base::VISIT;
  using Base::WARPS;

  // ---- the producer warp: one thread ----

  static __device__ void produce(const Args& a, const Maps& maps) {
    Control& c = control();
    Place into{0, 1};
    auto put = [&](const Matrix& m, const CUtensorMap& map, int row, int chunk, int item, bool begins) {
      uint64_t* barrier = &c.full[into.at];
      barrier_wait_to_refill(&c.empty[into.at], into.phase);
      c.item[into.at] = item;
      const bool scaled = m.scale != nullptr, factored = COMPACT && scaled && begins;
      const int whole = 16 * RT * a.scale_row;
      barrier_expect(barrier, SLOT + (!scaled ? 0 : a.whole_scales ? whole : 16 * a.scale_pitch) +
                                  (factored ? FACTORS : 0));
      uint8_t* slot = memory(into.at * SLOT);
      uint8_t* scales = memory(a.scales + into.at * SCALES);
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
      if (factored) rows(memory(a.factors + into.at * FACTORS), m.factor, 2);
      into.advance(1, a.slots);
    };
    if (a.shared.tiles) prefetch_map(&maps.shared);
    prefetch_map(&maps.routed);
    if (!a.whole_scales) prefetch_map(&maps.scales);
    const Range tiles = equal_part(a.shared.tiles);
    for (int tile = tiles.first; tile < tiles.end; tile++) {
      for (int half = 0; half < halves(a); half++) {
        for (int j = 0; j < a.shared_visit; j++) {
          for (int part = 0; part < a.parts; part++) {
            put(a.shared, maps.shared, tile * UNIT_ROWS, (part * a.shared_visit + j) * KS, 0, false);
          }
        }
      }
    }
    barrier_wait(&c.planned, 0);
    const int all = c.segments * a.routed.tiles;
    const Segment* segments = plan_of(a).segments;
    for (int i = blockIdx.x;;) {
      const Range items = range_of(all, i);
      if (items.first >= all) break;
      int segment = items.first / a.routed.tiles, tile = items.first - segment * a.routed.tiles;
      for (int n = items.first; n < items.end; n++) {
        if (n == items.end - 1) {
          wait_for_predecessor();
          i = gridDim.x + atomicAdd(a.taken, 1);
        }
        const int row = segments[segment].expert() * a.routed.expert + tile * UNIT_ROWS;
        for (int j = 0; j < a.visit; j++) {
          for (int part = 0; part < a.parts; part++) {
            put(a.routed, maps.routed, row, (part * a.visit + j) * KS, segment << TILE_BITS | tile, j == 0);
          }
        }
        if (++tile == a.routed.tiles) tile = 0, segment++;
      }
    }
    for (int n = GROUPS / a.parts * a.visit * a.parts; n > 0; n--) {
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
    w.from = place(rt * a.shared_visit * a.parts + w.part, a.slots);
    int held = -1;
    for (int n = rt; n < items; n += lanes) {
      const int half = n % halves(a), tile = tiles.first + n / halves(a);
      if (half != held) Base::template hold_tokens<FP8>(a, w, half, b);
      held = half;
      float upper = 1 / RAISED, lower = upper;
      if (FP8) {
        const float* factor = reinterpret_cast<const float*>(a.shared.factor) + tile * UNIT_ROWS + w.rt * 16 + w.g;
        upper = __ldg(factor) * (0x1p120f / RAISED);
        lower = __ldg(factor + (GATE_UP ? a.shared.second : 8)) * (0x1p120f / RAISED);
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

  static __device__ void consume(const Args& a) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / GROUP;
    const int rt = group / a.parts, lanes = GROUPS / a.parts;  // tiles that are worked on at a time
    if (rt >= lanes) return;
    Warp w{lane, lane / 4, lane % 4, warp % KS, group % a.parts, 0, {0, 0}, nullptr, 0, 0};
    if (RT > 1) w.rt = warp % GROUP / KS;
    w.starts = reinterpret_cast<float*>(memory(a.starts)) + warp * (VISIT * COLUMNS * 8);
    Held b;
    const Range tiles = equal_part(a.shared.tiles);
    const int items = (tiles.end - tiles.first) * halves(a);
    if (!GATE_UP) wait_for_predecessor();
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
    w.from = place((items * a.shared_visit + rt * a.visit) * a.parts + w.part, a.slots);
    w.turn = items * planes(a) + rt;
    const int skip = (lanes - 1) * a.visit * a.parts;
    int held = -1, count = 0;
    for (;; w.turn += lanes) {
      barrier_wait(&c.full[w.from.at], w.from.phase);
      const int item = c.item[w.from.at];
      if (item < 0) break;
      if (item >> TILE_BITS != held) {
        held = item >> TILE_BITS;
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
      if (COMPACT) {  // row scales come through the ring: plain loads would cost a memory latency for every tile
        const bf16* factor = reinterpret_cast<const bf16*>(memory(a.factors + w.from.at * FACTORS)) + w.rt * 16 + w.g;
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
    hand(a, w, make_float2(0, 0), -1);
  }

  // ---- the warp that plans and finishes ----

  static __device__ void finish(const Args& a) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, share = GROUP * a.parts;
    Control& c = control();
    // down reads ids before its wait: they are older than gate_up, which lets down start only after gate_up's own wait.
    if (GATE_UP) wait_for_predecessor();
    let_successor_start();
    const int segments = group_pairs(a.ids, a.T, a.k, a.E, plan_of(a));
    if (lane == 0) {
      c.segments = segments;
      barrier_arrive(&c.planned);
    }
    float* weights = reinterpret_cast<float*>(memory(a.places));  // of pairs, in the memory of the plan's `places`
    if (!GATE_UP) {
      for (int n = lane; n < a.T * a.k; n += 32) weights[n] = __ldcg(a.weights + n) * RESULT;  // as old as the ids
      __syncwarp();
    }
    wait_for_predecessor();
    if (blockIdx.x == 0 && lane == 0) *a.settled = 0;
    Place from{0, 0};
    struct Sums {
      float2 of[RT];
    };
    auto take = [&](int& item) {
      barrier_wait(&c.added[from.at], from.phase);
      item = c.result[from.at];
      const float2* at = reinterpret_cast<const float2*>(memory(a.sums)) + from.at * share * 32 + lane;
      Sums sums = {};
#pragma unroll
      for (int rt = 0; rt < RT; rt++) {
#pragma unroll 4
        for (int n = 0; n < (RT == 1 ? share : KS); n++) {
          const float2 v = at[(rt * KS + n) * 32];
          sums.of[rt].x += v.x, sums.of[rt].y += v.y;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&c.free[from.at]);
      from.advance(1, TURNS);
      return sums;
    };
    auto activated = [](float gate, float up) { return __float2bfloat16(gate / (1 + __expf(-gate)) * up); };
    int item;
    const Range tiles = equal_part(a.shared.tiles);
    for (int n = tiles.first * halves(a); n < tiles.end * halves(a); n++) {
      const int tile = n / halves(a), half = n % halves(a);
      for (int plane = 0; plane < planes(a); plane++) {
        const Sums v = take(item);
        const int token = half * TOKENS + 2 * t + plane;
        if (token >= a.T) continue;
        if (GATE_UP) {
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
    const int64_t width = a.routed.tiles * UNIT_ROWS;
    int held = -1;
    bool mine = false;
    float weight = RESULT;
    void* to = nullptr;
    for (;;) {
      const Sums v = take(item);
      if (item < 0) break;
      if (item >> TILE_BITS != held) {
        held = item >> TILE_BITS;
        const Segment segment = plan_of(a).segments[held];
        const int count = segment.count(), lanes = count == 1 ? 4 : count == 2 ? 2 : 1;  // per token
        mine = t % lanes == 0 && t / lanes < count;
        if (mine) {
          const int pair = plan_of(a).sorted[segment.first() + t / lanes];
          if (GATE_UP) {
            to = static_cast<bf16*>(a.out) + pair * width + g;
          } else {
            to = static_cast<float*>(a.out) + (static_cast<int64_t>(pair / a.k) * a.P + pair % a.k) * width + g;
            weight = weights[pair];
          }
        }
      }
      if (!mine) continue;
      const int row = (item & ((1 << TILE_BITS) - 1)) * UNIT_ROWS;
      if (GATE_UP) {
        static_cast<bf16*>(to)[row] = activated(v.of[0].x * RESULT, v.of[0].y * RESULT);
      } else {
#pragma unroll
        for (int rt = 0; rt < RT; rt++) {
          static_cast<float*>(to)[row + rt * 16] = v.of[rt].x * weight;
          static_cast<float*>(to)[row + rt * 16 + 8] = v.of[rt].y * weight;
        }
      }
    }
  }

  // Lays out shared memory and returns its bytes.
  static int arrange(Args& a) {
    const int pairs = a.T * a.k;
    a.scales = a.slots * SLOT;
    a.factors = a.scales + a.slots * SCALES;
    a.sums = a.factors + a.slots * FACTORS;
    a.starts = a.sums + TURNS * GROUP * a.parts * 256;
    a.segments = a.starts + WARPS * (VISIT * COLUMNS * 32);
    a.sorted = a.segments + most_segments(pairs, a.E) * static_cast<int>(sizeof(Segment));
    a.counts = a.sorted + divide_up(pairs, 2) * 4;
    a.places = a.counts + a.E * 4;
    return a.places + pairs * 4;
  }

  static __device__ void run(const Args& a, const Maps& maps) {
    Control& c = control();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < a.slots) {
      barrier_init(&c.full[threadIdx.x], 1);
      barrier_init(&c.empty[threadIdx.x], GROUP);
    }
    if (threadIdx.x == 31) barrier_init(&c.planned, 1);
    if (threadIdx.x < TURNS) {
      barrier_init(&c.added[threadIdx.x], GROUP * a.parts);
      barrier_init(&c.free[threadIdx.x], 1);
    }
    if (RT == 1 && a.whole_scales) {  // bytes behind a short row are multiplied by zeros, so they must not be nan
      for (int n = threadIdx.x; n < a.slots * SCALES / 4; n += THREADS) {
        reinterpret_cast<uint32_t*>(memory(a.scales))[n] = 0;
      }
      shared_writes_visible();
    }
    barriers_visible();
    __syncthreads();
    if (warp < WARPS) {
      consume(a);
    } else if (warp == WARPS) {
      if (elected()) produce(a, maps);  // not `lane == 0`: the compiler would make loops over lanes
    } else {
      finish(a);
    }
  }
};

template <bool GATE_UP, bool COMPACT, int RT>
__global__ __launch_bounds__(Kernel<GATE_UP, COMPACT, RT>::THREADS, 1) void moe_int4_mma_tma_kernel(
    const __grid_constant__ Args a, const __grid_constant__ Maps maps) {
  Kernel<GATE_UP, COMPACT, RT>::run(a, maps);
}

template <typename K>
bool describe(CUtensorMap* map, const Matrix& m) {
  return maps::describe(map, m.data, m.chunk == 128 ? maps::SWIZZLED_BYTES : maps::SWIZZLED_HALF,
                        {m.chunk, m.rows, m.row / m.chunk}, {m.row, m.chunk},
                        {m.chunk, K::BOX_ROWS, K::PIECE / m.chunk});
}

template <bool GATE_UP, bool COMPACT, int RT = 1>
int start(Args a, int sms, void* stream) {
  using K = Kernel<GATE_UP, COMPACT, RT>;
  constexpr int MOST = 226 * 1024;  // bytes, beside static shared memory
  a.routed.tiles /= RT, a.shared.tiles /= RT;
  a.visit = divide_up(a.routed.row, K::PIECE);
  a.parts = a.visit > 1 ? K::GROUPS : 1;
  a.visit = divide_up(a.visit, a.parts);
  a.shared_visit = divide_up(divide_up(a.shared.row, K::PIECE), a.parts);
  const int most_shared = K::VISIT * (a.shared.factor == nullptr ? 4 : 2);
  a.scale_row = a.K / (COMPACT ? 32 : 16);
  a.whole_scales = RT > 1 || a.scale_row % 16 != 0;
  a.scale_pitch = a.whole_scales ? a.scale_row : K::SCALE_PITCH;
  a.scale_swizzle = !a.whole_scales && (a.scale_pitch == 128 || a.scale_pitch == 64);
  a.slots = MAX_SLOTS;
  while (K::arrange(a) > MOST && a.slots > 0) a.slots--;
  // The same warps must read all contents of a slot: a barrier's parity distinguishes only two phases. The shared
  // expert's slots restrict the ring's size only if they go around it.
  const bool around = divide_up(a.shared.tiles, sms) * K::halves(a) * a.shared_visit > a.slots;
  a.slots -= a.slots % (a.parts > 1 || !around ? K::GROUPS : K::GROUPS * a.shared_visit);
  if (a.visit > K::VISIT || (a.whole_scales && a.parts * a.visit > 1) || a.E > MAX_EXPERTS || a.T * a.k > MAX_PAIRS ||
      a.routed.tiles > 1 << TILE_BITS || (a.shared.tiles && a.shared_visit > most_shared) ||
      a.slots <= K::GROUPS * K::VISIT) {
    return -1;
  }
  Maps maps = {};
  if (!describe<K>(&maps.routed, a.routed) || (a.shared.tiles && !describe<K>(&maps.shared, a.shared))) return -1;
  const maps::Kind kind = !a.scale_swizzle        ? maps::BYTES
                          : K::SCALE_PITCH == 128 ? maps::SWIZZLED_BYTES
                                                  : maps::SWIZZLED_HALF;
  if (!a.whole_scales && !maps::describe(&maps.scales, a.routed.scale, kind,
                                         {a.scale_row, a.routed.rows, 1}, {a.scale_row, a.scale_row * a.routed.rows},
                                         {K::SCALE_PITCH, K::BOX_ROWS, 1})) {
    return -1;
  }
  return launch(moe_int4_mma_tma_kernel<GATE_UP, COMPACT, RT>, dim3(sms), dim3(K::THREADS), K::arrange(a), stream, 1, a,
                maps);
}

Matrix matrix(const void* data, const void* scale, const void* factor, int64_t rows, int64_t expert, int64_t second,
              int64_t row, int64_t tiles) {
  return {static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(scale), static_cast<const uint8_t*>(factor),
          rows, static_cast<int>(expert), static_cast<int>(second), static_cast<int>(row), static_cast<int>(tiles),
          row % 128 ? 64 : 128};
}

}  // namespace

// h [T k, I] and h_shared [T, S] from x [T, D]; S = 0: no shared expert. `row` is null unless scales are compact,
// `shared_scale` unless the shared expert is e4m3. counters [2]: the first zero before, and after down. Returns -1 for
// sizes it cannot take.
API int moe_int4_mma_tma_gate_up(const void* x, const void* ids, const void* packed, const void* scale, const void* row,
                         const void* shared, const void* shared_scale, void* h, void* h_shared, void* counters,
                         int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int64_t S, int64_t sms, void* stream) {
  Args a = {};
  a.routed = matrix(packed, scale, row, 2 * I * E, 2 * I, I, D / 2, I / 8);
  a.shared = matrix(shared, nullptr, shared_scale, 2 * S, 0, S, shared_scale == nullptr ? 2 * D : D, S / 8);
  a.in = a.in_shared = static_cast<const bf16*>(x);
  a.ids = static_cast<const int*>(ids);
  a.out = h;
  a.out_shared = static_cast<bf16*>(h_shared);
  a.taken = static_cast<uint32_t*>(counters);
  a.settled = a.taken + 1;
  a.T = static_cast<int>(T), a.k = static_cast<int>(k), a.E = static_cast<int>(E);
  a.K = a.width = static_cast<int>(D);
  return row == nullptr ? start<true, false>(a, static_cast<int>(sms), stream)
                        : start<true, true>(a, static_cast<int>(sms), stream);
}

// y [T, P, D] from h and h_shared; P = k + 1 with a row of y for the shared expert, written if S > 0.
API int moe_int4_mma_tma_down(const void* h, const void* h_shared, const void* ids, const void* weights, const void* packed,
                      const void* scale, const void* row, const void* shared, const void* shared_scale, void* y,
                      void* counters, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int64_t S, int64_t P,
                      int64_t sms, void* stream) {
  Args a = {};
  a.routed = matrix(packed, scale, row, D * E, D, 8, I / 2, D / 16);
  a.shared = matrix(shared, nullptr, shared_scale, D, 0, 8, shared_scale == nullptr ? 2 * S : S, S ? D / 16 : 0);
  a.in = static_cast<const bf16*>(h);
  a.in_shared = static_cast<const bf16*>(h_shared);
  a.ids = static_cast<const int*>(ids);
  a.weights = static_cast<const float*>(weights);
  a.out = y;
  a.settled = static_cast<uint32_t*>(counters);
  a.taken = a.settled + 1;
  a.T = static_cast<int>(T), a.k = static_cast<int>(k), a.E = static_cast<int>(E), a.P = static_cast<int>(P);
  a.K = static_cast<int>(I), a.width = static_cast<int>(S);
  const auto of = [&](auto narrow) {
    constexpr int RT = decltype(narrow)::value;
    return row == nullptr ? start<false, false, RT>(a, static_cast<int>(sms), stream)
                          : start<false, true, RT>(a, static_cast<int>(sms), stream);
  };
  const int64_t fitting = 2048 / I;  // tiles per slot, with whole rows
  if (fitting * I != 2048 || a.routed.tiles % fitting) return of(std::integral_constant<int, 1>());
  switch (fitting) {
    case 2: return of(std::integral_constant<int, 2>());
    case 4: return of(std::integral_constant<int, 4>());
    case 8: return of(std::integral_constant<int, 8>());
    default: return of(std::integral_constant<int, 1>());
  }
}
