// The operations before absorbed attention for two to four tokens, in one launch. Contract in mla_pre_attention.py.
//
// As mla_pre_attention_t1.cu, but more tokens publish more and leave less shared memory for the ring. So each lane
// reads the values of x that it multiplies into registers, and the tensor cores multiply by W_UK. A token's sums do not
// depend on the number of tokens.
//
// CTAs publish results as words that are zero until they are written. Launch n uses set n % 2 of the words and zeroes
// the other set for launch n + 1: the readers of launch n - 1 have ended.
#include "cuda/router_mailbox.cuh"
#include "attention/sm90/mla_pre_attention.cuh"

#include <type_traits>

using namespace before_attention;

namespace {

using mailbox::glance16, mailbox::misses, mailbox::put;

constexpr int MOST_TOKENS = 4;
constexpr int OCTETS = INNER / 8, INNER_WARPS = OCTETS / 32;  // per token: groups of 8 values of q_a; their warps
static_assert(OCTETS % 32 == 0);

// The tokens' q_a follow the ring in shared memory. The pitch of W_UK's rows lets eight rows share no bank.
template <typename W, int T, int SPLIT>
struct Plan : Slots<W, SPLIT> {
  using S = Slots<W, SPLIT>;
  static constexpr int PITCH_UK = S::SPAN_UK + 16, EARLY = S::WINDOW - 1;
  static constexpr int Q_PITCH = stream::pitch_of(INNER), SHARED = S::RING + T * Q_PITCH * 2;
  static_assert(S::SPAN_A == WARPS * stream::BLOCK * W::BYTES && S::ROWS_UK * PITCH_UK <= S::SLOT);
  // KS_UK: warps that share 16 columns of W_UK, each with its own k. LEFT: bytes for the sums of all but the first.
  static constexpr int KS_UK = WARPS * 16 / S::COLUMNS, LEFT = (WARPS - WARPS / KS_UK) * 32 * 16;
  static_assert(S::ROWS_UK % (16 * KS_UK) == 0 && LEFT <= T * Q_PITCH * 2);
};

// A word has the inverted bits of a pair of values, or of a float. It is not 0, because no result is all ones.
struct Mailbox {
  uint32_t launches, unused[31];
  uint32_t x[2][MOST_TOKENS][HIDDEN / 2];  // times the norm's weights, in stream::stage's order
  uint32_t pieces[2][MOST_TOKENS][PIECES];  // sums of squares of x before the weights
  uint32_t qkv[2][MOST_TOKENS][OUTER / 2];
  uint32_t nope[2][MOST_TOKENS][MOST_SPLIT_HEADS * NOPE / 2];  // q_nope, with SPLIT > 2
};

static_assert(sizeof(Mailbox) <= 224 << 10);

using Args = Arguments<Mailbox>;

// Writes word `at` of a token in this launch's set and zeroes it in the next launch's set.
template <int WORDS>
__device__ __forceinline__ void publish(uint32_t (&set)[2][MOST_TOKENS][WORDS], int turn, int token, int at, uint32_t v) {
  put(&set[turn][token][at], ~v);
  set[turn ^ 1][token][at] = 0;
}
__device__ __forceinline__ uint4 inverted(const uint4& v) { return make_uint4(~v.x, ~v.y, ~v.z, ~v.w); }
// Waits until four words are written and returns them. The caller reconverges the warp by __syncwarp().
__device__ __forceinline__ uint4 seen(const uint32_t* p) {
  uint4 v;
  do v = glance16(p);
  while (misses(v));
  return inverted(v);
}

template <typename P, int T>
struct Shared {
  union {  // q_sums only after qkv_a's results are published
    float a_sums[WARPS][TILES_A][T * TILE];
    float q_sums[KS_Q][P::TILES][T * TILE];
  };
  float q_scales[P::ROWS], squares[T * INNER_WARPS];
  uint32_t most[T * INNER_WARPS];
  float x_scale[T], q_scale[T];
  // q_nope: with SPLIT 2 a set from each CTA of the cluster, else one. The tokens' rows share no bank.
  static constexpr int SETS = P::SPLIT == 2 ? 2 : 1;
  alignas(SETS == 2 ? 4 : 16) uint32_t nope[SETS][T][NOPE / SETS / 2 + 4];
  uint64_t full[P::STAGES], empty[P::STAGES], published, handed;
};

// A pair as fp16, times `by`.
__device__ __forceinline__ uint32_t raised(uint32_t pair, float by) {
  const float2 f = widen(pair);
  const __half2 h = __floats2half2_rn(f.x * by, f.y * by);
  return *reinterpret_cast<const uint32_t*>(&h);
}

// to[token * TILE + g] = the sums of row g of a tile.
template <int T>
__device__ __forceinline__ void store(const stream::Sums<4>& acc, float* to, float lowered = 1) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float even = acc.d[0][0][i] + acc.d[1][0][i], odd = acc.d[0][0][2 + i] + acc.d[1][0][2 + i];
    float v = even + __shfl_xor_sync(~0u, odd, 2);
    v *= __shfl_sync(~0u, lowered, (2 * t + i) % 4 * 4);
    if (2 * t + i < T) to[(2 * t + i) * TILE + g] = v;
  }
}

