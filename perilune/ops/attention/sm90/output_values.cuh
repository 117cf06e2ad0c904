// Values of heads for mla_decode_output_mma.cu: attention's ranges, or the parts of a sharded KV cache, combined, times
// W_UV, written to a mailbox.
#pragma once
#include "attention/sm90/output_tile.cuh"
#include "attention/sm90/split_kv_schedule.cuh"
#include "cuda/router_mailbox.cuh"

namespace stream {

constexpr int VALUE_THREADS = WARPS * 32;
constexpr int MOST_RANGES = 160;  // max ranges of a token
constexpr int STEP = 32;          // latents that share a scale and one product with W_UV
constexpr int LATENT_PITCH = mla::LATENT + 8;

struct Args {
  // Outputs and log-sum-exps of ranges, as attention writes them; or, if SHARDED, those of `ctas` ranks' parts of the
  // KV cache, each [T, H, LATENT] and [T, H], part_step and weight_step elements apart (query_start, context: null).
  const bf16* partials;
  const float* weights;
  const int *query_start, *context;
  const uint8_t* w_uv;    // [H, LATENT, VALUE]
  const float* uv_scale;  // [H, VALUE]
  const uint8_t* w;       // [D, H VALUE]
  const float* scale;     // [D]
  uint32_t* mailbox;      // [2][tokens, H VALUE / 2] pairs of values; then the number of launches so far, per CTA
  bf16* y;                // [T, D]; null if there is a residual
  bf16* residual;         // [D], to which y is added; or null
  uint32_t* fresh;        // the residual's mailbox, [2][D / 2] pairs of the sums; or null
  int64_t part_step, weight_step;
  int ctas, B, T, D, least;
  Peers peers;            // ranks 0: none
};

// OWNERS CTAs compute the values of HEADS heads of at most TOKENS tokens (1 or 4). AT_ONCE: ranges that a lane reads
// together.
template <int HEADS, int TOKENS, int OWNERS, int AT_ONCE_>
struct ValuesPlan {
  static constexpr int I = HEADS * mla::VALUE, WORDS = TOKENS * I / 2;
  static constexpr int COLUMNS = mla::VALUE * HEADS / OWNERS;  // values of an owner
  static constexpr int PIECES = COLUMNS / 16, PARTS = WARPS / PIECES, STEPS = mla::LATENT / STEP / PARTS;
  static constexpr int LATENTS = mla::LATENT * TOKENS / WARPS;   // latents that a warp combines
  static constexpr int LANES = LATENTS / 8, SIDES = 32 / LANES;  // lanes per range; ranges side by side
  static constexpr int AT_ONCE = AT_ONCE_;
  static constexpr int VALUES = mla::LATENT * COLUMNS;           // bytes of an owner's part of W_UV
  static constexpr int SCRATCH = TOKENS * LATENT_PITCH * 2 + WARPS * MOST_RANGES * 4;
  static_assert(OWNERS % HEADS == 0 && PIECES * PARTS == WARPS && MOST_RANGES % (SIDES * AT_ONCE) == 0);
};

struct ValuesShared {
  float uv_scale[mla::VALUE];
  float lowered[4][32];  // factor of sums, per token and per STEP latents
  float products[4 * 4 * mla::VALUE / 2];
  mla::Found found[4];
};

// turn: number of launches before this one; epoch: that of the exchange with peers. `taken` advances both counters,
// once all threads of the CTA have read them.
template <bool EXCHANGES>
struct Turn {
  uint32_t turn, epoch;

  static __device__ __forceinline__ uint32_t* launches(const Args& a, int words) {
    return a.mailbox + 2 * words + blockIdx.x;
  }
  static __device__ __forceinline__ uint32_t* epochs(const Args& a) {
    return a.peers.control + AFTER_COUNTS + blockIdx.x;
  }
  __device__ __forceinline__ Turn(const Args& a, int words)
      : turn(mailbox::glance(launches(a, words))), epoch(EXCHANGES ? mailbox::glance(epochs(a)) + 1 : 0) {}
  __device__ __forceinline__ void taken(const Args& a, int words) const {
    if (threadIdx.x != 0) return;
    mailbox::put(launches(a, words), turn + 1);
    if (EXCHANGES) mailbox::put(epochs(a), epoch);
  }
};

// The maximum of v over `lanes` adjacent lanes.
template <int lanes>
__device__ __forceinline__ uint32_t most_of(uint32_t v) {
#pragma unroll
  for (int l = 1; l < lanes; l <<= 1) v = max(v, __shfl_xor_sync(~0u, v, l));
  return v;
}
__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(fabsf(v)); }
__device__ __forceinline__ uint32_t raised(float low, float high, float by) {
  const __half2 h = __floats2half2_rn(low * by, high * by);
  return *reinterpret_cast<const uint32_t*>(&h);
}

