// Shared by mla_pre_attention_t1.cu (one token) and mla_pre_attention_mma.cu (two to four).
//
// CTAs exchange results through a mailbox in global memory. All must be co-resident, one per SM, because each waits for
// all others. The mailbox counts launches. CTA 0 advances the count after it has read all of q_a: every CTA has written
// a tile of q_a, and had read the count before.
//
// Every other memory access waits behind weights in flight: publishing took 4 us with the whole ring in flight, 1.2 us
// with none. So the copying warp requests a few slots at a time. For the same reason a CTA polls the mailbox only after
// it has published its own piece, and one warp of each CTA reads the pieces' sums of a token.
#pragma once
#include "attention/sm90/cache_row.cuh"
#include "cuda/peers.cuh"
#include "cuda/weight_stream.cuh"

namespace before_attention {

using namespace mla;
using stream::Bf16;
using stream::E4m3;
using stream::TILE, stream::WARPS;

constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;  // and a copying warp
constexpr int HIDDEN = 7168, INNER = 1536, OUTER = INNER + LATENT + ROPE;  // Kimi K2's widths; rows of qkv_a
constexpr int TILES_A = 2, ROWS_A = TILES_A * TILE;                        // tiles and rows of qkv_a per CTA
constexpr int CTAS = OUTER / ROWS_A;
constexpr int SHARE = 128, KS_Q = 4;  // values of a row of q_b that a warp multiplies per slot; warps that share a tile
constexpr int GROUPS_Q = WARPS / KS_Q, ROWS_Q = GROUPS_Q * TILE;
constexpr int NOPE_ROWS = NOPE / 2, ROPE_ROWS = ROPE / 2, ROWS = NOPE_ROWS + ROPE_ROWS;  // rows of q_b per CTA
// A CTA adds one piece of the residual: PIECE quads of 4 values.
constexpr int QUADS = HIDDEN / 4, PIECE = (QUADS + CTAS - 1) / CTAS, PIECES = (QUADS + PIECE - 1) / PIECE;
constexpr int USUAL_PARTS = 9;    // parts of x: 8 experts of a token, and the shared one
constexpr int ROOM = 227 * 1024;  // max bytes of shared memory per CTA
static_assert(PIECE <= 32 && PIECES == 128);
static_assert(CTAS * TILE <= INNER && OUTER % ROWS_A == 0 && NOPE_ROWS % ROWS_Q == 0 && ROPE_ROWS % ROWS_Q == 0);

// The part of a head that each of its SPLIT CTAs computes. SPLIT is 2 for all heads; 4 or 8 for a rank's share of the
// heads, so that nearly every CTA has one. A CTA's part of q_b and W_UK must fit the ring, to arrive before q_a does.
constexpr int MOST_SPLIT_HEADS = 32;  // max heads with SPLIT > 2
template <int SPLIT_>
struct Part {
  static constexpr int SPLIT = SPLIT_;
  static constexpr int NOPE_ROWS = NOPE / SPLIT, ROPE_ROWS = ROPE / SPLIT, ROWS = NOPE_ROWS + ROPE_ROWS;  // in q_b
  static constexpr int TILES = ROWS / TILE, ROUNDS = (ROWS + ROWS_Q - 1) / ROWS_Q;
  static constexpr int COLUMNS = LATENT / SPLIT;  // columns of W_UK
  static_assert(NOPE_ROWS % ROWS_Q == 0 || ROUNDS == 1);
};

// Slots of the ring, in order: A_SLOTS of qkv_a, 1,024 values of each row of this CTA's tiles; Q_SLOTS of q_b, 512
// values of each row of the GROUPS_Q tiles that are multiplied at once; UK_SLOTS of W_UK, rows of this CTA's columns,
// PITCH_UK bytes apart. Pitches are 64 bytes off a multiple of 128, so that two rows share no bank. WINDOW: max slots
// in flight; EARLY: the same while the ring fills for the first time.
template <typename W, int SPLIT = 2>
struct Slots : Part<SPLIT> {
  using Weights = W;
  using Part<SPLIT>::COLUMNS, Part<SPLIT>::ROUNDS;
  static constexpr int SPAN_A = 1024 * W::BYTES, PITCH_A = SPAN_A + 64;
  static constexpr int SPAN_Q = KS_Q * SHARE * W::BYTES, PITCH_Q = SPAN_Q + 64;
  static constexpr int SPAN_UK = COLUMNS * 2, ROWS_UK = SPLIT * 16 * W::BYTES < NOPE ? SPLIT * 16 * W::BYTES : NOPE;
  static constexpr int SLOT = ROWS_Q * PITCH_Q;
  static constexpr int STAGES = W::BYTES == 2 ? 6 : 11, WINDOW = W::BYTES == 2 ? 2 : 3;
  static constexpr int A_SLOTS = HIDDEN * W::BYTES / SPAN_A, PER_ROUND = INNER * W::BYTES / SPAN_Q;
  static constexpr int Q_SLOTS = ROUNDS * PER_ROUND, UK_SLOTS = NOPE / ROWS_UK, UK_LOCAL = UK_SLOTS / 2;
  static constexpr int SLOTS = A_SLOTS + Q_SLOTS + UK_SLOTS, RING = STAGES * SLOT;
  static_assert(ROWS_A * PITCH_A <= SLOT && A_SLOTS * SPAN_A == HIDDEN * W::BYTES);
  static_assert(ROWS_UK * SPAN_UK <= SLOT && (SPLIT > 2 || UK_SLOTS % 2 == 0));
};

template <typename Mailbox>
struct Arguments {
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
  Mailbox* mailbox;
  int H;
  float eps;
  Peers peers;  // ranks 0: none
};

// Index of value k of x (k a multiple of 4) in the layout of stream::stage. k + 1 is next; k + 2 and k + 3 are at + 8.
template <typename W>
__device__ __forceinline__ int place_of(int k) {
  constexpr int LANE = 16 / W::BYTES;
  const int second = W::BYTES == 1 ? k / 8 % 2 : k / W::CHUNK % 2;
  return k / stream::BLOCK * stream::BLOCK + k / LANE % 4 * 16 + second * 4 + k / 4 % 2 * 2;
}

__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t weights) {
  const float2 f = widen(pair), w = widen(weights);
  return narrow(f.x * w.x, f.y * w.y);
}
__device__ __forceinline__ float squares_of(uint32_t low, uint32_t high) {
  const float2 a = widen(low), b = widen(high);
  return a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
}
// Float bits of the largest magnitude in the warp.
__device__ __forceinline__ uint32_t most_of(uint32_t low, uint32_t high) {
  const float2 a = widen(low), b = widen(high);
  const float most = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)));
  return __reduce_max_sync(~0u, __float_as_uint(most));
}

