// The operations before absorbed attention for one token, in one launch: the residual's sum and norm, qkv_a, and the
// queries (q_b, W_UK, rope) with the step's cache row. Contract in mla_pre_attention.py.
//
// With three launches, DRAM would idle twice, while the results of one product become the input of the next. Here one
// ring streams each CTA's part of all three matrices, so the next weights are in flight while CTAs publish results:
// first pieces of the residual, then rows of qkv_a's product. A published word holds a pair of values and a
// tag, the launch number: readers poll until the tag matches, without a separate flag.
#include "attention/sm90/mla_pre_attention.cuh"

using namespace before_attention;

namespace {

constexpr int KS_A = 8;  // warps that share a tile of qkv_a
constexpr int QUADS_EACH = (QUADS + CONSUMERS - 1) / CONSUMERS;
constexpr int INNER_QUADS = INNER / 4, INNER_WARPS = INNER_QUADS / 32;
static_assert(PIECES % 32 == 0 && INNER_QUADS % 32 == 0 && INNER_QUADS <= CONSUMERS);

// Shared memory after the ring: x, then q_a. At the end, partial sums of W_UK's product reuse their place.
template <typename W, int SPLIT>
struct Plan : Slots<W, SPLIT> {
  using S = Slots<W, SPLIT>;
  static constexpr int PITCH_UK = S::SPAN_UK, EACH_UK = S::ROWS_UK / WARPS, EARLY = S::WINDOW;
  static constexpr int X_BYTES = stream::pitch_of(HIDDEN) * 2;
  static constexpr int SHARED = S::RING + X_BYTES + stream::pitch_of(INNER) * 2;
  static_assert(S::SPAN_A == KS_A * SHARE * W::BYTES && S::ROWS_UK * PITCH_UK <= S::SLOT);
  static_assert(WARPS * S::COLUMNS * 4 <= SHARED - S::RING);
};

// A word: low half a pair, high half a tag.
struct Mailbox {
  uint32_t launches, unused[31];
  uint64_t x[HIDDEN / 2];       // times the norm's weights
  uint64_t pieces[PIECES * 2];  // per piece of x: sum of squares before the weights, largest magnitude after
  uint64_t qkv[OUTER / 2];
  uint64_t nope[MOST_SPLIT_HEADS][NOPE / 2];  // q_nope, with SPLIT > 2
};
static_assert(sizeof(Mailbox) <= 64 << 10);

using Args = Arguments<Mailbox>;

__device__ __forceinline__ ulonglong2 look(const uint64_t* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void publish(uint64_t* p, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ bool arrived(const ulonglong2& v, uint32_t tag) { return v.x >> 32 == tag && v.y >> 32 == tag; }
__device__ __forceinline__ uint64_t word(uint32_t tag, uint32_t pair) {
  return static_cast<uint64_t>(tag) << 32 | pair;
}

template <typename P>
struct Shared {
  float sums[WARPS][TILE], q_sums[KS_Q][P::TILES][TILE], q_scales[P::ROWS], squares[INNER_WARPS];
  uint32_t most[INNER_WARPS];
  float x_scale, x_raise;
  uint2 parts[MAX_RANKS][PIECE];  // each rank's part of this CTA's piece of x
  // q_nope: with SPLIT 2 the other CTA's half, else all of it.
  __align__(16) uint32_t nope[P::SPLIT == 2 ? P::NOPE_ROWS / 2 : NOPE / 2];
  uint64_t full[P::STAGES], empty[P::STAGES], published, handed;
};

template <typename W>
__device__ __forceinline__ void put(typename W::Value* to, uint32_t low, uint32_t high, float raise) {
  if (W::BYTES == 1) {
    const auto raised = [raise](uint32_t pair) {
      const float2 f = widen(pair);
      const __half2 h = __floats2half2_rn(f.x * raise, f.y * raise);
      return *reinterpret_cast<const uint32_t*>(&h);
    };
    low = raised(low), high = raised(high);
  }
  auto* words = reinterpret_cast<uint32_t*>(to);
  words[0] = low, words[4] = high;
}

// to[g] = the token's sum of row g of a tile.
__device__ __forceinline__ void store(const stream::Sums<4>& acc, float* to) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float even = acc.d[0][0][0] + acc.d[1][0][0], odd = acc.d[0][0][2] + acc.d[1][0][2];
  const float v = even + __shfl_xor_sync(~0u, odd, 2);
  if (t == 0) to[g] = v;
}

// Called by warps 0 to ranks - 1. Warp r sends this rank's part of the CTA's piece, rounded, to rank r, waits for rank
// r's part and writes it to shared memory (NaN if it does not arrive). Warp 0 then returns the sum, in the order of
// ranks. With one warp for all ranks, their addresses and tests took some 300 instructions.
__device__ __forceinline__ float4 sum_of_ranks(const Args& a, uint2 (&parts)[MAX_RANKS][PIECE], int quad, bool publishes,
                                               uint32_t& epoch) {
  const Peers& peers = a.peers;
  const int lane = threadIdx.x % 32, at = BEFORE_WORDS + quad, other = threadIdx.x / 32, ranks = peers.ranks;
  const Turn turn = turn_of(peers, 0);
  const float4 own = publishes ? sum_of_parts(a, 0, quad) : float4{};
  epoch = turn.before + 1;
  if (publishes) {
    uint4 v = make_uint4(narrow(own.x, own.y), epoch, narrow(own.z, own.w), epoch);
    if (other != peers.rank) {
      send(peers.word(other, peers.rank, epoch, at), v);
      const uint4* from = peers.word(peers.rank, other, epoch, at);
      const bool patient = turn.failed == 0;
      uint64_t begin = 0;
      for (int polls = 1; !arrived_word(v = hopper::look(from), epoch); polls++) {
        if (too_long(peers, polls, begin, patient)) {
          if (patient) report(peers, other);
          v.x = v.z = NAN_PAIR;
          break;
        }
      }
    }
    parts[other][lane] = make_uint2(v.x, v.z);
  }
  __syncwarp();
  named_sync(4, ranks * 32);
  float4 sum = make_float4(0, 0, 0, 0);
  if (other == 0 && publishes) {
    uint2 v[MAX_RANKS];
#pragma unroll
    for (int r = 0; r < MAX_RANKS; r++) v[r] = parts[r][lane];
#pragma unroll
    for (int r = 0; r < MAX_RANKS; r++) {
      const float2 low = widen(v[r].x), high = widen(v[r].y);
      if (r < ranks) sum.x += low.x, sum.y += low.y, sum.z += high.x, sum.w += high.y;
    }
  }
  return sum;
}

// Called by warp 0, with EXCHANGES by warps 0 to ranks - 1. Adds x to this CTA's piece of the residual and publishes
// the sum times the norm's weights, of which each lane that `publishes` holds four (`weight`).
template <bool RAISED, bool EXCHANGES, typename Shared>
__device__ __forceinline__ void publish_piece(const Args& a, Shared& shared, uint32_t tag, uint2 weight,
                                              bool publishes) {
  const int lane = threadIdx.x % 32, quad = blockIdx.x * PIECE + lane;
  float squares = 0;
  uint2 y = make_uint2(0, 0);
  uint2* at = reinterpret_cast<uint2*>(a.residual) + quad;
  uint2 old = y;
  if (publishes) old = __ldcg(at);
  uint32_t epoch = 0;
  float4 sum;
  if (EXCHANGES) {
    sum = sum_of_ranks(a, shared.parts, quad, publishes, epoch);
    if (threadIdx.x >= 32) return;
  } else if (publishes) {
    sum = sum_of_parts(a, 0, quad);
  }
  if (publishes) {
    const float2 c = widen(old.x), d = widen(old.y);
    const uint2 fresh = make_uint2(narrow(c.x + sum.x, c.y + sum.y), narrow(d.x + sum.z, d.y + sum.w));
    y = make_uint2(times(fresh.x, weight.x), times(fresh.y, weight.y));
    publish(a.mailbox->x + quad * 2, word(tag, y.x), word(tag, y.y));
    squares = squares_of(fresh.x, fresh.y);
    *at = fresh;
  }
  __syncwarp();
  squares = warp_sum(squares);
  const uint32_t most = RAISED ? most_of(y.x, y.y) : 0;
  if (lane == 0) {
    const int piece = blockIdx.x;
    if (piece < PIECES) publish(a.mailbox->pieces + piece * 2, word(tag, __float_as_uint(squares)), word(tag, most));
    barrier_arrive(&shared.published);
    if (EXCHANGES) *count_of(a.peers, 0) = epoch;
  }
}

// All threads but the copying warp's copy all of x from the mailbox to shared memory.
template <typename W, typename Shared>
__device__ __forceinline__ void take_x(const Args& a, Shared& shared, typename W::Value* xs, uint32_t tag) {
  constexpr bool RAISED = W::BYTES == 1;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  ulonglong2 v[QUADS_EACH], w[PIECES / 32];
  const uint64_t* from = a.mailbox->x + tid * 2;
  float raise = 1;
  barrier_wait(&shared.published, 0);  // polling earlier slows down the CTAs that publish
#pragma unroll
  for (int n = 0; n < QUADS_EACH; n++) {
    if (tid + n * CONSUMERS < QUADS) v[n] = look(from + n * CONSUMERS * 2);
  }
  bool missing;
  if (warp == WARPS - 1) {
    const uint64_t* pieces = a.mailbox->pieces + lane * 2;
#pragma unroll
    for (int n = 0; n < PIECES / 32; n++) w[n] = look(pieces + n * 64);
    do {
      missing = false;
#pragma unroll
      for (int n = 0; n < PIECES / 32; n++) {
        if (!arrived(w[n], tag)) w[n] = look(pieces + n * 64), missing = true;
      }
    } while (missing);
    __syncwarp();
    float squares = 0;
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < PIECES / 32; n++) {
      squares += __uint_as_float(static_cast<uint32_t>(w[n].x)), most = max(most, static_cast<uint32_t>(w[n].y));
    }
    squares = warp_sum(squares);
    const uint32_t exponent = stream::raise_exponent(RAISED ? __reduce_max_sync(~0u, most) : 0);
    if (lane == 0) {
      shared.x_raise = stream::power_of_two(exponent);
      shared.x_scale = rsqrtf(squares / HIDDEN + a.eps) * (RAISED ? stream::power_of_two(254 - exponent) : 1);
    }
  }
  do {
    missing = false;
#pragma unroll
    for (int n = 0; n < QUADS_EACH; n++) {
      if (tid + n * CONSUMERS < QUADS && !arrived(v[n], tag)) v[n] = look(from + n * CONSUMERS * 2), missing = true;
    }
  } while (missing);
  __syncwarp();
  if (RAISED) {
    meet();
    raise = shared.x_raise;
  }
  auto* to = xs + place_of<W>(tid * 4);
#pragma unroll
  for (int n = 0; n < QUADS_EACH; n++) {
    if (tid + n * CONSUMERS >= QUADS) continue;
    put<W>(to + n * CONSUMERS * 4, static_cast<uint32_t>(v[n].x), static_cast<uint32_t>(v[n].y), raise);
  }
}

// A warp writes the token's cache row.
__device__ __forceinline__ void write_new_row(const Args& a, uint32_t tag, const uint4 (&kv_norm)[2]) {
  const int lane = threadIdx.x % 32;
  const auto see = [&](int at) {  // waits for two words; returns their pairs
    ulonglong2 v;
    do v = look(a.mailbox->qkv + at);
    while (!arrived(v, tag));
    __syncwarp();
    return make_uint2(static_cast<uint32_t>(v.x), static_cast<uint32_t>(v.y));
  };
  NewRow row;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint2 low = see((INNER + i * 256) / 2 + lane * 4), high = see((INNER + i * 256) / 2 + lane * 4 + 2);
    row.latent[i] = make_uint4(low.x, low.y, high.x, high.y);
  }
  const uint2 keys = see((INNER + LATENT) / 2 + lane / 2 * 2);
  row.key = lane % 2 ? keys.y : keys.x;
  write_row(a.rows, 0, row, kv_norm);
}

