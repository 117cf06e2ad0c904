// The MoE block for 2 to 128 tokens, with compact scales for up to 256: bound by reading expert weights. Contract in
// moe_int4.py.
//
// Two phases, as two launches or JOINED in one: gate_up (+ SiLU) writes h, down writes rows of y. A tile is 16 rows of
// weights: the rows of the tensor core's A. (gate_up: 8 gate rows and their 8 up rows, so that one thread has both.)
//   producer   One warp fills slots of the CTA's ring by TMA: GROUP chunks of 128 bytes of each of a tile's rows.
//   consumers  Each warp multiplies the same chunk of every slot of its group, always for the same k. So it keeps the
//              activations in registers and reads only weights and scales.
//   finish     One warp groups the pairs by expert, adds the consumers' sums of a tile, and writes the result. Other
//              warps never wait for each other within a phase.
//
// JOINED: the ring fills with weights of down while the last of h is written. Between two launches, DRAM would idle for
// 6 us (a quarter of the width, for four ranks): CTAs end, new ones start and issue their first loads. down's products
// need all of a segment's h: `Units` counts finished tiles. The producer reads the count when it issues copies; most
// segments are complete by then. If not, it marks the item WAITS, and the consumers wait for the count. All CTAs must
// be resident at once.
//
// INT4: ldmatrix gives lane (g, t) word t of a group's 16 bytes in row g (int4_mma.cuh).
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
#include "moe/sm90/moe_int4_phase.cuh"

#include <type_traits>

using namespace hopper;
using namespace moe;

namespace {

// PHASES of a launch. JOINED: both; then CTAs wait for each other.
template <bool COMPACT, int WIDE, int PHASES>
struct Kernel {
  static constexpr bool JOINED = PHASES == BOTH;
  using Up = Phase<true, COMPACT, WIDE, JOINED>;
  using Down = Phase<false, COMPACT, WIDE, JOINED>;
  static constexpr int WARPS = PHASES == GATE_UP ? Up::WARPS : Down::WARPS;
  // JOINED: the producer and the finishing warp are on the two SM sub-partitions that have only 3 of gate_up's 14
  // warps.
  static constexpr int PRODUCER = WARPS + (JOINED ? 2 : 0), THREADS = (PRODUCER + 2) * 32;
  // JOINED: registers per thread at launch; then of consumers; of the other warpgroup. setmaxnreg would wait forever if
  // the sum exceeded that of the launch.
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

  // The last warp: groups the pairs by expert, adds the sums of tiles, writes results.
  static __device__ __forceinline__ void finish(const Both& b) {
    Control& c = control();
    const int lane = threadIdx.x % 32;
    // With two launches, down reads ids before its wait: gate_up lets down start only after gate_up's own wait, when
    // the ids are written.
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
    if (b.up.whole_scales || b.down.whole_scales) {  // bytes after a short row are multiplied by 0: must not be NaN
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

// The number of slots of the ring is a multiple of this, so that the same warps read all contents of a slot: a
// barrier's parity distinguishes only two phases. The shared expert's slots count only if they wrap around the ring.
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

// y [T, P, D] from x [T, D] through h [T k, I] and h_shared [T, S]; S = 0: no shared expert. P = k + 1 with a row of
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