// Values 4 quad .. + 3 of a token's x: the sum of its parts.
template <typename Mailbox>
__device__ __forceinline__ float4 sum_of_parts(const Arguments<Mailbox>& a, int token, int quad) {
  float4 sum = make_float4(0, 0, 0, 0);
  if (a.wide) {
    const float4* from = static_cast<const float4*>(a.x) + token * a.parts * QUADS + quad;
    const auto add = [&](int p) {
      const float4 v = __ldcg(from + p * QUADS);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    };
    if (a.parts == USUAL_PARTS) {
#pragma unroll
      for (int p = 0; p < USUAL_PARTS; p++) add(p);
    } else {
#pragma unroll 4
      for (int p = 0; p < a.parts; p++) add(p);
    }
  } else {
    const uint2 v = __ldcg(static_cast<const uint2*>(a.x) + token * QUADS + quad);
    const float2 c = widen(v.x), d = widen(v.y);
    sum = make_float4(c.x, c.y, d.x, d.y);
  }
  return sum;
}

// State of a token's exchange with peers in this CTA: the previous epoch; failed: not 0 after any wait has failed.
// Loaded after the predecessor's end, used only when other loads are in flight.
struct Turn {
  uint32_t before, failed;
};
__device__ __forceinline__ uint32_t* count_of(const Peers& peers, int token) {
  return peers.control + BEFORE_COUNTS + token * MAX_CTAS + blockIdx.x;
}
__device__ __forceinline__ Turn turn_of(const Peers& peers, int token) {
  return {*static_cast<const volatile uint32_t*>(count_of(peers, token)),
          *static_cast<const volatile uint32_t*>(peers.control)};
}

// A barrier of all threads but the copying warp's.
__device__ __forceinline__ void meet() { named_sync(1, CONSUMERS); }

// Stores 4 bytes at the same address in CTA `rank` of the cluster; the mbarrier there counts them.
__device__ __forceinline__ void hand_on(const void* to, const uint64_t* barrier, int rank, uint32_t v) {
  const uint32_t there = address_in(static_cast<const float*>(to), rank);
  const uint32_t remote = address_in(reinterpret_cast<const float*>(barrier), rank);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(v),
               "r"(remote)
               : "memory");
}

