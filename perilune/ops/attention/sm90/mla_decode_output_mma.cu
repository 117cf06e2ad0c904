// As mla_decode_output_t1.cu, which explains mailboxes and waits, for 1 to 4 tokens of a rank with 8 or 16 heads and
// e4m3 weights. Contract in mla_decode_output.py. With so few heads, a CTA's rows of w fit into its shared memory.
//
//   1. The first OWNERS CTAs compute the values (ranges combined, times W_UV) of a head, or of a part of its columns,
//      and write them to the mailbox. They have no rows of w: the copies of w could start only once W_UV has been read.
//   2. The other CTAs have copied their rows of w by then, a tile of 8 whole rows per two warps. They poll the mailbox
//      and multiply. They load scales and the launch counter before they poll.
// From attention's end on, three round trips through L2 (ranges; mailbox written; mailbox read), with peers two more.
//
// A CTA claims so much shared memory that no SM holds two; with one token, it leaves room for a CTA of attention
// (split_kv_short.cuh). CTAs wait only for the first OWNERS CTAs of their launch, which wait for none.
#include "attention/sm90/output_tile.cuh"
#include "attention/sm90/split_kv_schedule.cuh"
#include "cuda/router_mailbox.cuh"

using namespace stream;

namespace {

constexpr int OWNERS = 16, THREADS = WARPS * 32;
constexpr int TILES = WARPS / 2;     // max tiles of a CTA: two warps share one
constexpr int OPEN = TILES / 2;      // max tiles of w in flight: more would delay what attention reads
constexpr int MOST_RANGES = 160;     // max ranges of a token
constexpr int STEP = 32;             // latents that share a scale and one product with W_UV
constexpr int LATENT_PITCH = mla::LATENT + 8;
constexpr int CLAIMED = 116 * 1024;  // more than half of an SM's shared memory
constexpr int OF_TILE = 1;           // first of the named barriers of tiles' warp pairs

struct Args {
  const bf16* partials;  // the ranges' outputs, as attention writes them
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
  int ctas, B, T, D, least;
  Peers peers;            // ranks 0: none
};

// TOKENS: max tokens, 1 or 4.
template <int HEADS, int TOKENS>
struct Plan {
  static constexpr int I = HEADS * mla::VALUE, WORDS = TOKENS * I / 2;
  static constexpr int COLUMNS = mla::VALUE * HEADS / OWNERS;  // values of an owner
  static constexpr int PIECES = COLUMNS / 16, PARTS = WARPS / PIECES, STEPS = mla::LATENT / STEP / PARTS;
  static constexpr int LATENTS = mla::LATENT * TOKENS / WARPS;                 // latents that a warp combines
  static constexpr int LANES = LATENTS / 8, SIDES = 32 / LANES;                // lanes per range; ranges side by side
  static constexpr int AT_ONCE = 8 / (TOKENS == 1 ? 2 : 1);                    // ranges that a lane reads together
  using S = Stage<I>;                                                          // a tile
  static constexpr int VALUES = mla::LATENT * COLUMNS;                         // bytes of an owner's part of W_UV
  static constexpr int OWNER_BYTES = VALUES + TOKENS * LATENT_PITCH * 2 + WARPS * MOST_RANGES * 4;
  static constexpr int TILE_BYTES = TILES * S::BYTES + TOKENS * pitch_of(I) * 2;
  static constexpr int BYTES = TILE_BYTES > CLAIMED ? TILE_BYTES : CLAIMED;
  static_assert(OWNERS % HEADS == 0 && PIECES * PARTS == WARPS && MOST_RANGES % (SIDES * AT_ONCE) == 0);
  static_assert(OWNER_BYTES <= BYTES && VALUES % 64 == 0 && I % BLOCK == 0);
};

struct Shared {
  float uv_scale[mla::VALUE];
  float lowered[4][32];               // factor of sums, per token and per group of values or latents
  float sums[2][TILES][4 * TILE];     // of either half of k
  float products[4 * 4 * mla::VALUE / 2];
  mla::Found found[4];
  uint64_t full[TILES];
};

// turn: number of launches before this one; epoch: of the exchange with peers. `taken` advances both counters, after
// all threads of the CTA have read them.
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

template <int HEADS, int TOKENS, bool EXCHANGES>
__device__ __forceinline__ void make_values(const Args& a, Shared& shared, uint8_t* memory) {
  using P = Plan<HEADS, TOKENS>;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x * HEADS / OWNERS, from = blockIdx.x * P::COLUMNS % mla::VALUE;
  __half* latents = reinterpret_cast<__half*>(memory + P::VALUES);
  float* shares = reinterpret_cast<float*>(latents + TOKENS * LATENT_PITCH) + warp * MOST_RANGES;
  // Address of the 16-byte `piece` of row k, swizzled: the eight rows that ldmatrix reads together share no bank.
  const auto values = [&](int k, int piece) {
    const int spread = P::PIECES == 8 ? (k & 1) | (k >> 2 & 6) : k >> 3 & 3;
    return memory + (k * P::PIECES + (piece ^ spread)) * 16;
  };
#pragma unroll
  for (int n = 0; n < mla::LATENT * P::PIECES / THREADS; n++) {
    const int i = n * THREADS + threadIdx.x, k = i / P::PIECES, piece = i % P::PIECES;
    copy16_once(values(k, piece), a.w_uv + (head * mla::LATENT + k) * mla::VALUE + from + piece * 16);
  }
  if (threadIdx.x < P::COLUMNS / 4) {
    copy16(shared.uv_scale + threadIdx.x * 4, a.uv_scale + head * mla::VALUE + from + threadIdx.x * 4);
  }
  copies_commit();
  if (warp == 0) mla::share_work<true>(a.query_start, a.context, a.B, HEADS, a.ctas, a.least, shared.found, 0, a.T);
  __syncthreads();

  // A warp combines the ranges' outputs for LATENTS latents of a token.
  const int token = warp * TOKENS / WARPS, column = warp * P::LATENTS % mla::LATENT + lane % P::LANES * 8;
  const int side = lane / P::LANES;
  const mla::Found f = token < a.T ? shared.found[token] : mla::Found{};
  const int at = f.index * HEADS + head, slot = f.first + at / mla::ROWS * f.ranges, row = at % mla::ROWS;
  const int ranges = min(f.ranges, MOST_RANGES);
  const float* weight = a.weights + row * a.ctas + slot;
  const bf16* partial = a.partials + static_cast<int64_t>(slot) * mla::PARTIAL + column / 64 * (mla::ROWS * 64) +
                        row * 64 + ((column / 8) % 8 ^ (row & 7)) * 8;
  wait_for_predecessor();
  let_successor_start();
  const Turn<EXCHANGES> turn(a, P::WORDS);
  uint4 x[P::AT_ONCE];
  float v[MOST_RANGES / 32], sum[8] = {};
  const auto read = [&](int first) {
#pragma unroll
    for (int j = 0; j < P::AT_ONCE; j++) {
      const int s = first + side + j * P::SIDES;
      x[j] = s < ranges ? *reinterpret_cast<const uint4*>(partial + static_cast<int64_t>(s) * mla::PARTIAL) : uint4{};
    }
  };
#pragma unroll
  for (int j = 0; j < MOST_RANGES / 32; j++) v[j] = lane + j * 32 < ranges ? weight[lane + j * 32] : -INFINITY;
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
}

template <int HEADS, int TOKENS, bool EXCHANGES>
__device__ __forceinline__ void multiply_tiles(const Args& a, Shared& shared, uint8_t* memory) {
  using P = Plan<HEADS, TOKENS>;
  using S = typename P::S;
  constexpr int PITCH = pitch_of(P::I), TOKEN = P::I / 8;  // TOKEN: pieces of 8 values per token
  constexpr int EACH = (TOKENS * TOKEN + THREADS - 1) / THREADS, HALF = P::I / BLOCK / 2;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int T = TOKENS == 1 ? 1 : a.T;
  const int slot = warp / 2, half = warp % 2, tile = blockIdx.x - OWNERS + slot * (gridDim.x - OWNERS);
  const bool real = tile < a.D / TILE;
  __half* xs = reinterpret_cast<__half*>(memory + TILES * S::BYTES);
  const int row = tile * TILE + lane % TILE;
  const float scale = half == 0 && real ? __ldg(a.scale + row) : 0;  // issued before w: memory answers in order
  if (half == 0 && real) {
    if (slot >= OPEN) barrier_wait(&shared.full[slot - OPEN], 0);  // that tile exists, because this one does
    if (elected()) {
      const uint8_t* from = a.w + static_cast<int64_t>(tile) * TILE * P::I;
      barrier_expect(&shared.full[slot], TILE * P::I);
#pragma unroll
      for (int row = 0; row < TILE; row++) {
        bulk_load_once(memory + slot * S::BYTES + S::place(row), from + row * P::I, P::I, &shared.full[slot]);
      }
    }
    __syncwarp();
  }
  wait_for_predecessor();
  let_successor_start();
  const Turn<EXCHANGES> turn(a, P::WORDS);

  // Copies the values from the mailbox to shared memory as fp16, with a scale per BLOCK values.
  {
    const auto piece = [&](int n) { return n * THREADS + static_cast<int>(threadIdx.x); };
    const auto needed = [&](int n) { return piece(n) < T * TOKEN; };
    const uint32_t* words = a.mailbox + (turn.turn & 1) * P::WORDS;
    uint4 v[EACH] = {};
    bool waits;
    do {
      waits = false;
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        if (needed(n) && mailbox::misses(v[n])) v[n] = mailbox::glance16(words + piece(n) * 4);
      }
#pragma unroll
      for (int n = 0; n < EACH; n++) waits |= needed(n) && mailbox::misses(v[n]);
    } while (__any_sync(~0u, waits));
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      if (!needed(n)) break;  // uniform within a warp
      const int token = piece(n) / TOKEN, k = piece(n) % TOKEN * 8;
      uint32_t pairs[4] = {~v[n].x, ~v[n].y, ~v[n].z, ~v[n].w}, most = 0;
      for (uint32_t pair : pairs) most = max(most, max((pair & 0x7fff) << 16, pair & 0x7fff0000));
      const uint32_t exponent = raise_exponent(most_of<BLOCK / 8>(most));
      const float by = power_of_two(exponent);
#pragma unroll
      for (uint32_t& pair : pairs) {
        const float2 f = widen(pair);
        pair = raised(f.x, f.y, by);
      }
      place<E4m3>(xs + token * PITCH, k, pairs);
      if (k % BLOCK == 0) shared.lowered[token][k / BLOCK] = power_of_two(254 - exponent);
    }
  }
  __syncthreads();
  turn.taken(a, P::WORDS);
  if (!real) return;
  Sent sent{tile};
  float old = 0;
  if (half == 0) {  // loaded now, used after the products
    if (EXCHANGES) sent.old = reinterpret_cast<const uint32_t*>(a.residual)[tile * (TILE / 2) + lane % 4];
    if (!EXCHANGES && TOKENS == 1 && a.residual != nullptr) old = __bfloat162float(a.residual[row]);
  }

  const __half* x = xs + min(g % 4, T - 1) * PITCH + half * HALF * BLOCK + t * 16 + g / 4 * 8;
  const uint8_t* w = memory + slot * S::BYTES + S::place(g) + half * HALF * BLOCK + t * 16;
  float acc[2] = {};
  barrier_wait(&shared.full[slot], 0);
