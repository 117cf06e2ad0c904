// As mla_decode_output_t1.cu, which explains mailboxes and waits, for e4m3 weights: 1 to 4 tokens of 8 or 16 heads, 2 to
// 4 of 32 or 64. Contract in mla_decode_output.py. With 8 or 16 heads, a CTA's rows of w fit into its shared memory.
//
//   1. The first OWNERS CTAs compute the values (ranges combined, times W_UV) of a head, or of a part of its columns,
//      and write them to the mailbox. They have no rows of w: copies of w would have to wait until W_UV is read.
//   2. The other CTAs have copied their rows of w by then, a tile of 8 whole rows per two warps. They poll the mailbox
//      and multiply. They load scales and the launch counter before they poll.
// Latency after attention's end: three round trips to L2 (read ranges, write mailbox, read mailbox); two more with
// peers.
//
// A CTA claims so much shared memory that no SM holds two; with one token, it leaves room for a CTA of attention
// (split_kv_short.cuh). CTAs wait only for the first OWNERS CTAs of their launch, which wait for none. With 32 or 64
// heads (streamed_kernel), every CTA streams rows of w through rings, and CTA h < H first computes the values of head
// h.
#include "attention/sm90/output_values.cuh"

using namespace stream;

namespace {

constexpr int OWNERS = 16, THREADS = WARPS * 32;
constexpr int TILES = WARPS / 2;     // max tiles of a CTA: two warps share one
constexpr int OPEN = TILES / 2;      // max tiles of w in flight: more would delay what attention reads
constexpr int CLAIMED = 116 * 1024;  // more than half of an SM's shared memory
constexpr int OF_TILE = 1;           // first of the named barriers of tiles' warp pairs

// TOKENS: max tokens, 1 or 4.
template <int HEADS, int TOKENS>
struct Plan : ValuesPlan<HEADS, TOKENS, OWNERS, TOKENS == 1 ? 4 : 8> {
  using V = ValuesPlan<HEADS, TOKENS, OWNERS, TOKENS == 1 ? 4 : 8>;
  using S = Stage<V::I>;  // a tile
  static constexpr int TILE_BYTES = TILES * S::BYTES + TOKENS * pitch_of(V::I) * 2;
  static constexpr int BYTES = TILE_BYTES > CLAIMED ? TILE_BYTES : CLAIMED;
  static_assert(V::VALUES + V::SCRATCH <= BYTES && V::VALUES % 64 == 0 && V::I % BLOCK == 0);
};

struct Shared {
  ValuesShared values;
  float lowered[4][32];            // factor of sums that undoes the values' power of two, per token and BLOCK values
  float sums[2][TILES][4 * TILE];  // partial sums over the two halves of k
  uint64_t full[TILES];
};

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
  const float scale = half == 0 && real ? __ldg(a.scale + row) : 0;  // issued before w: loads return in order of issue
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
  if (half == 0) {  // used after the products
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

template <int HEADS, int TOKENS, bool EXCHANGES, bool SHARDED>
__global__ void __maxnreg__(TOKENS == 1 ? 56 : 96) output_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) Shared shared;
  if (threadIdx.x < TILES) barrier_init(&shared.full[threadIdx.x], 1);
  barriers_visible();
  __syncthreads();
  if (blockIdx.x < OWNERS) {
    using P = Plan<HEADS, TOKENS>;
    make_values<HEADS, TOKENS, OWNERS, P::AT_ONCE, EXCHANGES, SHARDED>(a, shared.values, memory, memory + P::VALUES,
                                                                       [] {});
  } else {
    multiply_tiles<HEADS, TOKENS, EXCHANGES>(a, shared, memory);
  }
}

// ---- 2 to 4 tokens of 32 or 64 heads ----

constexpr int KS = 8, GROUPS = WARPS / KS;           // warps that share a tile; tiles at once
constexpr int OF_PART = 1, OF_GROUP = OF_PART + KS;  // first of the named barriers of a part of k; of a tile's warps

// A warp's ring has STAGES stages of ROW bytes of each row of a tile; OPEN: max stages in flight until attention has
// ended. Stage s of all warps is contiguous. In a CTA that computes values, the last LATE stages first hold W_UV.
template <int HEADS>
struct Streamed {
  static constexpr int ROW = HEADS == 32 ? 512 : 256, STAGES = 1024 / ROW, OPEN = 512 / ROW;
  using V = ValuesPlan<HEADS, 4, HEADS, 8>;
  using S = Stage<ROW>;
  static constexpr int PART = V::I / KS, LOADS = PART / ROW, PITCH = pitch_of(V::I);
  static constexpr int ALL = WARPS * S::BYTES, LATE = (V::VALUES + ALL - 1) / ALL;
  static constexpr int BYTES = STAGES * ALL + 4 * PITCH * 2;
  static_assert(LATE < STAGES && V::SCRATCH <= 4 * PITCH * 2 && PART % (GROUPS * 256) == 0);
};

struct StreamedShared {
  ValuesShared values;
  float sums[2][WARPS][4 * TILE];
  uint32_t largest[4][WARPS];
  uint64_t full[WARPS][4];
};