template <typename W, bool EXCHANGES, int SPLIT>
__global__ __launch_bounds__(THREADS, 1) void mla_pre_attention_kernel(const __grid_constant__ Args a) {
  using P = Plan<W, SPLIT>;
  using Value = typename W::Value;
  using X = stream::Sums<4>;
  constexpr bool RAISED = W::BYTES == 1;
  constexpr int CHUNKS = SHARE * W::BYTES / 64;
  extern __shared__ __align__(128) uint8_t memory[];
  Value* xs = reinterpret_cast<Value*>(memory + P::RING);
  Value* qs = reinterpret_cast<Value*>(memory + P::RING + P::X_BYTES);
  float* parts = reinterpret_cast<float*>(xs);
  __shared__ Shared<P> shared;
  constexpr int NOPE_ROWS = P::NOPE_ROWS, ROPE_ROWS = P::ROPE_ROWS, ROWS = P::ROWS, COLUMNS = P::COLUMNS;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tid = threadIdx.x, cta = blockIdx.x, head = cta / SPLIT, rank = SPLIT == 2 ? cluster_rank() : cta % SPLIT;
  const bool has_head = head < a.H;
  make_barriers<P>(shared, warp == WARPS, 1);
  if (warp == WARPS) {
    copy<P>(a, shared, memory);
    __syncwarp();
    wait_for_predecessor();
    return;
  }
  // Small loads before the weights: loads return in order of issue, so later ones would take microseconds longer.
  const int group = warp / KS_A, in_group = tid % (KS_A * 32), first = (cta + group * CTAS) * TILE;
  const bool publishes = lane < PIECE && cta * PIECE + lane < QUADS;
  uint2 weight = make_uint2(0, 0), q_weight = weight;
  if (publishes && warp == 0) weight = __ldg(reinterpret_cast<const uint2*>(a.norm) + cta * PIECE + lane);
  if (tid < INNER_QUADS) q_weight = __ldg(reinterpret_cast<const uint2*>(a.q_norm) + tid);
  float2 scale = make_float2(1, 1);
  if (RAISED && in_group < TILE / 2) scale = *reinterpret_cast<const float2*>(a.scale_a + first + in_group * 2);
  const bool scaled = RAISED && has_head && tid < ROWS;
  const int own_row = tid < NOPE_ROWS ? rank * NOPE_ROWS + tid : NOPE + rank * ROPE_ROWS + tid - NOPE_ROWS;
  const float row_scale = scaled ? a.scale_q[head * (NOPE + ROPE) + own_row] : 1;
  uint4 kv_norm[2];
  if (cta == SPLIT * a.H && warp == 0) {
#pragma unroll
    for (int i = 0; i < 2; i++) kv_norm[i] = *reinterpret_cast<const uint4*>(a.rows.norm + i * 256 + lane * 8);
  }
  wait_for_predecessor();
  let_successor_start();
  const uint32_t tag = *reinterpret_cast<const volatile uint32_t*>(&a.mailbox->launches) + 1;
  float cosine = 0, sine = 0;
  if (warp == 1 && has_head && lane < ROPE_ROWS / 2) {
    const int angle = rank * ROPE_ROWS / 2 + lane;
    cosine = a.rows.cos[angle], sine = a.rows.sin[angle];
  }
  if (warp < (EXCHANGES ? static_cast<int>(a.peers.ranks) : 1)) {
    publish_piece<RAISED, EXCHANGES>(a, shared, tag, weight, publishes);
  }
  take_x<W>(a, shared, xs, tag);
  if (scaled) shared.q_scales[tid] = row_scale;
  __syncwarp();
  meet();

  int stage = 0, phase = 0;
  const auto release = [&] {
    __syncwarp();
    if (elected()) barrier_arrive(&shared.empty[stage]);
    if (++stage == P::STAGES) stage = 0, phase ^= 1;
  };
  {
    const Value* x[1] = {X::from(xs, 0, 1, 0) + warp % KS_A * SHARE};
    const uint8_t* mine = memory + (group * TILE + g) * P::PITCH_A + warp % KS_A * SHARE * W::BYTES + 16 * t;
    X acc;
#pragma unroll 1
    for (int n = 0; n < P::A_SLOTS; n++) {
      barrier_wait(&shared.full[stage], phase);
      stream::multiply<W, CHUNKS>(acc, mine + stage * P::SLOT, x, n * KS_A * SHARE);
      release();
    }
    store(acc, shared.sums[warp]);
  }
  named_sync(2 + group, KS_A * 32);
  if (in_group < TILE / 2) {
    float v[2] = {0, 0};
#pragma unroll
    for (int s = 0; s < KS_A; s++) {
      const float2 f = *reinterpret_cast<const float2*>(&shared.sums[group * KS_A + s][in_group * 2]);
      v[0] += f.x, v[1] += f.y;
    }
    const uint64_t both = word(tag, narrow(v[0] * (shared.x_scale * scale.x), v[1] * (shared.x_scale * scale.y)));
    uint64_t* to = a.mailbox->qkv + first / 2 + in_group;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
  }
  if (!has_head) {
    if (cta == SPLIT * a.H && warp == 0) write_new_row(a, tag, kv_norm);
    return;
  }

  {
    uint32_t low = 0, high = 0;
    if (tid < INNER_QUADS) {
      ulonglong2 v;
      do v = look(a.mailbox->qkv + tid * 2);
      while (!arrived(v, tag));
      __syncwarp();
      low = static_cast<uint32_t>(v.x), high = static_cast<uint32_t>(v.y);
      const float squares = warp_sum(squares_of(low, high));
      low = times(low, q_weight.x), high = times(high, q_weight.y);
      const uint32_t most = RAISED ? most_of(low, high) : 0;
      if (lane == 0) shared.squares[warp] = squares, shared.most[warp] = most;
    }
    float raise = 1;
    if (RAISED) {
      meet();
      uint32_t most = 0;
#pragma unroll
      for (int n = 0; n < INNER_WARPS; n++) most = max(most, shared.most[n]);
      raise = stream::power_of_two(stream::raise_exponent(most));
    }
    if (tid < INNER_QUADS) put<W>(qs + place_of<W>(tid * 4), low, high, raise);
  }
  meet();
  if (cta == 0 && tid == 0) a.mailbox->launches = tag;
  if (tid == 0) barrier_expect(&shared.handed, NOPE_ROWS * 2);
  float q_scale = 0;  // computed before the products, while the last weights may still be in flight
  if (SPLIT == 2 || warp < 2) {
    float squares = 0;
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < INNER_WARPS; n++) squares += shared.squares[n], most = max(most, shared.most[n]);
    q_scale = rsqrtf(squares / INNER + a.rows.eps);
    if (RAISED) q_scale *= stream::power_of_two(254 - stream::raise_exponent(most));
  }
  {
    const Value* x[1] = {X::from(qs, 0, 1, 0) + warp % KS_Q * SHARE};
    const uint8_t* mine = memory + (warp / KS_Q * TILE + g) * P::PITCH_Q + warp % KS_Q * SHARE * W::BYTES + 16 * t;
#pragma unroll 1
    for (int n = 0; n < P::ROUNDS; n++) {
      X acc;
#pragma unroll 1
      for (int m = 0; m < P::PER_ROUND; m++) {
        barrier_wait(&shared.full[stage], phase);
        stream::multiply<W, CHUNKS>(acc, mine + stage * P::SLOT, x, m * KS_Q * SHARE);
        release();
      }
      const int tile = warp / KS_Q + n * GROUPS_Q;
      if (P::TILES % GROUPS_Q == 0 || tile < P::TILES) store(acc, shared.q_sums[warp % KS_Q][tile]);
    }
  }
  meet();
  // Rows n and n + 1 of this CTA's part of q, rounded to bf16 like the projection's output.
  const auto pair = [&](int n) {
    float v[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < KS_Q; k++) {
      const float2 f = *reinterpret_cast<const float2*>(&shared.q_sums[k][n / TILE][n % TILE]);
      v[0] += f.x, v[1] += f.y;
    }
    if (RAISED) v[0] *= shared.q_scales[n], v[1] *= shared.q_scales[n + 1];
    return narrow(v[0] * q_scale, v[1] * q_scale);
  };
  bf16* out = a.out + head * WIDTH;
  if (SPLIT == 2) {
    if (warp == 0) hand_on(shared.nope + lane, &shared.handed, rank ^ 1, pair(lane * 2));
  } else if (warp == 0 && lane < NOPE_ROWS / 2) {
    uint64_t* to = a.mailbox->nope[head] + rank * (NOPE_ROWS / 2) + lane;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word(tag, pair(lane * 2))) : "memory");
  }
  if (warp == 1 && lane < ROPE_ROWS / 2) {
    uint32_t* to = reinterpret_cast<uint32_t*>(out + LATENT + rank * ROPE_ROWS) + lane;
    *to = rotate(pair(NOPE_ROWS + lane * 2), cosine, sine);
  }

  // Each warp multiplies its k of W_UK, all of this CTA's columns.
  float sum[8] = {};
  if constexpr (SPLIT > 2) {
    constexpr int LANES = COLUMNS / 8, EACH = P::ROWS_UK / WARPS;  // lanes per row; rows of a slot per warp
    if (warp == 2) {
      ulonglong2 v;
      do v = look(a.mailbox->nope[head] + lane * 2);
      while (!arrived(v, tag));
      __syncwarp();
      *reinterpret_cast<uint2*>(shared.nope + lane * 2) =
          make_uint2(static_cast<uint32_t>(v.x), static_cast<uint32_t>(v.y));
    }
    meet();
#pragma unroll
    for (int n = 0; n < P::UK_SLOTS; n++) {
      barrier_wait(&shared.full[stage], phase);
#pragma unroll
      for (int i = 0; i < EACH; i += 32 / LANES) {
        const int row = warp * EACH + i + lane / LANES, k = n * P::ROWS_UK + row;
        const float2 q = widen(shared.nope[k / 2]);
        const float f = k % 2 ? q.y : q.x;
        const uint4 w = *reinterpret_cast<const uint4*>(memory + stage * P::SLOT + row * P::SPAN_UK + lane % LANES * 16);
        const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float2 v = widen(pairs[c]);
          sum[2 * c] += f * v.x, sum[2 * c + 1] += f * v.y;
        }
      }
      if (++stage == P::STAGES) stage = 0, phase ^= 1;
    }
