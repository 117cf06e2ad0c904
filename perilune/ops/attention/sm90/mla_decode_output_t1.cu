// One token: combines the outputs of attention's ranges, multiplies by W_UV, then by the output projection w, in one
// launch. Contract in mla_decode_output.py.
//
//   1. CTA h < H computes the values of head h (combine, W_UV) and writes them to a mailbox in global memory.
//   2. Every CTA polls the mailbox for all heads' values and multiplies them by its rows of w, as linear.cu does.
//   3. With a residual, y is added to it. The sums also go to a second mailbox, from which mla_decode_router_t1.cu and
//      the expert kernel read them.
//   4. With peers, each rank has some of the heads, so a tile of y is a partial sum. A warp sends its tile to the peers
//      at once. When all of a CTA's tiles are sent, each warp that sent one receives the peers' parts and adds them.
//   Reuse: launch n writes half n % 2 of both mailboxes, where 0 means "not written", and zeroes the other half: the
//   readers of launch n - 1 have ended.
//
// Two producer warps (ASKERS) issue the copies of W_UV and of the first stages of w before attention has ended, and
// keep only as many bytes in flight as saturate memory: more would delay loads of attention and of step 2.
// A CTA uses at most 166 KB and 48 registers per thread, so that an SM also has room for a CTA of attention
// (split_kv_short.cuh), then for one of the router.
//
// CTAs start in order and wait only for the first H CTAs of their launch, which compute their heads first. So two
// launches on one GPU always end; of three, each could occupy the SMs that another's first H CTAs need.
#include "attention/sm90/output_tile.cuh"
#include "attention/sm90/split_kv_schedule.cuh"
#include "cuda/router_mailbox.cuh"

using namespace stream;

namespace {

constexpr int KS = 8, GROUPS = WARPS / KS;  // warps that share a tile; tiles at once
constexpr int ASKERS = 2, ASKED = WARPS / ASKERS, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + ASKERS * 32;
constexpr int LATENTS = mla::LATENT / WARPS;      // latents of a head that a warp combines
constexpr int VALUES_OPEN = 4;                    // max copies of W_UV that a producer has in flight
constexpr int AT_ONCE = 5, SIDES = 8;             // loads in flight per lane, one range each; ranges per load of a warp
constexpr int MOST_RANGES = 160;
constexpr int ASIDE = LATENTS + MOST_RANGES + 4;  // floats of scratch per warp while a head is computed
constexpr int PIECES = 2;                         // max pieces of 8 values that a lane reads from the mailbox
constexpr int OF_HEAD = 14, OF_PART = 3;          // named barriers: of all consumers; first of those per part of k
static_assert(LATENTS == 32 && MOST_RANGES % (SIDES * AT_ONCE) == 0 && MOST_RANGES % 32 == 0);
static_assert(ASIDE % 4 == 0 && sizeof(mla::Found) == 16);

// ROW: bytes of a row in a stage, at most a warp's part of a row (256 bytes of 8 heads in bf16, 512 of 32 heads in
// e4m3). STAGES of a warp's ring. OPEN: max stages in flight until the values have arrived.
template <typename W>
struct Ring {
  static constexpr int ROW = 256, STAGES = 4, OPEN = 2;
};
template <>
struct Ring<E4m3> {
  static constexpr int ROW = 512, STAGES = 2, OPEN = 1;
};

struct Args {
  const bf16* partials;  // as in output_values.cuh
  const float* weights;
  const int *query_start, *context;
  const uint8_t* w_uv;    // [H, LATENT, VALUE]
  const float* uv_scale;  // [H, VALUE], of e4m3
  const uint8_t* w;       // [D, H VALUE]
  const float* scale;     // [D], of e4m3
  uint32_t* mailbox;        // [2][H VALUE / 2] pairs of values; then the number of CTAs launched so far, 64 bits
  bf16* y;                // [D]; null if there is a residual
  bf16* residual;         // [D], to which y is added; or null
  uint32_t* fresh;        // the residual's mailbox, [2][D / 2] pairs of the sums; or null
  int64_t part_step, weight_step;
  int ctas, B, H, D, least;
  Peers peers;            // ranks 0: none
};

// 8 adjacent weights as floats.
template <typename W>
__device__ __forceinline__ void eight(const uint8_t* from, float (&v)[8]) {
  const auto take = [&v](const float2(&pairs)[4]) {
#pragma unroll
    for (int n = 0; n < 4; n++) v[n * 2] = pairs[n].x, v[n * 2 + 1] = pairs[n].y;
  };
  if constexpr (W::BYTES == 1) {
    const uint2 w = *reinterpret_cast<const uint2*>(from);
    const uint2 low = e4m3::halves(w.x), high = e4m3::halves(w.y);
    const auto floats = [](const uint32_t& pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); };
    take({floats(low.x), floats(low.y), floats(high.x), floats(high.y)});
  } else {
    const uint4 w = *reinterpret_cast<const uint4*>(from);
    take({widen(w.x), widen(w.y), widen(w.z), widen(w.w)});
  }
}