// Computes the values of this CTA, one of OWNERS. `memory`: P::VALUES bytes for W_UV; `scratch`: P::SCRATCH bytes.
// Every thread calls then() after it has issued its copies of W_UV. On return, all threads have finished reading both.
template <int HEADS, int TOKENS, int OWNERS, int AT_ONCE, bool EXCHANGES, bool SHARDED, typename Then>
__device__ __forceinline__ Turn<EXCHANGES> make_values(const Args& a, ValuesShared& shared, uint8_t* memory,
                                                       uint8_t* scratch, const Then& then) {
  using P = ValuesPlan<HEADS, TOKENS, OWNERS, AT_ONCE>;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x * HEADS / OWNERS, from = blockIdx.x * P::COLUMNS % mla::VALUE;
  __half* latents = reinterpret_cast<__half*>(scratch);
  float* shares = reinterpret_cast<float*>(latents + TOKENS * LATENT_PITCH) + warp * MOST_RANGES;
  // Address of the 16-byte `piece` of row k, swizzled: the eight rows that ldmatrix reads together share no bank.
  const auto values = [&](int k, int piece) {
    const int spread = P::PIECES == 8 ? (k & 1) | (k >> 2 & 6) : k >> 3 & 3;
    return memory + (k * P::PIECES + (piece ^ spread)) * 16;
  };
#pragma unroll
  for (int n = 0; n < mla::LATENT * P::PIECES / VALUE_THREADS; n++) {
    const int i = n * VALUE_THREADS + threadIdx.x, k = i / P::PIECES, piece = i % P::PIECES;
    copy16_once(values(k, piece), a.w_uv + (head * mla::LATENT + k) * mla::VALUE + from + piece * 16);
  }
  if (threadIdx.x < P::COLUMNS / 4) {
    copy16(shared.uv_scale + threadIdx.x * 4, a.uv_scale + head * mla::VALUE + from + threadIdx.x * 4);
  }
  copies_commit();
  then();
  if constexpr (!SHARDED) {
    if (warp == 0) mla::share_work<true>(a.query_start, a.context, a.B, HEADS, a.ctas, a.least, shared.found, 0, a.T);
    __syncthreads();
  }

  // A warp combines the ranges' outputs for LATENTS latents of a token.
  const int token = warp * TOKENS / WARPS, column = warp * P::LATENTS % mla::LATENT + lane % P::LANES * 8;
  const int side = lane / P::LANES;
  int ranges;
  const float* weight;
  const bf16* partial;
  if constexpr (SHARDED) {
    const int row = min(token, a.T - 1) * HEADS + head;
    ranges = token < a.T ? a.ctas : 0;
    weight = a.weights + row;
    partial = a.partials + row * mla::LATENT + column;
  } else {
    const mla::Found f = token < a.T ? shared.found[token] : mla::Found{};
    const int at = f.index * HEADS + head, slot = f.first + at / mla::ROWS * f.ranges, row = at % mla::ROWS;
    ranges = min(f.ranges, MOST_RANGES);
    weight = a.weights + row * a.ctas + slot;
    partial = a.partials + static_cast<int64_t>(slot) * mla::PARTIAL + column / 64 * (mla::ROWS * 64) + row * 64 +
              ((column / 8) % 8 ^ (row & 7)) * 8;
  }
  const int64_t part_step = SHARDED ? a.part_step : mla::PARTIAL, weight_step = SHARDED ? a.weight_step : 1;
  wait_for_predecessor();
  let_successor_start();
  const Turn<EXCHANGES> turn(a, P::WORDS);
  uint4 x[P::AT_ONCE];
  float v[MOST_RANGES / 32], sum[8] = {};
  const auto read = [&](int first) {
#pragma unroll
    for (int j = 0; j < P::AT_ONCE; j++) {
      const int s = first + side + j * P::SIDES;
      x[j] = s < ranges ? *reinterpret_cast<const uint4*>(partial + s * part_step) : uint4{};
    }
  };
#pragma unroll
  for (int j = 0; j < MOST_RANGES / 32; j++) {
    const int s = lane + j * 32;
    v[j] = s < ranges ? weight[s * weight_step] : -INFINITY;
  }
  read(0);
  float top = -INFINITY, total = 0;
#pragma unroll
  for (float w : v) top = fmaxf(top, w);
  top = warp_max(top);
#pragma unroll
  for (float& w : v) w = w == -INFINITY ? 0 : mla::power_of_two(w - top), total += w;
  total = warp_sum(total);
  const float inverse = total > 0 ? 1 / total : 0;
#pragma unroll
  for (int j = 0; j < MOST_RANGES / 32; j++) shares[lane + j * 32] = v[j] * inverse;
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < ranges;) {
#pragma unroll
    for (int j = 0; j < P::AT_ONCE; j++) {
      const float w = shares[first + side + j * P::SIDES];
      const uint32_t words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
      for (int l = 0; l < 4; l++) {
        const float2 y = widen(words[l]);
        sum[l * 2] += w * y.x;
        sum[l * 2 + 1] += w * y.y;
      }
    }
    first += P::AT_ONCE * P::SIDES;
    if (first < ranges) read(first);
  }
  uint32_t most = 0;