#pragma unroll
    for (float& s : sum) {
#pragma unroll
      for (int other = LANES; other < 32; other *= 2) s += __shfl_xor_sync(~0u, s, other);
    }
  }
#pragma unroll
  for (int n = 0; n < (SPLIT == 2 ? P::UK_SLOTS : 0); n++) {
    const int k = n % P::UK_LOCAL * P::ROWS_UK + warp * P::EACH_UK;  // in a half of the nope rows
    if (n == P::UK_LOCAL) barrier_wait(&shared.handed, 0);
    barrier_wait(&shared.full[stage], phase);
    const uint8_t* from = memory + stage * P::SLOT + warp * P::EACH_UK * P::SPAN_UK + lane * 16;
#pragma unroll
    for (int i = 0; i < P::EACH_UK; i += 2) {
      const float2 q = widen(n < P::UK_LOCAL ? pair(k + i) : shared.nope[(k + i) / 2]);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint4 w = *reinterpret_cast<const uint4*>(from + (i + j) * P::SPAN_UK);
        const float f = j ? q.y : q.x;
        const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float2 v = widen(pairs[c]);
          sum[2 * c] += f * v.x, sum[2 * c + 1] += f * v.y;
        }
      }
    }
    if (++stage == P::STAGES) stage = 0, phase ^= 1;
  }
  if (SPLIT == 2 || lane * 8 < COLUMNS) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      *reinterpret_cast<float4*>(parts + warp * COLUMNS + lane * 8 + i) =
          make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    }
  }
  meet();
  if (tid < COLUMNS / 2) {
    float v[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      const float2 f = *reinterpret_cast<const float2*>(parts + k * COLUMNS + tid * 2);
      v[0] += f.x, v[1] += f.y;
    }
    reinterpret_cast<uint32_t*>(out + rank * COLUMNS)[tid] = narrow(v[0], v[1]);
  }
}

}  // namespace

