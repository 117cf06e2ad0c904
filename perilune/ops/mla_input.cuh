// The input of absorbed attention for one token (mla_input.cu): what a CTA streams, and what the CTAs tell each other.
//
// They tell through a board in global memory, in words of a pair of values and a tag, which says that the pair is this
// launch's: there is no flag to wait for before reading. The tag is the number of the launch as the board counts it.
// CTA 0 advances the count when it has seen all of q_a: a tile of every CTA, so that every CTA has read the count.
//
// While weights are in flight, every other trip to memory waits behind them: telling took 4 us with all of the ring on
// its way, 1.2 us with none. So the copying warp asks for a few slots at a time. For the same reason nobody looks at
// the board before its own piece is there, and the pieces' sums are read by one warp of each CTA.
#pragma once
#include "mla_cache.cuh"
#include "stream.cuh"

namespace before_attention {

using namespace mla;
using stream::Bf16;
using stream::E4m3;
using stream::TILE, stream::WARPS;

constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;  // and a warp that only copies
constexpr int HIDDEN = 7168, INNER = 1536, OUTER = INNER + LATENT + ROPE;  // Kimi K2's widths; rows of qkv_a
constexpr int SHARE = 128;  // values of a row that a warp takes of a slot
constexpr int KS_A = 8, GROUPS_A = WARPS / KS_A, ROWS_A = GROUPS_A * TILE;  // warps that share a tile; rows of a slot
constexpr int KS_Q = 4, GROUPS_Q = WARPS / KS_Q, ROWS_Q = GROUPS_Q * TILE;
constexpr int CTAS = OUTER / ROWS_A;
constexpr int NOPE_ROWS = NOPE / 2, ROPE_ROWS = ROPE / 2, ROWS = NOPE_ROWS + ROPE_ROWS;  // of q_b, of a CTA
constexpr int TILES = ROWS / TILE, ROUNDS = ROWS / ROWS_Q;
constexpr int COLUMNS = LATENT / 2;  // of W_UK, of a CTA
constexpr int QUADS = HIDDEN / 4, PIECE = (QUADS + CTAS - 1) / CTAS, PIECES = (QUADS + PIECE - 1) / PIECE;
constexpr int QUADS_EACH = (QUADS + CONSUMERS - 1) / CONSUMERS;
constexpr int INNER_QUADS = INNER / 4, INNER_WARPS = INNER_QUADS / 32;
static_assert(PIECE <= 32 && PIECES % 32 == 0 && INNER_QUADS % 32 == 0 && INNER_QUADS <= CONSUMERS);
static_assert(CTAS * TILE <= INNER && OUTER % ROWS_A == 0 && NOPE_ROWS % ROWS_Q == 0 && ROPE_ROWS % ROWS_Q == 0);

// Slots of the ring, in order: of qkv_a 1,024 values of each row of the groups' tiles; of q_b 512 values of each row of
// as many tiles as are multiplied at once; of W_UK rows of this CTA's columns. Pitches are 64 bytes off the multiples
// of 128, so that two rows share no bank. WINDOW: slots on their way at a time.
template <typename W>
struct Plan {
  static constexpr int SPAN_A = KS_A * SHARE * W::BYTES, PITCH_A = SPAN_A + 64;
  static constexpr int SPAN_Q = KS_Q * SHARE * W::BYTES, PITCH_Q = SPAN_Q + 64;
  static constexpr int SPAN_UK = COLUMNS * 2, ROWS_UK = 32 * W::BYTES, EACH_UK = ROWS_UK / WARPS;
  static constexpr int SLOT = ROWS_Q * PITCH_Q;
  static constexpr int STAGES = W::BYTES == 2 ? 6 : 11, WINDOW = W::BYTES == 2 ? 2 : 3;
  static constexpr int A_SLOTS = HIDDEN * W::BYTES / SPAN_A, PER_ROUND = INNER * W::BYTES / SPAN_Q;
  static constexpr int Q_SLOTS = ROUNDS * PER_ROUND, UK_SLOTS = NOPE / ROWS_UK, UK_LOCAL = UK_SLOTS / 2;
  static constexpr int SLOTS = A_SLOTS + Q_SLOTS + UK_SLOTS;
  static constexpr int RING = STAGES * SLOT, X_BYTES = stream::pitch_of(HIDDEN) * 2;
  static constexpr int SHARED = RING + X_BYTES + stream::pitch_of(INNER) * 2;
  static_assert(ROWS_A * PITCH_A <= SLOT && ROWS_UK * SPAN_UK <= SLOT && UK_SLOTS % 2 == 0);
  static_assert(WARPS * COLUMNS * 4 <= SHARED - RING);  // parts of the last sums, where x was
};

// A word: low half a pair, high half a tag.
struct Board {
  uint32_t launches, unused[31];
  uint64_t x[HIDDEN / 2];       // times the norm's weights
  uint64_t pieces[PIECES * 2];  // of x: sum of squares before the weights, largest value after
  uint64_t qkv[OUTER / 2];
};

struct Args {
  bf16* residual;
  const void* x;
  int parts, wide;  // wide: x holds floats [parts, HIDDEN], else bf16 [HIDDEN]
  const bf16* norm;
  const uint8_t* w_a;  // [OUTER, HIDDEN]
  const float* scale_a;
  const bf16* q_norm;
  const uint8_t* w_q;  // [H (NOPE + ROPE), INNER]
  const float* scale_q;
  NewRows rows;
  const bf16* w_uk;  // [H, NOPE, LATENT]
  bf16* out;         // [H, WIDTH]
  Board* board;
  int H;
  float eps;
};

__device__ __forceinline__ ulonglong2 look(const uint64_t* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void tell(uint64_t* p, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ bool told(const ulonglong2& v, uint32_t tag) { return v.x >> 32 == tag && v.y >> 32 == tag; }
__device__ __forceinline__ uint64_t word(uint32_t tag, uint32_t pair) {
  return static_cast<uint64_t>(tag) << 32 | pair;
}

// 4 bytes to the same place in CTA `rank` of the cluster, where `barrier` counts them.
__device__ __forceinline__ void hand_on(const void* to, const uint64_t* barrier, int rank, uint32_t v) {
  const uint32_t there = address_in(static_cast<const float*>(to), rank);
  const uint32_t told = address_in(reinterpret_cast<const float*>(barrier), rank);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(v),
               "r"(told)
               : "memory");
}

template <typename W>
struct Shared {
  float sums[WARPS][TILE], q_sums[KS_Q][TILES][TILE], q_scales[ROWS], squares[INNER_WARPS];
  uint32_t most[INNER_WARPS];
  float x_scale, x_raise;
  __align__(16) uint32_t nope[NOPE_ROWS / 2];  // the other CTA's
  uint64_t full[Plan<W>::STAGES], empty[Plan<W>::STAGES], told, handed;
};

// What the copying warp does.
template <typename W>
__device__ __forceinline__ void copy(const Args& a, Shared<W>& shared, uint8_t* memory) {
  using P = Plan<W>;
  const int cta = blockIdx.x, head = cta / 2, rank = cluster_rank(), slots = head < a.H ? P::SLOTS : P::A_SLOTS;
  if (!elected()) return;
  int stage = 0, phase = 1, landed = 0, landed_phase = 0;
#pragma unroll 1
  for (int n = 0; n < slots; n++) {
    const uint8_t* from;
    int rows, apart, span, pitch, jump = 0;  // after the first tile
    if (n < P::A_SLOTS) {
      rows = ROWS_A, apart = HIDDEN * W::BYTES, span = P::SPAN_A, pitch = P::PITCH_A;
      from = a.w_a + static_cast<int64_t>(cta) * TILE * apart + n * span;
      jump = (CTAS - 1) * TILE * apart;
    } else if (n < P::A_SLOTS + P::Q_SLOTS) {
      const int m = n - P::A_SLOTS, round = m / P::PER_ROUND, row = round * ROWS_Q;
      const int first = row < NOPE_ROWS ? rank * NOPE_ROWS + row : NOPE + rank * ROPE_ROWS + row - NOPE_ROWS;
      rows = ROWS_Q, apart = INNER * W::BYTES, span = P::SPAN_Q, pitch = P::PITCH_Q;
      from = a.w_q + static_cast<int64_t>(head * (NOPE + ROPE) + first) * apart + (m - round * P::PER_ROUND) * span;
    } else {  // first what meets this CTA's half of the nope rows
      const int m = n - P::A_SLOTS - P::Q_SLOTS, k = (rank * NOPE_ROWS + m * P::ROWS_UK) % NOPE;
      rows = P::ROWS_UK, apart = LATENT * 2, span = pitch = P::SPAN_UK;
      from = reinterpret_cast<const uint8_t*>(a.w_uk + static_cast<int64_t>(head * NOPE + k) * LATENT + rank * COLUMNS);
    }
    if (n >= P::WINDOW) {
      barrier_wait(&shared.full[landed], landed_phase);
      if (++landed == P::STAGES) landed = 0, landed_phase ^= 1;
    }
    barrier_wait_to_refill(&shared.empty[stage], phase);
    uint64_t* barrier = &shared.full[stage];
    uint8_t* to = memory + stage * P::SLOT;
    barrier_expect(barrier, rows * span);
#pragma unroll 8
    for (int row = 0; row < rows; row++) {
      bulk_load_once(to, from, span, barrier);
      to += pitch, from += row == TILE - 1 ? apart + jump : apart;
    }
    if (++stage == P::STAGES) stage = 0, phase ^= 1;
  }
}

}  // namespace before_attention