// SHORT: a row of w is so short (8 heads) that a ring holds four tiles.
template <typename W, bool SHORT, bool EXCHANGES, bool SHARDED>
__global__ void __maxnreg__(48) output_kernel(const __grid_constant__ Args a) {
  using R = Ring<W>;
  using S = Stage<R::ROW>;
  using X = Sums<4>;
  using Value = typename W::Value;
  constexpr bool RAISED = W::BYTES == 1;
  constexpr int STAGES = R::STAGES, OWN = STAGES * S::BYTES;  // bytes of a warp's ring
  constexpr int VALUES = LATENTS * mla::VALUE * W::BYTES;     // bytes of a warp's part of W_UV, at the ring's end
  constexpr int EARLY = (OWN - VALUES) / S::BYTES;            // stages that do not overlap it
  static_assert(OWN >= VALUES && OWN % 64 == 0 && VALUES % 64 == 0);
  static_assert(WARPS * OWN > 114 * 1024);  // half an SM's memory: two CTAs on one SM would leave another SM idle
  extern __shared__ __align__(128) uint8_t memory[];
  Value* xs = reinterpret_cast<Value*>(memory + WARPS * OWN);
  __shared__ float sums[2][WARPS][4 * TILE];
  __shared__ __align__(16) float products[WARPS][mla::VALUE];
  __shared__ float value_scales[RAISED ? mla::VALUE : 1];
  __shared__ uint64_t barriers[WARPS][STAGES], values_full[WARPS], values_read;
  __shared__ uint32_t largest[RAISED ? WARPS : 1], turn_shared, multiplying, epoch_shared;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % KS, group = warp / KS % GROUPS, head = blockIdx.x;
  const int i = a.H * mla::VALUE, chunks = i / W::CHUNK / KS, loads = chunks / S::CHUNKS;
  const int64_t row_bytes = static_cast<int64_t>(i) * W::BYTES;
  const bool owner = head < a.H;
  const int tiles = a.D / TILE, step = gridDim.x * GROUPS;

  // The next load into a warp's ring: piece `ahead` of a tile.
  struct Next {
    const uint8_t* from;
    int tile, ahead, stage;
  };
  const auto begin = [&](int tile, int warp) { return a.w + tile * TILE * row_bytes + warp % KS * chunks * 64; };
  const auto ask = [&](const Next& next, int warp) {
    if (!elected()) return;
    uint8_t* to = memory + warp * OWN + next.stage * S::BYTES;
    uint64_t* barrier = &barriers[warp][next.stage];
    barrier_expect(barrier, TILE * R::ROW);
#pragma unroll
    for (int row = 0; row < TILE; row++) {  // with a condition on each copy, it would wait for the previous copy
      bulk_load_once(to + S::place(row), next.from + row * row_bytes, R::ROW, barrier);
    }
  };
  const auto advance = [&](Next& next) {
    next.from += R::ROW;
    next.stage = next.stage + 1 == STAGES ? 0 : next.stage + 1;
    if (++next.ahead == loads) {
      next.ahead = 0, next.tile += step;
      next.from += step * TILE * row_bytes - loads * R::ROW;
    }
  };
  if (threadIdx.x < WARPS * STAGES) barrier_init(&barriers[0][0] + threadIdx.x, 1);
  if (threadIdx.x < WARPS) barrier_init(&values_full[threadIdx.x], 1);
  if (threadIdx.x == 0) multiplying = 0, barrier_init(&values_read, WARPS);
  barriers_visible();
  __syncthreads();

  if (warp >= WARPS) {
    const int first = (warp - WARPS) * ASKED, end = first + ASKED;
    if (owner) {
#pragma unroll 1
      for (int w = first; w < end; w++) {
        if (w >= first + VALUES_OPEN) barrier_wait(&values_full[w - VALUES_OPEN], 0);
        if (elected()) {
          barrier_expect(&values_full[w], VALUES);
          bulk_load_once(memory + (w + 1) * OWN - VALUES,
                         a.w_uv + (static_cast<int64_t>(head) * WARPS + w) * VALUES, VALUES, &values_full[w]);
        }
      }
    }
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) {
      // Also go on once consumers multiply: they refill stages, so a barrier's parity no longer shows its first fill.
      const auto go = [&] {
        return s < R::OPEN || barrier_passed(&barriers[end - 1][s - R::OPEN], 0) ||
               *static_cast<volatile uint32_t*>(&multiplying);
      };
      while (!__any_sync(~0u, go())) {
      }
      if (owner && s == EARLY) barrier_wait_to_refill(&values_read, 0);
      const int later = SHORT ? s / loads : s >= loads;  // a ring holds at most two tiles, or four short ones
#pragma unroll 1
      for (int w = first; w < end; w++) {
        const int tile = blockIdx.x + w / KS * gridDim.x + later * step, ahead = s - later * loads;
        if (!SHORT || tile < tiles) ask(Next{begin(tile, w) + ahead * R::ROW, tile, ahead, s}, w);
      }
    }
    return;
  }

  int tile = blockIdx.x + group * gridDim.x;  // evenly over SMs
  Next next{begin(tile, warp), tile, 0, 0};