// scale_a, scale_q: of the rows of e4m3 weights; null for bf16. H is at most 65, with peers 32. The GPU has at least
// 132 SMs. mailbox: 64 KB, zero at first, one per stream. peers: in host memory, or null; with peers, x is a partial
// sum.
API int mla_pre_attention_t1(void* residual, const void* x, int64_t parts, int64_t wide, const void* norm, float eps,
                  const void* w_a, const void* scale_a, const void* q_norm, const void* w_q, const void* scale_q,
                  const void* kv_norm, const void* cos, const void* sin, void* cache, int64_t slots, int64_t packed,
                  const void* slot, float norm_eps, const void* w_uk, void* out, void* mailbox, int64_t H,
                  const Peers* peers, void* stream) {
  const Args a{static_cast<bf16*>(residual),
               x,
               static_cast<int>(parts),
               static_cast<int>(wide),
               static_cast<const bf16*>(norm),
               static_cast<const uint8_t*>(w_a),
               static_cast<const float*>(scale_a),
               static_cast<const bf16*>(q_norm),
               static_cast<const uint8_t*>(w_q),
               static_cast<const float*>(scale_q),
               new_rows(nullptr, 0, kv_norm, cos, sin, cache, slots, packed, slot, 1, norm_eps),
               static_cast<const bf16*>(w_uk),
               static_cast<bf16*>(out),
               static_cast<Mailbox*>(mailbox),
               static_cast<int>(H),
               eps,
               peers == nullptr ? Peers{} : *peers};
  const auto start = [&](auto kind) {
    using W = decltype(kind);
    const auto of = [&](auto kernel, int shared, int cluster) {
      return launch(kernel, dim3(CTAS), dim3(THREADS), shared, stream, cluster, a);
    };
    if (peers == nullptr) return of(mla_pre_attention_kernel<W, false, 2>, Plan<W, 2>::SHARED, 2);
    return H <= 16 ? of(mla_pre_attention_kernel<W, true, 8>, Plan<W, 8>::SHARED, 1)
                   : of(mla_pre_attention_kernel<W, true, 4>, Plan<W, 4>::SHARED, 1);
  };
  if (peers != nullptr && H > MOST_SPLIT_HEADS) return -1;
  return scale_a == nullptr ? start(Bf16()) : start(E4m3());
}