#pragma unroll
  for (float& y : sum) {
#pragma unroll
    for (int l = P::LANES; l < 32; l <<= 1) y += __shfl_xor_sync(~0u, y, l);
    y = __bfloat162float(__float2bfloat16(y));
    most = max(most, magnitude(y));
  }
  {  // to fp16, with a scale per STEP latents
    const uint32_t exponent = raise_exponent(most_of<STEP / 8>(most));
    const float by = power_of_two(exponent);
    if (side == 0) {
      *reinterpret_cast<uint4*>(latents + token * LATENT_PITCH + column) =
          make_uint4(raised(sum[0], sum[1], by), raised(sum[2], sum[3], by), raised(sum[4], sum[5], by),
                     raised(sum[6], sum[7], by));
      if (column % STEP == 0) shared.lowered[token][column / STEP] = power_of_two(254 - exponent);
    }
  }
  copies_wait<0>();
  __syncthreads();
  turn.taken(a, P::WORDS);

  // The tensor cores' A is W_UV: rows g and g + 8 of A are columns 2 g and 2 g + 1 of a piece; lane t holds 8 adjacent
  // latents of k. B: the tokens' latents.
  const int piece = warp % P::PIECES, part = warp / P::PIECES;
  float y[4] = {};
#pragma unroll 4
  for (int s = 0; s < P::STEPS; s++) {
    const int step = part * P::STEPS + s, r = lane % 8;
    uint32_t w[4];
    mla::load_matrices<true>(w, values(step * STEP + r / 2 * 8 + g / 2 * 2 + r % 2, piece));
    const uint4 b = *reinterpret_cast<const uint4*>(latents + g % TOKENS * LATENT_PITCH + step * STEP + t * 8);
    uint2 of[4];
#pragma unroll
    for (int j = 0; j < 4; j++) of[j] = e4m3::halves(__byte_perm(w[j], 0, 0x3120));
    const uint32_t low[4] = {of[0].x, of[0].y, of[1].x, of[1].y}, high[4] = {of[2].x, of[2].y, of[3].x, of[3].y};
    float d[4] = {};
    mma(d, low, b.x, b.y, __half());
    mma(d, high, b.z, b.w, __half());
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] += d[i] * shared.lowered[(t * 2 + i % 2) % TOKENS][step];
  }
#pragma unroll
  for (int i = 0; i < (TOKENS == 1 ? 1 : 2); i++) {
    const int of = TOKENS == 1 ? 0 : t * 2 + i;
    if (t * 2 + i < TOKENS) {
      float* to = shared.products + (part * TOKENS + of) * P::COLUMNS + piece * 16 + g * 2;
      *reinterpret_cast<float2*>(to) = make_float2(y[i], y[i + 2]);
    }
  }
  __syncthreads();
  const int pair = threadIdx.x % (P::COLUMNS / 2), written = threadIdx.x / (P::COLUMNS / 2);
  if (written < TOKENS) {
    const float2 uv_scale = *reinterpret_cast<const float2*>(shared.uv_scale + pair * 2);
    float2 value = {};
#pragma unroll
    for (int p = 0; p < P::PARTS; p++) {
      const float* of = shared.products + (p * TOKENS + written) * P::COLUMNS + pair * 2;
      const float2 product = *reinterpret_cast<const float2*>(of);
      value.x += product.x, value.y += product.y;
    }
    uint32_t* to = a.mailbox + written * (P::I / 2) + head * (mla::VALUE / 2) + from / 2 + pair;
    const uint32_t half = turn.turn & 1;
    if (written < a.T) {
      mailbox::put(to + half * P::WORDS, mailbox::written(narrow(value.x * uv_scale.x, value.y * uv_scale.y)));
    }
    mailbox::put(to + (1 - half) * P::WORDS, 0);  // clears the previous launch's word
  }
  return turn;
}

}  // namespace stream