#pragma unroll 1
  for (int s = 0; s < STAGES; s++) advance(next);  // the producers load these
  // The warps of a tile take turns to add its sums. Scales are loaded early: a load later would cost a memory latency.
  float scale = 1;
  const auto load_scale = [&](int of) {
    if (RAISED && of < tiles) scale = __ldg(a.scale + of * TILE + lane % TILE);
  };
  load_scale(tile + part * step);
  // Issued early: all CTAs add to one word, and these atomics are serialised.
  unsigned long long launched = 0;
  uint32_t epoch = 0;
  uint32_t* const count = EXCHANGES ? a.peers.control + AFTER_COUNTS + blockIdx.x : nullptr;
  const auto ask_turn = [&] {
    if (threadIdx.x == 0) {
      launched = atomicAdd(reinterpret_cast<unsigned long long*>(a.mailbox + i), 1ull);
      if (EXCHANGES) epoch = *static_cast<volatile uint32_t*>(count) + 1;
    }
  };
  const auto take_turn = [&] {
    if (threadIdx.x == 0) {
      turn_shared = static_cast<uint32_t>(launched / gridDim.x) & 1;
      if (EXCHANGES) *count = epoch_shared = epoch;
    }
  };
  if (owner) {
    // Until the values arrive, xs is scratch: this warp's latents, the ranges' softmax weights and places.
    float* latents = reinterpret_cast<float*>(xs) + warp * ASIDE;
    float* shares = latents + LATENTS;
    mla::Found* found = reinterpret_cast<mla::Found*>(shares + MOST_RANGES);
    if (RAISED && threadIdx.x < mla::VALUE) value_scales[threadIdx.x] = a.uv_scale[head * mla::VALUE + threadIdx.x];
    const int column = warp * LATENTS + t * 8, side = g;
    int ranges = a.ctas;
    const float* weight = a.weights + head;
    const bf16* partial = a.partials + head * mla::LATENT + column;
    if constexpr (!SHARDED) {
      mla::share_work<true>(a.query_start, a.context, a.B, a.H, a.ctas, a.least, found, 0, 1);
      __syncwarp();
      ranges = found->ranges;
      const int slot = found->first + head / mla::ROWS * ranges, row = head % mla::ROWS;
      weight = a.weights + row * a.ctas + slot;
      partial = a.partials + static_cast<int64_t>(slot) * mla::PARTIAL + column / 64 * (mla::ROWS * 64) + row * 64 +
                ((column / 8) % 8 ^ (row & 7)) * 8;
    }
    const int64_t part_step = SHARDED ? a.part_step : mla::PARTIAL, weight_step = SHARDED ? a.weight_step : 1;
    wait_for_predecessor();
    let_successor_start();
    uint4 x[AT_ONCE];
    float v[MOST_RANGES / 32], sum[8] = {};
    const auto read = [&](int first) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (j && first + j * SIDES >= ranges) break;
        const int s = first + side + j * SIDES;
        x[j] = s < ranges ? *reinterpret_cast<const uint4*>(partial + s * part_step) : uint4{};
      }
    };