// Called by all threads. The copying warp (`copies`) initialises the mbarriers; with SPLIT > 2 it does not wait for the
// others. publishing: arrivals that complete `published`.
template <typename P, typename Shared>
__device__ __forceinline__ void make_barriers(Shared& shared, bool copies, int publishing) {
  if (copies) {
    if (elected()) {
#pragma unroll
      for (int n = 0; n < P::STAGES; n++) barrier_init(&shared.full[n], 1), barrier_init(&shared.empty[n], WARPS);
      barrier_init(&shared.published, publishing), barrier_init(&shared.handed, 1);
      barriers_visible();
    }
    __syncwarp();
  }
  if (P::SPLIT == 2) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    cluster_wait();  // both CTAs run and have initialised their barriers
  } else {
    barriers_known<THREADS>(copies);
  }
}

// The copying warp fills the ring's slots.
template <typename P, typename Mailbox, typename Shared>
__device__ __forceinline__ void copy(const Arguments<Mailbox>& a, Shared& shared, uint8_t* memory) {
  using W = typename P::Weights;
  static_assert(P::SHARED + sizeof(Shared) <= ROOM && P::EARLY <= P::WINDOW && P::WINDOW <= P::EARLY + 1);
  const int cta = blockIdx.x, head = cta / P::SPLIT, rank = P::SPLIT == 2 ? cluster_rank() : cta % P::SPLIT;
  const int slots = head < a.H ? P::SLOTS : P::A_SLOTS;
  if (!elected()) return;
  int stage = 0, phase = 1, landed = 0, landed_phase = 0;
#pragma unroll 1
  for (int n = 0; n < slots; n++) {
    const uint8_t* from;
    int rows, apart, span, pitch, jump = 0, before = TILE;  // jump: extra bytes after `before` rows
    if (n < P::A_SLOTS) {
      rows = ROWS_A, apart = HIDDEN * W::BYTES, span = P::SPAN_A, pitch = P::PITCH_A;
      from = a.w_a + static_cast<int64_t>(cta) * TILE * apart + n * span;
      jump = (CTAS - 1) * TILE * apart;
    } else if (n < P::A_SLOTS + P::Q_SLOTS) {
      const int m = n - P::A_SLOTS, round = m / P::PER_ROUND, row = round * ROWS_Q;
      const int first = row < P::NOPE_ROWS ? rank * P::NOPE_ROWS + row
                                           : NOPE + rank * P::ROPE_ROWS + row - P::NOPE_ROWS;
      rows = P::ROWS % ROWS_Q ? min(ROWS_Q, P::ROWS - row) : ROWS_Q;
      apart = INNER * W::BYTES, span = P::SPAN_Q, pitch = P::PITCH_Q;
      from = a.w_q + static_cast<int64_t>(head * (NOPE + ROPE) + first) * apart + (m - round * P::PER_ROUND) * span;
      if (P::ROUNDS == 1) {
        before = P::NOPE_ROWS, jump = (NOPE + rank * P::ROPE_ROWS - (rank + 1) * P::NOPE_ROWS) * apart;
      }
    } else {  // with SPLIT 2, first the rows that are multiplied by this CTA's half of q_nope
      const int m = n - P::A_SLOTS - P::Q_SLOTS;
      const int k = P::SPLIT == 2 ? (rank * P::NOPE_ROWS + m * P::ROWS_UK) % NOPE : m * P::ROWS_UK;
      rows = P::ROWS_UK, apart = LATENT * 2, span = P::SPAN_UK, pitch = P::PITCH_UK;
      const int64_t row = head * NOPE + k;
      from = reinterpret_cast<const uint8_t*>(a.w_uk + row * LATENT + rank * P::COLUMNS);
    }
    if (n >= P::EARLY && (P::EARLY == P::WINDOW || n != P::STAGES)) {
      barrier_wait(&shared.full[landed], landed_phase);
      if (++landed == P::STAGES) landed = 0, landed_phase ^= 1;
    }
    if (n >= P::STAGES) barrier_wait_to_refill(&shared.empty[stage], phase);
    uint64_t* barrier = &shared.full[stage];
    uint8_t* to = memory + stage * P::SLOT;
    barrier_expect(barrier, rows * span);
#pragma unroll 8
    for (int row = 0; row < rows; row++) {
      bulk_load_once(to, from, span, barrier);
      to += pitch, from += row == before - 1 ? apart + jump : apart;
    }
    if (++stage == P::STAGES) stage = 0, phase ^= 1;
  }
}

}  // namespace before_attention