// Per lane: the sum, in the order of ranks, of all ranks' rounded `own`. NaN if a peer's part does not arrive.
__device__ __forceinline__ float4 sum_of_ranks(const Peers& peers, const float4& own, int token, int quad,
                                               const Turn& turn) {
  const uint32_t epoch = turn.before + 1;
  const bool patient = turn.failed == 0;
  const int at = BEFORE_WORDS + token * TOKEN_WORDS + quad, rank = peers.rank, ranks = peers.ranks;
  const uint4 out = make_uint4(narrow(own.x, own.y), epoch, narrow(own.z, own.w), epoch);
  uint4 got[MAX_RANKS];
#pragma unroll
  for (int r = 0; r < MAX_RANKS; r++) {
    got[r] = out;
    if (r >= ranks || r == rank) continue;
    send(peers.word(r, rank, epoch, at), out);
    got[r].y = ~epoch;
  }
  uint64_t begin = 0;
  for (int polls = 1;; polls++) {
    int missing = -1;
#pragma unroll
    for (int r = 0; r < MAX_RANKS; r++) {
      if (!arrived_word(got[r], epoch)) got[r] = look(peers.word(rank, r, epoch, at));
    }
#pragma unroll
    for (int r = 0; r < MAX_RANKS; r++) {
      if (!arrived_word(got[r], epoch)) missing = r;
    }
    if (missing < 0) break;
    if (too_long(peers, polls, begin, patient)) {
      if (patient) report(peers, missing);
      const float nan = __uint_as_float(NAN_PAIR);
      return make_float4(nan, nan, nan, nan);
    }
  }
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int r = 0; r < MAX_RANKS; r++) {
    if (r >= ranks) break;
    const float2 low = widen(got[r].x), high = widen(got[r].z);
    sum.x += low.x, sum.y += low.y, sum.z += high.x, sum.w += high.y;
  }
  return sum;
}

// A warp adds a token's x to this CTA's piece of the residual and publishes the sum times the norm's weights, of which
// each lane that `publishes` holds four (`weight`).
template <typename W, bool EXCHANGES>
__device__ __forceinline__ void publish_piece(const Args& a, uint64_t& published, int turn, int token, uint2 weight,
                                           bool publishes) {
  const int lane = threadIdx.x % 32;
  float squares = 0;
  const Turn exchange = EXCHANGES ? turn_of(a.peers, token) : Turn{};
  if (publishes) {
    const int quad = blockIdx.x * PIECE + lane;
    uint2* mine = reinterpret_cast<uint2*>(a.residual) + token * QUADS + quad;
    const uint2 old = __ldcg(mine);
    float4 sum = sum_of_parts(a, token, quad);
    if (EXCHANGES) sum = sum_of_ranks(a.peers, sum, token, quad, exchange);
    const float2 c = widen(old.x), d = widen(old.y);
    const uint2 fresh = make_uint2(narrow(c.x + sum.x, c.y + sum.y), narrow(d.x + sum.z, d.y + sum.w));
    const uint2 y = make_uint2(times(fresh.x, weight.x), times(fresh.y, weight.y));
    const int at = place_of<W>(quad * 4) / 2;
    publish(a.mailbox->x, turn, token, at, y.x), publish(a.mailbox->x, turn, token, at + 4, y.y);
    squares = squares_of(fresh.x, fresh.y);
    *mine = fresh;
  }
  __syncwarp();
  squares = warp_sum(squares);
  if (lane == 0) {
    if (blockIdx.x < PIECES) publish(a.mailbox->pieces, turn, token, blockIdx.x, __float_as_uint(squares));
    barrier_arrive(&published);
    if (EXCHANGES) *count_of(a.peers, token) = exchange.before + 1;
  }
}