#pragma unroll
    for (int j = 0; j < MOST_RANGES / 32; j++) {
      const int s = lane + j * 32;
      v[j] = s < ranges ? weight[s * weight_step] : -INFINITY;
    }
    read(0);
    ask_turn();
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
      for (int j = 0; j < AT_ONCE; j++) {
        if (j && first + j * SIDES >= ranges) break;
        const float w = shares[first + side + j * SIDES];
        const uint32_t words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
        for (int l = 0; l < 4; l++) {
          const float2 y = widen(words[l]);
          sum[l * 2] += w * y.x;
          sum[l * 2 + 1] += w * y.y;
        }
      }
      first += AT_ONCE * SIDES;
      if (first < ranges) read(first);
    }
    __syncwarp();
#pragma unroll
    for (float& y : sum) {
#pragma unroll
      for (int l = 4; l < 32; l <<= 1) y += __shfl_xor_sync(~0u, y, l);
      y = __bfloat162float(__float2bfloat16(y));
    }
    if (side == 0) {
      float4* to = reinterpret_cast<float4*>(latents + t * 8);
      to[0] = {sum[0], sum[1], sum[2], sum[3]};
      to[1] = {sum[4], sum[5], sum[6], sum[7]};
    }
    __syncwarp();
    barrier_wait(&values_full[warp], 0);
    float y[8] = {};  // 8 values; half a warp per row of W_UV
    const uint8_t* mine = memory + (warp + 1) * OWN - VALUES + lane * 8 * W::BYTES;
#pragma unroll
    for (int j = 0; j < LATENTS / 2; j++) {
      float w[8];
      eight<W>(mine + j * (VALUES / LATENTS * 2), w);
      const float latent = latents[j * 2 + lane / 16];
#pragma unroll
      for (int n = 0; n < 8; n++) y[n] += w[n] * latent;
    }