#pragma unroll (EXCHANGES ? 2 : 4)
  for (int n = 0; n < HALF; n++) {
    Sums<4> d;
    const __half* of[1] = {x};
    d.add(*reinterpret_cast<const uint4*>(w + n * BLOCK), of, n * BLOCK, 0);
#pragma unroll
    for (int i = 0; i < 2; i++) {  // even pairs of k in lanes t = 0 and 1, odd ones in 2 and 3
      const float sum = t < 2 ? d.d[0][0][i] + d.d[1][0][i] : d.d[0][0][2 + i] + d.d[1][0][2 + i];
      acc[i] += sum * shared.lowered[(t * 2 + i) % TOKENS][half * HALF + n];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    acc[i] += __shfl_xor_sync(~0u, acc[i], 2);
    if (t * 2 + i < TOKENS) shared.sums[half][slot][(t * 2 + i) * TILE + g] = acc[i];
  }
  named_sync(OF_TILE + slot, 64);
  if (half != 0) return;
  const int token = TOKENS == 1 ? 0 : lane / TILE, at = token * TILE + lane % TILE;
  const float v = (shared.sums[0][slot][at] + shared.sums[1][slot][at]) * scale;
  uint32_t pair;
  if constexpr (EXCHANGES) {
    sent.send(a.peers, turn.epoch, v);
    pair = sent.added(a.peers, turn.epoch);
  } else {
    if (a.residual == nullptr) {
      if (lane < TILE * TOKENS && token < T) a.y[static_cast<int64_t>(token) * a.D + row] = __float2bfloat16(v);
      return;
    }
    const float sum = old + __bfloat162float(__float2bfloat16(v));
    const float low = __shfl_sync(~0u, sum, lane * 2 % TILE), high = __shfl_sync(~0u, sum, lane * 2 % TILE + 1);
    pair = narrow(low, high);
  }
  if (lane < TILE / 2) {
    const int of = tile * (TILE / 2) + lane;
    const uint32_t now = turn.turn & 1;
    mailbox::put(a.fresh + now * (a.D / 2) + of, mailbox::written(pair));
    reinterpret_cast<uint32_t*>(a.residual)[of] = pair;
    mailbox::put(a.fresh + (1 - now) * (a.D / 2) + of, 0);
  }
}