// Reads from the mailbox what this lane multiplies: 8 values of a block of x for each slot of qkv_a.
// lowered, for e4m3 weights: factor of the sums of this lane's token in this warp.
template <typename W, int T, typename Shared, int A_SLOTS>
__device__ __forceinline__ void take_x(const Args& a, Shared& shared, int turn, uint4 (&x)[A_SLOTS], float& lowered) {
  constexpr int APART = WARPS * stream::BLOCK / 2;  // words
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t* from = a.mailbox->x[turn][min(g % 4, T - 1)] + warp * (stream::BLOCK / 2) + t * 8 + g / 4 * 4;
  barrier_wait(&shared.published, 0);  // polling earlier slows down the CTAs that publish
#pragma unroll
  for (int n = 0; n < A_SLOTS; n++) x[n] = glance16(from + n * APART);
  if (warp >= WARPS - T) {
    const int token = WARPS - 1 - warp;
    const uint4 v = seen(a.mailbox->pieces[turn][token] + lane * 4);
    __syncwarp();
    const float squares = warp_sum(__uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) +
                                   __uint_as_float(v.w));
    if (lane == 0) shared.x_scale[token] = rsqrtf(squares / HIDDEN + a.eps);
  }
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int n = 0; n < A_SLOTS; n++) {
      if (misses(x[n])) x[n] = glance16(from + n * APART), missing = true;
    }
  } while (missing);
  __syncwarp();
#pragma unroll
  for (uint4& v : x) v = inverted(v);
  if (W::BYTES == 1) {
    uint32_t most = 0;
#pragma unroll
    for (const uint4& v : x) {
      for (uint32_t pair : {v.x, v.y, v.z, v.w}) most = max(most, max((pair & 0x7fff) << 16, pair & 0x7fff0000));
    }
#pragma unroll
    for (int other : {1, 2, 16}) most = max(most, __shfl_xor_sync(~0u, most, other));
    const uint32_t exponent = stream::raise_exponent(most);
    const float raise = stream::power_of_two(exponent);
    lowered = stream::power_of_two(254 - exponent);
#pragma unroll
    for (uint4& v : x) {
      for (uint32_t* pair : {&v.x, &v.y, &v.z, &v.w}) *pair = raised(*pair, raise);
    }
  }
}

// acc += a block of a tile times this lane's part of x. w: this lane's first bytes of its row of the block.
__device__ __forceinline__ void multiply(stream::Sums<4>& acc, const uint8_t* w, const uint4& x, Bf16) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const uint4 v = *reinterpret_cast<const uint4*>(w + n * 64);
    const uint32_t a[4] = {v.x, v.y, v.z, v.w};
    mma(acc.d[n][0], a, n ? x.z : x.x, n ? x.w : x.y, bf16());
  }
}
__device__ __forceinline__ void multiply(stream::Sums<4>& acc, const uint8_t* w, const uint4& x, E4m3) {
  const uint4 v = *reinterpret_cast<const uint4*>(w);
  const uint2 h[4] = {e4m3::halves(v.x), e4m3::halves(v.y), e4m3::halves(v.z), e4m3::halves(v.w)};
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const uint32_t a[4] = {h[2 * n].x, h[2 * n].y, h[2 * n + 1].x, h[2 * n + 1].y};
    mma(acc.d[n][0], a, n ? x.z : x.x, n ? x.w : x.y, __half());
  }
}