#pragma unroll
    for (float& z : y) z += __shfl_xor_sync(~0u, z, 16);
    if (lane < 16) {
      float4* to = reinterpret_cast<float4*>(&products[warp][lane * 8]);
      to[0] = {y[0], y[1], y[2], y[3]};
      to[1] = {y[4], y[5], y[6], y[7]};
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&values_read);
    take_turn();
    named_sync(OF_HEAD, CONSUMERS);
    if (warp < mla::VALUE / 64) {
      float low = 0, high = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float2 p = *reinterpret_cast<const float2*>(&products[w][threadIdx.x * 2]);
        low += p.x, high += p.y;
      }
      if (RAISED) low *= value_scales[threadIdx.x * 2], high *= value_scales[threadIdx.x * 2 + 1];
      uint32_t* to = a.mailbox + head * (mla::VALUE / 2) + threadIdx.x;
      mailbox::put(to + turn_shared * (i / 2), mailbox::written(narrow(low, high)));
      mailbox::put(to + (1 - turn_shared) * (i / 2), 0);  // clears the previous launch's word
    }
  } else {
    wait_for_predecessor();
    let_successor_start();
    ask_turn();
    take_turn();
    named_sync(OF_HEAD, CONSUMERS);
  }

  {  // The GROUPS warps of `part` copy its values from the mailbox to shared memory, an equal number each.
    const int of_part = chunks * W::CHUNK, count = of_part / GROUPS, at = part * of_part + group * count;
    const uint32_t* words = a.mailbox + turn_shared * (i / 2) + at / 2 + lane * 4;
    const auto real = [&](int n) { return lane * 8 + n * 256 < count; };
    uint4 v[PIECES] = {};
    bool waits;
    do {
      waits = false;
#pragma unroll
      for (int n = 0; n < PIECES; n++) {
        if (real(n) && mailbox::misses(v[n])) v[n] = mailbox::glance16(words + n * 128);
      }
#pragma unroll
      for (int n = 0; n < PIECES; n++) waits |= real(n) && mailbox::misses(v[n]);
    } while (__any_sync(~0u, waits));
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < PIECES; n++) {
      v[n] = {~v[n].x, ~v[n].y, ~v[n].z, ~v[n].w};
      if (RAISED && real(n)) {
        for (uint32_t pair : {v[n].x, v[n].y, v[n].z, v[n].w}) {
          most = max(most, max((pair & 0x7fff) << 16, pair & 0x7fff0000));
        }
      }
    }
    float raise = 1;
    if (RAISED) {
      most = __reduce_max_sync(~0u, most);
      if (lane == 0) largest[warp] = most;
      named_sync(OF_PART + part, GROUPS * 32);
      raise = power_of_two(raise_exponent(max(largest[part], largest[part + KS])));
    }
#pragma unroll
    for (int n = 0; n < PIECES; n++) {
      if (!real(n)) break;
      const int k = at + lane * 8 + n * 256;
      uint32_t pairs[4] = {v[n].x, v[n].y, v[n].z, v[n].w};
      if (RAISED) {
#pragma unroll
        for (uint32_t& pair : pairs) {
          const float2 f = widen(pair);
          const __half2 h = __floats2half2_rn(f.x * raise, f.y * raise);
          pair = *reinterpret_cast<const uint32_t*>(&h);
        }
      }
      place<W>(xs, k, pairs);
    }
    named_sync(OF_PART + part, GROUPS * 32);
    if (lane == 0) *static_cast<volatile uint32_t*>(&multiplying) = 1;
    __syncwarp();
  }

  const Value* x[X::KINDS];
#pragma unroll
  for (int n = 0; n < X::KINDS; n++) x[n] = X::from(xs, 0, 1, n);
  const uint8_t* mine = memory + warp * OWN + S::place(g) + 16 * t;
  const int k0 = part * chunks * W::CHUNK;
  float lowered = 1;
  if (RAISED) lowered = power_of_two(254 - raise_exponent(max(largest[part], largest[part + KS])));
  int stage = 0, phase = 0;
  Sent sent{-1};
  for (int pass = 0, turns = 0; tile < tiles; pass ^= 1, turns++, tile += step) {
    X acc;
    float old = 0;
    if (EXCHANGES && part == turns) {
      sent.old = reinterpret_cast<const uint32_t*>(a.residual)[tile * (TILE / 2) + lane % 4];
    }
    if (!EXCHANGES && a.residual != nullptr && part == turns % KS) {
      old = __bfloat162float(a.residual[tile * TILE + lane % TILE]);
    }
    for (int n = 0; n < loads; n++) {
      barrier_wait(&barriers[warp][stage], phase);
      multiply<W, S::CHUNKS>(acc, mine + stage * S::BYTES, x, k0 + n * S::CHUNKS * W::CHUNK);
      if (++stage == STAGES) stage = 0, phase ^= 1;
      __syncwarp();  // all lanes have read the stage that is refilled now
      if (next.tile < tiles) {
        shared_writes_visible();
        ask(next, warp);
        advance(next);
      }
    }
    if (RAISED) {
#pragma unroll
      for (int n = 0; n < 8; n++) acc.d[n / 4][0][n % 4] *= lowered;
    }
    // Two buffers: a warp can be one pass ahead of the slowest reader, never two.
    acc.store(sums[pass][warp]);
    named_sync(1 + group, KS * 32);
    if (part != turns % KS) continue;
    float v = 0;
#pragma unroll
    for (int s = 0; s < KS; s++) v += sums[pass][group * KS + s][lane % TILE];
    if (EXCHANGES) {
      sent.tile = tile;
      sent.send(a.peers, epoch_shared, RAISED ? v * scale : v);
      continue;
    }
    if (lane < TILE) {
      const bf16 y = __float2bfloat16(RAISED ? v * scale : v);
      const int row = tile * TILE + lane;
      if (a.residual == nullptr) {
        a.y[row] = y;
      } else {
        const bf16 sum = __float2bfloat16(old + __bfloat162float(y));
        const uint32_t mine = __bfloat16_as_ushort(sum), pair = mine | __shfl_down_sync(0xff, mine, 1) << 16;
        uint32_t* to = a.fresh + row / 2;
        if (lane % 2 == 0) mailbox::put(to + turn_shared * (a.D / 2), mailbox::written(pair));
        a.residual[row] = sum;
        if (lane % 2 == 0) mailbox::put(to + (1 - turn_shared) * (a.D / 2), 0);
      }
    }
    load_scale(tile + KS * step);
  }
  if (EXCHANGES && sent.tile >= 0) {
    const uint32_t pair = sent.added(a.peers, epoch_shared);
    if (lane < TILE / 2) {
      const int at = sent.tile * (TILE / 2) + lane;
      uint32_t* to = a.fresh + at;
      mailbox::put(to + turn_shared * (a.D / 2), mailbox::written(pair));
      reinterpret_cast<uint32_t*>(a.residual)[at] = pair;
      mailbox::put(to + (1 - turn_shared) * (a.D / 2), 0);
    }
  }
}