template <int HEADS, int TOKENS, bool EXCHANGES>
__global__ void __maxnreg__(TOKENS == 1 ? 56 : 96) output_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) Shared shared;
  if (threadIdx.x < TILES) barrier_init(&shared.full[threadIdx.x], 1);
  barriers_visible();
  __syncthreads();
  if (blockIdx.x < OWNERS) {
    make_values<HEADS, TOKENS, EXCHANGES>(a, shared, memory);
  } else {
    multiply_tiles<HEADS, TOKENS, EXCHANGES>(a, shared, memory);
  }
}

template <int HEADS, int TOKENS, bool EXCHANGES>
int start(const Args& a, int64_t sms, void* stream) {
  // As in mla_decode_output_t1.cu.
  auto kernel = output_kernel<HEADS, TOKENS, EXCHANGES>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return launch(kernel, dim3(static_cast<unsigned>(sms)), dim3(THREADS), Plan<HEADS, TOKENS>::BYTES, stream, 1, a);
}

template <int HEADS>
int choose(const Args& a, int64_t sms, void* stream) {
  if (a.T > 1) return start<HEADS, 4, false>(a, sms, stream);
  return a.peers.ranks ? start<HEADS, 1, true>(a, sms, stream) : start<HEADS, 1, false>(a, sms, stream);
}

}  // namespace