// A warp writes a token's cache row.
__device__ __forceinline__ void write_new_row(const Args& a, int turn, int token, const uint4 (&kv_norm)[2]) {
  const int lane = threadIdx.x % 32;
  const uint32_t* from = a.mailbox->qkv[turn][token] + INNER / 2;
  NewRow row;
#pragma unroll
  for (int i = 0; i < 2; i++) row.latent[i] = seen(from + i * 128 + lane * 4);
  const uint4 keys = seen(from + LATENT / 2 + lane / 4 * 4);
  __syncwarp();
  row.key = lane % 2 ? (lane % 4 > 1 ? keys.w : keys.y) : lane % 4 > 1 ? keys.z : keys.x;
  write_row(a.rows, token, row, kv_norm);
}

template <typename W, int T, bool EXCHANGES, int SPLIT>
__global__ __launch_bounds__(THREADS, 1) void mla_pre_attention_mma_kernel(const __grid_constant__ Args a) {
  using P = Plan<W, T, SPLIT>;
  using Value = typename W::Value;
  using X = stream::Sums<4>;
  constexpr bool RAISED = W::BYTES == 1;
  constexpr int CHUNKS = SHARE * W::BYTES / 64;
  extern __shared__ __align__(128) uint8_t memory[];
  Value* qs = reinterpret_cast<Value*>(memory + P::RING);
  __shared__ Shared<P, T> shared;
  constexpr int NOPE_ROWS = P::NOPE_ROWS, ROPE_ROWS = P::ROPE_ROWS, ROWS = P::ROWS, COLUMNS = P::COLUMNS;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tid = threadIdx.x, cta = blockIdx.x, head = cta / SPLIT, rank = SPLIT == 2 ? cluster_rank() : cta % SPLIT;
  const bool has_head = head < a.H;
  make_barriers<P>(shared, warp == WARPS, T);
  if (warp == WARPS) {
    copy<P>(a, shared, memory);
    __syncwarp();
    wait_for_predecessor();
    return;
  }
  // Small loads before the weights: loads return in order of issue.
  const bool publishes = warp < T && lane < PIECE && cta * PIECE + lane < QUADS;
  constexpr int Q_ALL = T * OCTETS, Q_EACH = (Q_ALL + CONSUMERS - 1) / CONSUMERS;  // octets of q_a: all, per thread
  uint2 weight = make_uint2(0, 0);
  uint4 q_weight[Q_EACH];
  if (publishes) weight = __ldg(reinterpret_cast<const uint2*>(a.norm) + cta * PIECE + lane);
#pragma unroll
  for (int n = 0; n < Q_EACH; n++) {
    const int octet = tid + n * CONSUMERS;
    if (octet < Q_ALL) q_weight[n] = __ldg(reinterpret_cast<const uint4*>(a.q_norm) + octet % OCTETS);
  }
  // This lane of the first warp publishes the results of a pair of rows of qkv_a for one token.
  const int published_token = lane / (TILE / 2) % T;
  const int published_row = (cta + lane / (TILE / 2 * T) * CTAS) * TILE + lane % 4 * 2;
  const bool writes = warp == 0 && lane < TILES_A * T * (TILE / 2);
  float2 scale = make_float2(1, 1);
  if (RAISED && writes) scale = *reinterpret_cast<const float2*>(a.scale_a + published_row);
  const bool scaled = RAISED && has_head && tid < ROWS;
  const int own_row = tid < NOPE_ROWS ? rank * NOPE_ROWS + tid : NOPE + rank * ROPE_ROWS + tid - NOPE_ROWS;
  const float row_scale = scaled ? a.scale_q[head * (NOPE + ROPE) + own_row] : 1;
  uint4 kv_norm[2];
  if (cta == SPLIT * a.H && warp < T) {
#pragma unroll
    for (int i = 0; i < 2; i++) kv_norm[i] = *reinterpret_cast<const uint4*>(a.rows.norm + i * 256 + lane * 8);
  }
  wait_for_predecessor();
  let_successor_start();
  const uint32_t launch = *reinterpret_cast<const volatile uint32_t*>(&a.mailbox->launches);
  const int turn = launch % 2;
  float cosine = 0, sine = 0;
  const int rotating = warp - T;  // the token of which this warp rotates q_pe
  const bool rotates = rotating >= 0 && rotating < T && lane < ROPE_ROWS / 2;
  if (rotates && has_head) {
    const int angle = rotating * (ROPE / 2) + rank * ROPE_ROWS / 2 + lane;
    cosine = a.rows.cos[angle], sine = a.rows.sin[angle];
  }
  if (warp < T) publish_piece<W, EXCHANGES>(a, shared.published, turn, warp, weight, publishes);
  uint4 x[P::A_SLOTS];
  float lowered = 1;
  take_x<W, T>(a, shared, turn, x, lowered);
  if (scaled) shared.q_scales[tid] = row_scale;

  int stage = 0, phase = 0;
  const auto release = [&] {
    __syncwarp();
    if (elected()) barrier_arrive(&shared.empty[stage]);
    if (++stage == P::STAGES) stage = 0, phase ^= 1;
  };
  {
    const uint8_t* mine = memory + g * P::PITCH_A + warp * stream::BLOCK * W::BYTES + 16 * t;
    X acc[TILES_A];
#pragma unroll
    for (int n = 0; n < P::A_SLOTS; n++) {
      barrier_wait(&shared.full[stage], phase);
#pragma unroll
      for (int tile = 0; tile < TILES_A; tile++) {
        multiply(acc[tile], mine + stage * P::SLOT + tile * TILE * P::PITCH_A, x[n], W());
      }
      release();
    }
#pragma unroll
    for (int tile = 0; tile < TILES_A; tile++) store<T>(acc[tile], shared.a_sums[warp][tile], lowered);
  }
  if (warp == 0) {
    named_sync(2, CONSUMERS);
    if (writes) {
      float v[2] = {0, 0};
#pragma unroll
      for (int s = 0; s < WARPS; s++) {
        const float2 f = *reinterpret_cast<const float2*>(&shared.a_sums[s][0][lane * 2]);
        v[0] += f.x, v[1] += f.y;
      }
      const float f = shared.x_scale[published_token];
      publish(a.mailbox->qkv, turn, published_token, published_row / 2,
              narrow(v[0] * (f * scale.x), v[1] * (f * scale.y)));
    }
    __syncwarp();
  } else {
    asm volatile("bar.arrive 2, %0;" ::"n"(CONSUMERS) : "memory");
  }
  if (!has_head) {
    if (cta == SPLIT * a.H && warp < T) write_new_row(a, turn, warp, kv_norm);
    return;
  }

  {
    const auto at = [&](int n) {  // the words of a thread's octet n
      const int octet = tid + n * CONSUMERS, token = octet / OCTETS;
      return a.mailbox->qkv[turn][token] + (octet - token * OCTETS) * 4;
    };
    uint4 v[Q_EACH];
#pragma unroll
    for (int n = 0; n < Q_EACH; n++) {
      if (tid + n * CONSUMERS < Q_ALL) v[n] = glance16(at(n));
    }
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int n = 0; n < Q_EACH; n++) {
        if (tid + n * CONSUMERS < Q_ALL && misses(v[n])) v[n] = glance16(at(n)), missing = true;
      }
    } while (missing);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Q_EACH; n++) {
      if (tid + n * CONSUMERS >= Q_ALL) continue;
      uint4& y = v[n];
      y = inverted(y);
      const float squares = warp_sum(squares_of(y.x, y.y) + squares_of(y.z, y.w));
      const uint4& w = q_weight[n];
      y = make_uint4(times(y.x, w.x), times(y.y, w.y), times(y.z, w.z), times(y.w, w.w));
      const uint32_t most = RAISED ? max(most_of(y.x, y.y), most_of(y.z, y.w)) : 0;
      if (lane == 0) shared.squares[warp + n * WARPS] = squares, shared.most[warp + n * WARPS] = most;
    }
    if (RAISED) meet();