// Every CTA multiplies tiles of w, 8 warps a tile. CTA h < HEADS first computes the values of head h.
template <int HEADS, bool SHARDED>
__global__ void __launch_bounds__(THREADS, 1) streamed_kernel(const __grid_constant__ Args a) {
  using P = Streamed<HEADS>;
  using S = typename P::S;
  constexpr int I = P::V::I, WORDS = P::V::WORDS;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) StreamedShared shared;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % KS, group = warp / KS, tiles = a.D / TILE, step = gridDim.x * GROUPS;
  __half* xs = reinterpret_cast<__half*>(memory + P::STAGES * P::ALL);
  uint8_t* ring = memory + warp * S::BYTES;
  if (threadIdx.x < WARPS * P::STAGES) barrier_init(&shared.full[threadIdx.x / P::STAGES][threadIdx.x % P::STAGES], 1);
  barriers_visible();
  __syncthreads();

  int tile = blockIdx.x + group * gridDim.x;  // evenly over SMs
  int ahead = 0, filled = 0, ahead_tile = tile;  // the next load: piece of the row, stage, tile
  const uint8_t* from = a.w + static_cast<int64_t>(tile) * TILE * I + part * P::PART;
  const auto load = [&] {
    if (ahead_tile >= tiles) return;
    if (elected()) {
      uint64_t* barrier = &shared.full[warp][filled];
      barrier_expect(barrier, TILE * P::ROW);
#pragma unroll
      for (int row = 0; row < TILE; row++) {
        bulk_load_once(ring + filled * P::ALL + S::place(row), from + row * I, P::ROW, barrier);
      }
    }
    from += P::ROW;
    filled = filled + 1 == P::STAGES ? 0 : filled + 1;
    if (++ahead == P::LOADS) ahead = 0, ahead_tile += step, from += static_cast<int64_t>(step) * TILE * I - P::PART;
  };
  const int scaled = (tile + part * step) * TILE + lane % TILE;  // this lane completes the sum of this row
  uint32_t turn;
  float scale;
  if (blockIdx.x < HEADS) {
    turn = make_values<HEADS, 4, HEADS, P::V::AT_ONCE, false, SHARDED>(
               a, shared.values, memory + (P::STAGES - P::LATE) * P::ALL, reinterpret_cast<uint8_t*>(xs),
               [&] {
                 scale = scaled < a.D ? __ldg(a.scale + scaled) : 0;
                 for (int s = 0; s < P::STAGES - P::LATE; s++) load();
               }).turn;
    shared_writes_visible();
    for (int s = 0; s < P::LATE; s++) load();
  } else {
    scale = scaled < a.D ? __ldg(a.scale + scaled) : 0;
    for (int s = 0; s < P::STAGES; s++) {
      if (s >= P::OPEN && ahead_tile < tiles) barrier_wait(&shared.full[warp][s - P::OPEN], 0);
      load();
    }
    wait_for_predecessor();
    let_successor_start();
    const Turn<false> own(a, WORDS);
    turn = own.turn;
    __syncthreads();
    own.taken(a, WORDS);
  }

  // The two warps of a part of k copy its values from the mailbox to shared memory as fp16, with a scale per token.
  constexpr int OF_WARP = P::PART / GROUPS, PIECES = OF_WARP / 256;
  {
    const int at = part * P::PART + group * OF_WARP + lane * 8;
    const uint32_t* words = a.mailbox + (turn & 1) * WORDS + at / 2;
    uint4 v[4][PIECES] = {};
    bool waits;
    do {
      waits = false;
#pragma unroll
      for (int i = 0; i < 4 * PIECES; i++) {
        uint4& of = v[i / PIECES][i % PIECES];
        const uint32_t* from = words + i / PIECES * (I / 2) + i % PIECES * 128;
        if (i / PIECES < a.T && mailbox::misses(of)) of = mailbox::glance16(from);
      }
#pragma unroll
      for (int i = 0; i < 4 * PIECES; i++) waits |= i / PIECES < a.T && mailbox::misses(v[i / PIECES][i % PIECES]);
    } while (__any_sync(~0u, waits));
#pragma unroll
    for (int token = 0; token < 4; token++) {
      uint32_t most = 0;
#pragma unroll
      for (uint4& of : v[token]) {
        of = {~of.x, ~of.y, ~of.z, ~of.w};
        for (uint32_t pair : {of.x, of.y, of.z, of.w}) most = max(most, max((pair & 0x7fff) << 16, pair & 0x7fff0000));
      }
      most = token < a.T ? __reduce_max_sync(~0u, most) : 0;
      if (lane == 0) shared.largest[token][warp] = most;
    }
    named_sync(OF_PART + part, GROUPS * 32);
#pragma unroll
    for (int token = 0; token < 4; token++) {
      if (token >= a.T) break;
      const float by = power_of_two(raise_exponent(max(shared.largest[token][part], shared.largest[token][part + KS])));
#pragma unroll
      for (int n = 0; n < PIECES; n++) {
        uint32_t pairs[4] = {v[token][n].x, v[token][n].y, v[token][n].z, v[token][n].w};
#pragma unroll
        for (uint32_t& pair : pairs) {
          const float2 f = widen(pair);
          pair = raised(f.x, f.y, by);
        }
        place<E4m3>(xs + token * P::PITCH, at + n * 256, pairs);
      }
    }
    named_sync(OF_PART + part, GROUPS * 32);
  }

  const __half* x[1] = {Sums<4>::from(xs, P::PITCH, a.T, 0)};
  float lowered[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t* of = shared.largest[(t * 2 + i) % 4];
    lowered[i] = power_of_two(254 - raise_exponent(max(of[part], of[part + KS])));
  }
  const uint8_t* mine = ring + S::place(g) + 16 * t;
  int stage = 0, phase = 0;
  for (int turns = 0; tile < tiles; turns++, tile += step) {
    Sums<4> acc;
#pragma unroll 1
    for (int n = 0; n < P::LOADS; n++) {
      barrier_wait(&shared.full[warp][stage], phase);
      multiply<E4m3, S::CHUNKS>(acc, mine + stage * P::ALL, x, part * P::PART + n * P::ROW);
      if (++stage == P::STAGES) stage = 0, phase ^= 1;
      __syncwarp();  // all lanes have read the stage that is refilled now
      shared_writes_visible();
      load();
    }
#pragma unroll
    for (int n = 0; n < 8; n++) acc.d[n / 4][0][n % 4] *= lowered[n % 2];
    // Two buffers: a warp can be one pass ahead of the slowest reader, never two.
    acc.store(shared.sums[turns % 2][warp]);
    named_sync(OF_GROUP + group, KS * 32);
    if (part != turns) continue;
    float v = 0;
#pragma unroll
    for (int s = 0; s < KS; s++) v += shared.sums[turns % 2][group * KS + s][lane];
    if (lane / TILE < a.T) a.y[static_cast<int64_t>(lane / TILE) * a.D + scaled] = __float2bfloat16(v * scale);
  }
}