// As mla_decode_output, for T tokens (1 to 4) of H heads (8 or 16) with e4m3 weights. mailbox: H VALUE + 160 words for
// one token, 4 H VALUE + 160 for more, zero at first; one per stream, H, and kind (one token or more). sms: at most
// 160, with D / 8 at most 8 (sms - 16). residual, fresh: only for one token.
API int mla_decode_output_mma(const void* partials, const void* weights, const void* query_start, const void* context,
                                const void* w_uv, const void* uv_scale, const void* w, const void* scale,
                                void* mailbox, void* y, void* residual, void* fresh, int64_t ctas, int64_t B, int64_t T,
                                int64_t H, int64_t D, int64_t least, int64_t sms, const Peers* peers, void* stream) {
  const Args a{static_cast<const bf16*>(partials),
               static_cast<const float*>(weights),
               static_cast<const int*>(query_start),
               static_cast<const int*>(context),
               static_cast<const uint8_t*>(w_uv),
               static_cast<const float*>(uv_scale),
               static_cast<const uint8_t*>(w),
               static_cast<const float*>(scale),
               static_cast<uint32_t*>(mailbox),
               static_cast<bf16*>(y),
               static_cast<bf16*>(residual),
               static_cast<uint32_t*>(fresh),
               static_cast<int>(ctas),
               static_cast<int>(B),
               static_cast<int>(T),
               static_cast<int>(D),
               static_cast<int>(least),
               peers == nullptr ? Peers{} : *peers};
  if ((H != 8 && H != 16) || T < 1 || T > 4 || sms > MAX_CTAS || D / TILE > TILES * (sms - OWNERS)) return -1;
  return H == 8 ? choose<8>(a, sms, stream) : choose<16>(a, sms, stream);
}