#pragma unroll
    for (int n = 0; n < Q_EACH; n++) {
      const int octet = tid + n * CONSUMERS, token = octet / OCTETS;
      if (octet >= Q_ALL) continue;
      uint32_t pairs[4] = {v[n].x, v[n].y, v[n].z, v[n].w};
      if (RAISED) {
        const uint32_t most = lane < INNER_WARPS ? shared.most[token * INNER_WARPS + lane] : 0;
        const float raise = stream::power_of_two(stream::raise_exponent(__reduce_max_sync(~0u, most)));
#pragma unroll
        for (uint32_t& pair : pairs) pair = raised(pair, raise);
      }
      auto* to = reinterpret_cast<uint2*>(qs + token * P::Q_PITCH + place_of<W>((octet - token * OCTETS) * 8));
      to[0] = make_uint2(pairs[0], pairs[2]);
      to[2] = make_uint2(pairs[1], pairs[3]);
    }
  }
  meet();
  if (cta == 0 && tid == 0) a.mailbox->launches = launch + 1;
  if (tid == 0) barrier_expect(&shared.handed, T * NOPE * 2);
  if (warp == WARPS - 1 && lane < T) {
    float squares = 0;
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < INNER_WARPS; n++) {
      squares += shared.squares[lane * INNER_WARPS + n], most = max(most, shared.most[lane * INNER_WARPS + n]);
    }
    const float f = rsqrtf(squares / INNER + a.rows.eps);
    shared.q_scale[lane] = RAISED ? f * stream::power_of_two(254 - stream::raise_exponent(most)) : f;
  }
  __syncwarp();
  {
    const Value* x[1] = {X::from(qs, P::Q_PITCH, T, 0) + warp % KS_Q * SHARE};
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
      if (P::TILES % GROUPS_Q == 0 || tile < P::TILES) store<T>(acc, shared.q_sums[warp % KS_Q][tile]);
    }
  }
  meet();
  // Rows n and n + 1 of this CTA's part of a token's q, rounded to bf16 like the projection's output.
  const auto pair = [&](int token, int n) {
    float v[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < KS_Q; k++) {
      const float2 f = *reinterpret_cast<const float2*>(&shared.q_sums[k][n / TILE][token * TILE + n % TILE]);
      v[0] += f.x, v[1] += f.y;
    }
    if (RAISED) v[0] *= shared.q_scales[n], v[1] *= shared.q_scales[n + 1];
    return narrow(v[0] * shared.q_scale[token], v[1] * shared.q_scale[token]);
  };
  const auto out = [&](int token) { return a.out + (token * a.H + head) * WIDTH; };
  if (SPLIT > 2) {
    const int at = head * (NOPE / 2) + rank * (NOPE_ROWS / 2) + lane;
    if (warp < T && lane < NOPE_ROWS / 2) publish(a.mailbox->nope, turn, warp, at, pair(warp, lane * 2));
  } else if (warp < T) {
    const uint32_t v = pair(warp, lane * 2);
#pragma unroll
    for (int to = 0; to < 2; to++) hand_on(&shared.nope[rank][warp][lane], &shared.handed, to, v);
  }
  if (rotates) {
    uint32_t* to = reinterpret_cast<uint32_t*>(out(rotating) + LATENT + rank * ROPE_ROWS) + lane;
    *to = rotate(pair(rotating, NOPE_ROWS + lane * 2), cosine, sine);
  }

  float d[2][4] = {};
  if constexpr (SPLIT > 2) {
    const int token = WARPS - 1 - warp, columns = warp % (COLUMNS / 16) * 16, first = warp / (COLUMNS / 16);
    if (token < T && lane < NOPE / 8) {
      const uint4 v = seen(a.mailbox->nope[turn][token] + head * (NOPE / 2) + lane * 4);
      *reinterpret_cast<uint4*>(&shared.nope[0][token][lane * 4]) = v;
    }
    __syncwarp();
    meet();
#pragma unroll
    for (int n = 0; n < P::UK_SLOTS; n++) {
      barrier_wait(&shared.full[stage], phase);
      const uint32_t* q = shared.nope[0][min(g, T - 1)] + n * (P::ROWS_UK / 2) + t;
      const uint8_t* from = memory + stage * P::SLOT + (lane / 16 * 8 + lane % 8) * P::PITCH_UK +
                            (columns + lane / 8 % 2 * 8) * 2;
#pragma unroll
      for (int i = 0; i < P::ROWS_UK / 16; i += P::KS_UK) {
        const int step = i + first;
        uint32_t weights[4];
        load_matrices<true>(weights, from + step * 16 * P::PITCH_UK);
        mma(d[i / P::KS_UK % 2], weights, q[step * 8], q[step * 8 + 4], bf16());
      }
      if (++stage == P::STAGES) stage = 0, phase ^= 1;
    }
    float4* left = reinterpret_cast<float4*>(qs) + (warp - COLUMNS / 16) * 32 + lane;  // qs is free: q_b is multiplied
    if (first > 0) *left = make_float4(d[0][0] + d[1][0], d[0][1] + d[1][1], d[0][2] + d[1][2], d[0][3] + d[1][3]);
    meet();
    if (first > 0) return;
#pragma unroll
    for (int s = 1; s < P::KS_UK; s++) {
      const float4 v = left[s * (COLUMNS / 16) * 32];
      d[0][0] += v.x, d[0][1] += v.y, d[0][2] += v.z, d[0][3] += v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int to = 2 * t + i % 2;
      if (to < T) out(to)[rank * COLUMNS + columns + g + i / 2 * 8] = __float2bfloat16(d[0][i] + d[1][i]);
    }
    return;
  }

  // Each warp multiplies 16 columns of W_UK, first by this CTA's half of q_nope.
  barrier_wait(&shared.handed, 0);