template <typename W, bool SHORT, bool SHARDED>
int start(const Args& a, bool exchanges, int64_t sms, void* stream) {
  using R = Ring<W>;
  const int values = max(a.H * mla::VALUE * 2, WARPS * ASIDE * 4);
  const int bytes = WARPS * R::STAGES * Stage<R::ROW>::BYTES + values;
  // Max carve-out: otherwise this CTA and one of a neighbour kernel may not both fit an SM's shared memory.
  auto kernel = exchanges ? output_kernel<W, SHORT, true, SHARDED> : output_kernel<W, SHORT, false, SHARDED>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return launch(kernel, dim3(static_cast<unsigned>(sms)), dim3(THREADS), bytes, stream, 1, a);
}

}  // namespace

// partials, weights: as `mla_decode` writes them for one token of H heads (8, 16, 32 or 64; 32 or 64 with e4m3 weights)
// with `ctas` CTAs (at most 160) and `least`. scale, uv_scale: of the rows of e4m3 weights w and w_uv^T; null for bf16.
// mailbox: H VALUE + 2 words, zero at first; for launches with this H on this stream only. sms: SMs, at least H; D is
// at least 32 per SM. peers: in host memory, or null; with peers there is a residual, and y is this rank's partial sum.
API int mla_decode_output(const void* partials, const void* weights, const void* query_start, const void* context,
                   const void* w_uv, const void* uv_scale, const void* w, const void* scale, void* mailbox, void* y,
                   void* residual, void* fresh, int64_t part_step, int64_t weight_step, int64_t ctas, int64_t B,
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
               part_step,
               weight_step,
               static_cast<int>(ctas),
               static_cast<int>(B),
               static_cast<int>(H),
               static_cast<int>(D),
               static_cast<int>(least),
               peers == nullptr ? Peers{} : *peers};
  if (peers != nullptr && (D / TILE + 2 * sms - 1) / (2 * sms) > KS) return -1;  // a warp exchanges at most one tile
  if (part_step) {
    if (scale != nullptr) return H < 32 ? -1 : start<E4m3, false, true>(a, peers, sms, stream);
    return H <= 8 ? start<Bf16, true, true>(a, peers, sms, stream) : start<Bf16, false, true>(a, peers, sms, stream);
  }
  if (scale != nullptr) return H < 32 ? -1 : start<E4m3, false, false>(a, peers, sms, stream);
  return H <= 8 ? start<Bf16, true, false>(a, peers, sms, stream) : start<Bf16, false, false>(a, peers, sms, stream);
}