template <int HEADS, bool SHARDED>
int start_streamed(const Args& a, int64_t sms, void* stream) {
  if (a.T == 1 || sms < HEADS || a.D / TILE > KS * GROUPS * sms) return -1;
  auto kernel = streamed_kernel<HEADS, SHARDED>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return launch(kernel, dim3(static_cast<unsigned>(sms)), dim3(THREADS), Streamed<HEADS>::BYTES, stream, 1, a);
}

template <int HEADS, int TOKENS, bool EXCHANGES, bool SHARDED>
int start(const Args& a, int64_t sms, void* stream) {
  // The carve-out: as in mla_decode_output_t1.cu.
  auto kernel = output_kernel<HEADS, TOKENS, EXCHANGES, SHARDED>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return launch(kernel, dim3(static_cast<unsigned>(sms)), dim3(THREADS), Plan<HEADS, TOKENS>::BYTES, stream, 1, a);
}

template <int HEADS, bool SHARDED>
int choose(const Args& a, int64_t sms, void* stream) {
  if constexpr (HEADS > OWNERS) {
    return start_streamed<HEADS, SHARDED>(a, sms, stream);
  } else {
    if (a.T > 1) return start<HEADS, 4, false, SHARDED>(a, sms, stream);
    return a.peers.ranks ? start<HEADS, 1, true, SHARDED>(a, sms, stream)
                         : start<HEADS, 1, false, SHARDED>(a, sms, stream);
  }
}

}  // namespace

// As mla_decode_output, for T tokens (1 to 4) of H heads (8 or 16; 32 or 64 if T > 1) with e4m3 weights. mailbox:
// H VALUE + 160 words for one token, 4 H VALUE + 160 for more, zero at first; one per stream, H, and kind (one token or
// more). sms: at most 160, with D / 8 at most 8 (sms - 16). residual, fresh: only for one token.
API int mla_decode_output_mma(const void* partials, const void* weights, const void* query_start, const void* context,
                                const void* w_uv, const void* uv_scale, const void* w, const void* scale,
                                void* mailbox, void* y, void* residual, void* fresh, int64_t part_step,
                                int64_t weight_step, int64_t ctas, int64_t B, int64_t T, int64_t H, int64_t D, int64_t least, int64_t sms,
                                const Peers* peers, void* stream) {
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
               static_cast<int>(T),
               static_cast<int>(D),
               static_cast<int>(least),
               peers == nullptr ? Peers{} : *peers};
  if (T < 1 || T > 4 || sms > MAX_CTAS || D / TILE > TILES * (sms - OWNERS)) return -1;
  const bool sharded = part_step != 0;
  switch (H) {
    case 8: return sharded ? choose<8, true>(a, sms, stream) : choose<8, false>(a, sms, stream);
    case 16: return sharded ? choose<16, true>(a, sms, stream) : choose<16, false>(a, sms, stream);
    case 32: return sharded ? choose<32, true>(a, sms, stream) : choose<32, false>(a, sms, stream);
    case 64: return sharded ? -1 : choose<64, false>(a, sms, stream);
    default: return -1;
  }
}
