// The input of absorbed attention for two to four tokens (mla_input_few.cu): what a CTA streams, and what the CTAs tell
// each other.
//
// They tell through a board in global memory, in words that are zero until they are told: there is no flag to wait for
// before reading. There are two sets of words, in turns, by the number of the launch as the board counts it; a launch
// empties the set of the next. CTA 0 advances the count when it has seen all of q_a: a tile of every CTA, so that every
// CTA has read the count.
//
// While weights are in flight, every other trip to memory waits behind them: telling took 4 us with all of the ring on
// its way, 1.2 us with none. So the copying warp asks for a few slots at a time. For the same reason nobody looks at
// the board before its own piece is there, and the pieces' sums are read by one warp of each CTA and token.
#pragma once
#include "announce.cuh"
#include "mla_cache.cuh"
#include "stream.cuh"

namespace before_attention_few {

using namespace mla;
using announce::put;
using stream::Bf16;
using stream::E4m3;
using stream::TILE, stream::WARPS;

constexpr int MOST_TOKENS = 4;
constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;  // and a warp that only copies
constexpr int HIDDEN = 7168, INNER = 1536, OUTER = INNER + LATENT + ROPE;  // Kimi K2's widths; rows of qkv_a
constexpr int TILES_A = 2, ROWS_A = TILES_A * TILE;  // of qkv_a, of a CTA: its warps share their width
constexpr int CTAS = OUTER / ROWS_A;
constexpr int SHARE = 128, KS_Q = 4;  // values of a row of q_b that a warp takes of a slot; warps that share a tile
constexpr int GROUPS_Q = WARPS / KS_Q, ROWS_Q = GROUPS_Q * TILE;
constexpr int NOPE_ROWS = NOPE / 2, ROPE_ROWS = ROPE / 2, ROWS = NOPE_ROWS + ROPE_ROWS;  // of q_b, of a CTA
constexpr int TILES = ROWS / TILE, ROUNDS = ROWS / ROWS_Q;
constexpr int COLUMNS = LATENT / 2;  // of W_UK, of a CTA
constexpr int QUADS = HIDDEN / 4, PIECE = (QUADS + CTAS - 1) / CTAS, PIECES = (QUADS + PIECE - 1) / PIECE;
constexpr int OCTETS = INNER / 8, INNER_WARPS = OCTETS / 32;  // of a token's q_a; warps that prepare it
constexpr int ROOM = 227 * 1024;                              // of a CTA's shared memory
static_assert(PIECE <= 32 && PIECES == 128 && OCTETS % 32 == 0 && COLUMNS == WARPS * 16);
static_assert(CTAS * TILE <= INNER && OUTER % ROWS_A == 0 && NOPE_ROWS % ROWS_Q == 0 && ROPE_ROWS % ROWS_Q == 0);

// Slots of the ring, in order: of qkv_a a block of each row for every warp; of q_b 512 values of each row of as many
// tiles as are multiplied at once; of W_UK rows of this CTA's columns. Pitches are such that rows read together share no
// bank. WINDOW: slots on their way at a time; EARLY: while the ring fills for the first time. Behind the ring lie the
// tokens' q_a.
template <typename W, int T>
struct Plan {
  static constexpr int SPAN_A = WARPS * stream::BLOCK * W::BYTES, PITCH_A = SPAN_A + 64;
  static constexpr int SPAN_Q = KS_Q * SHARE * W::BYTES, PITCH_Q = SPAN_Q + 64;
  static constexpr int SPAN_UK = COLUMNS * 2, PITCH_UK = SPAN_UK + 16, ROWS_UK = 32 * W::BYTES;
  static constexpr int SLOT = ROWS_Q * PITCH_Q;
  static constexpr int STAGES = W::BYTES == 2 ? 6 : 11, WINDOW = W::BYTES == 2 ? 2 : 3;
  static constexpr int EARLY = WINDOW - 1;
  static constexpr int A_SLOTS = HIDDEN * W::BYTES / SPAN_A, PER_ROUND = INNER * W::BYTES / SPAN_Q;
  static constexpr int Q_SLOTS = ROUNDS * PER_ROUND, UK_SLOTS = NOPE / ROWS_UK, UK_LOCAL = UK_SLOTS / 2;
  static constexpr int SLOTS = A_SLOTS + Q_SLOTS + UK_SLOTS;
  static constexpr int RING = STAGES * SLOT, Q_PITCH = stream::pitch_of(INNER), SHARED = RING + T * Q_PITCH * 2;
  static_assert(A_SLOTS * SPAN_A == HIDDEN * W::BYTES && UK_SLOTS % 2 == 0 && ROWS_UK % 16 == 0);
  static_assert(ROWS_A * PITCH_A <= SLOT && ROWS_UK * PITCH_UK <= SLOT);
};

// Words are pairs of values, or a float, inverted: no result is all ones.
struct Board {
  uint32_t launches, unused[31];
  uint32_t x[2][MOST_TOKENS][HIDDEN / 2];     // times the norm's weights, in stream::stage's order
  uint32_t pieces[2][MOST_TOKENS][PIECES];    // sums of squares of x before the weights
  uint32_t qkv[2][MOST_TOKENS][OUTER / 2];
};

struct Args {
  bf16* residual;  // [T, HIDDEN]
  const void* x;
  int parts, wide;  // wide: x holds floats [T, parts, HIDDEN], else bf16 [T, HIDDEN]
  const bf16* norm;
  const uint8_t* w_a;  // [OUTER, HIDDEN]
  const float* scale_a;
  const bf16* q_norm;
  const uint8_t* w_q;  // [H (NOPE + ROPE), INNER]
  const float* scale_q;
  NewRows rows;
  const bf16* w_uk;  // [H, NOPE, LATENT]
  bf16* out;         // [T, H, WIDTH]
  Board* board;
  int H;
  float eps;
};

// Word `at` of a token, which is emptied in the next launch's set.
template <int WORDS>
__device__ __forceinline__ void tell(uint32_t (&set)[2][MOST_TOKENS][WORDS], int turn, int token, int at, uint32_t v) {
  put(&set[turn][token][at], ~v);
  set[turn ^ 1][token][at] = 0;
}
__device__ __forceinline__ uint4 look(const uint32_t* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ bool misses(const uint4& v) { return !v.x || !v.y || !v.z || !v.w; }
__device__ __forceinline__ uint4 inverted(const uint4& v) { return make_uint4(~v.x, ~v.y, ~v.z, ~v.w); }
// Four words, once they are told. A warp that has waited comes together by __syncwarp().
__device__ __forceinline__ uint4 seen(const uint32_t* p) {
  uint4 v;
  do v = look(p);
  while (misses(v));
  return inverted(v);
}

// 4 bytes to the same place in CTA `rank` of the cluster, where `barrier` counts them.
__device__ __forceinline__ void hand_on(const void* to, const uint64_t* barrier, int rank, uint32_t v) {
  const uint32_t there = address_in(static_cast<const float*>(to), rank);
  const uint32_t told = address_in(reinterpret_cast<const float*>(barrier), rank);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(v),
               "r"(told)
               : "memory");
}

template <typename W, int T>
struct Shared {
  union {  // of qkv_a, and when those have been told of q_b
    float a_sums[WARPS][TILES_A][T * TILE];
    float q_sums[KS_Q][TILES][T * TILE];
  };
  float q_scales[ROWS], squares[T * INNER_WARPS];
  uint32_t most[T * INNER_WARPS];
  float x_scale[T], q_scale[T];
  uint32_t nope[2][T][NOPE_ROWS / 2 + 4];  // by each CTA of the cluster; the tokens' rows share no bank
  uint64_t full[Plan<W, T>::STAGES], empty[Plan<W, T>::STAGES], told, handed;
};

// What the copying warp does.
template <typename W, int T>
__device__ __forceinline__ void copy(const Args& a, Shared<W, T>& shared, uint8_t* memory) {
  using P = Plan<W, T>;
  static_assert(P::SHARED + sizeof(shared) <= ROOM);
  const int cta = blockIdx.x, head = cta / 2, rank = cluster_rank(), slots = head < a.H ? P::SLOTS : P::A_SLOTS;
  if (!elected()) return;
  int stage = 0, phase = 1, landed = 0, landed_phase = 0, arrived = 0;
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
      rows = P::ROWS_UK, apart = LATENT * 2, span = P::SPAN_UK, pitch = P::PITCH_UK;
      from = reinterpret_cast<const uint8_t*>(a.w_uk + static_cast<int64_t>(head * NOPE + k) * LATENT + rank * COLUMNS);
    }
    while (n - arrived >= (n < P::STAGES ? P::EARLY : P::WINDOW)) {
      barrier_wait(&shared.full[landed], landed_phase);
      if (arrived++, ++landed == P::STAGES) landed = 0, landed_phase ^= 1;
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

}  // namespace before_attention_few