#pragma unroll
  for (int n = 0; n < P::UK_SLOTS; n++) {
    barrier_wait(&shared.full[stage], phase);
    const int of = n < P::UK_LOCAL ? rank : rank ^ 1;
    const uint32_t* q = shared.nope[of][min(g, T - 1)] + n % P::UK_LOCAL * (P::ROWS_UK / 2) + t;
    const uint8_t* from = memory + stage * P::SLOT + (lane / 16 * 8 + lane % 8) * P::PITCH_UK +
                          (warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int step = 0; step < P::ROWS_UK / 16; step++) {
      uint32_t weights[4];
      load_matrices<true>(weights, from + step * 16 * P::PITCH_UK);
      mma(d[step % 2], weights, q[step * 8], q[step * 8 + 4], bf16());
    }
    if (++stage == P::STAGES) stage = 0, phase ^= 1;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 2 * t + i % 2;
    if (token < T) out(token)[rank * COLUMNS + warp * 16 + g + i / 2 * 8] = __float2bfloat16(d[0][i] + d[1][i]);
  }
}

}  // namespace

// As mla_pre_attention_t1, for T of 2 to 4. mailbox: 224 KB, zero at first, one per stream, T and H.
API int mla_pre_attention_mma(void* residual, const void* x, int64_t parts, int64_t wide, const void* norm, float eps,
                      const void* w_a, const void* scale_a, const void* q_norm, const void* w_q, const void* scale_q,
                      const void* kv_norm, const void* cos, const void* sin, void* cache, int64_t slots, int64_t packed,
                      const void* slot, float norm_eps, const void* w_uk, void* out, void* mailbox, int64_t T, int64_t H,
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
               new_rows(nullptr, 0, kv_norm, cos, sin, cache, slots, packed, slot, T, norm_eps),
               static_cast<const bf16*>(w_uk),
               static_cast<bf16*>(out),
               static_cast<Mailbox*>(mailbox),
               static_cast<int>(H),
               eps,
               peers == nullptr ? Peers{} : *peers};
  const auto start = [&](auto kind) {
    using W = decltype(kind);
    const auto of = [&](auto tokens) {
      constexpr int N = decltype(tokens)::value;
      const auto with = [&](auto kernel, int shared, int cluster) {
        return launch(kernel, dim3(CTAS), dim3(THREADS), shared, stream, cluster, a);
      };
      if (peers == nullptr) return with(mla_pre_attention_mma_kernel<W, N, false, 2>, Plan<W, N, 2>::SHARED, 2);
      return H <= 16 ? with(mla_pre_attention_mma_kernel<W, N, true, 8>, Plan<W, N, 8>::SHARED, 1)
                     : with(mla_pre_attention_mma_kernel<W, N, true, 4>, Plan<W, N, 4>::SHARED, 1);
    };
    if (peers != nullptr && H > MOST_SPLIT_HEADS) return -1;
    switch (T) {
      case 2: return of(std::integral_constant<int, 2>());
      case 3: return of(std::integral_constant<int, 3>());
      default: return of(std::integral_constant<int, 4>());
    }
  };
  return scale_a == nullptr ? start(Bf16()) : start(E4m3());
}
