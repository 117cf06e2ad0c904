// The query path in one launch: q_b with its norm, W_UK, rope, and the step's cache rows. Contract in
// mla_project_query.py.
//
// A cluster of C CTAs computes a head: C = 2 with 64 heads, more with fewer heads. Each CTA multiplies the tokens by
// its share of the head's rows of q_b (weight_stream.cuh), sends its share of q_nope to the other CTAs, and multiplies
// the whole q_nope by its share of the columns of W_UK. The loads of q_b and W_UK are issued before the wait. The CTAs
// after those of the heads write the cache, a warp per token.
#include "attention/sm90/cache_row.cuh"
#include "cuda/weight_stream.cuh"

#include <type_traits>

using namespace mla;
using stream::Bf16;
using stream::E4m3;
using stream::TILE;
using stream::ASKING, stream::WARPS;

namespace {

constexpr int MOST = 8, THREADS = WARPS * 32;
constexpr int MOST_STAGES = 8;
constexpr int STRIDE = NOPE + 8;  // elements from row to row of q_nope: reads of eight rows have no bank conflict

// How C CTAs share a head.
template <int C>
struct Share {
  static constexpr int KS = C == 2 ? 4 : 8, GROUPS = WARPS / KS;       // warps that share a tile; tiles at once
  static constexpr int NOPE_ROWS = NOPE / C, ROPE_ROWS = ROPE / C;     // rows of q_b per CTA
  static constexpr int ROWS = NOPE_ROWS + ROPE_ROWS, TILES = ROWS / TILE;
  static constexpr int COLUMNS = LATENT / C, PITCH = COLUMNS * 2 + 16;  // columns of W_UK; bytes from row to row
  // Clusters of two fill the GPU with one CTA per SM. Larger clusters do not, so two CTAs share an SM.
  static constexpr int CTAS = C == 2 ? 1 : 2, MEMORY = (C == 2 ? 208 : 94) * 1024;
};
template <typename W, int C>
using StageOf = stream::Stage<C == 2 ? W::BYTES * 128 : W::BYTES == 2 ? 128 : 192>;

struct Args {
  stream::Rows in;
  const uint8_t* w;    // [H (NOPE + ROPE), i]
  const float* scale;  // one per row of e4m3 w
  NewRows rows;
  const bf16* w_uk;  // [H, NOPE, LATENT]
  bf16* out;         // [T, H, WIDTH]
  int H, stages;
};

template <typename W, int TOKENS, int C>
__global__ __launch_bounds__(THREADS, Share<C>::CTAS) void project(const __grid_constant__ Args a) {
  using Stage = StageOf<W, C>;
  using S = Share<C>;
  constexpr int KS = S::KS, GROUPS = S::GROUPS, NOPE_ROWS = S::NOPE_ROWS, ROPE_ROWS = S::ROPE_ROWS, ROWS = S::ROWS;
  constexpr int TILES = S::TILES, EACH = (TILES + GROUPS - 1) / GROUPS;  // EACH: max tiles of a group
  constexpr int COLUMNS = S::COLUMNS, PITCH = S::PITCH;
  let_successor_start();
  if (blockIdx.x >= C * a.H) return add_row(a.rows, (blockIdx.x - C * a.H) * WARPS + threadIdx.x / 32);
  extern __shared__ __align__(128) uint8_t memory[];
  uint8_t* w_uk = memory + WARPS * a.stages * Stage::BYTES;
  using X = stream::Sums<TOKENS>;
  using Value = typename W::Value;
  Value* xs = reinterpret_cast<Value*>(w_uk + NOPE * PITCH);
  const int pitch = stream::pitch_of(a.in.i);
  bf16* norm = reinterpret_cast<bf16*>(xs + a.in.T * pitch);
  __shared__ float sums[KS][TILES][TOKENS * TILE], scales[ROWS], lowered[TOKENS];
  __shared__ __align__(16) bf16 nope[MOST * STRIDE];
  __shared__ uint64_t barriers[WARPS][MOST_STAGES], w_uk_full;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % KS, group = warp / KS, rank = cluster_rank(), head = blockIdx.x / C;
  const int row_bytes = a.in.i * W::BYTES, chunks = a.in.i / W::CHUNK / KS, begin = part * chunks;
  // The index in the head of row n of this CTA: first its share of the nope rows, then of the rope rows.
  auto row_of = [&](int n) {
    return head * (NOPE + ROPE) + (n < NOPE_ROWS ? rank * NOPE_ROWS + n : NOPE + rank * ROPE_ROWS + n - NOPE_ROWS);
  };
  // The next load into a warp's ring: from chunk `ahead` of a tile.
  struct Next {
    int tile, ahead, stage;
  };
  const auto load = [&](Next& next, int warp, bool ask = true) {
    if (next.tile >= TILES) return;
    if (ask && elected()) {
      const int chunk = warp % KS * chunks + next.ahead;
      const uint8_t* from = a.w + static_cast<int64_t>(row_of(next.tile * TILE)) * row_bytes + chunk * 64;
      uint8_t* to = memory + (warp * a.stages + next.stage) * Stage::BYTES;
      uint64_t* barrier = &barriers[warp][next.stage];
      barrier_expect(barrier, TILE * 64 * Stage::CHUNKS);
#pragma unroll
      for (int row = 0; row < TILE; row++) {
        bulk_load_once(to + Stage::place(row), from + row * row_bytes, 64 * Stage::CHUNKS, barrier);
      }
    }
    next.stage = next.stage + 1 == a.stages ? 0 : next.stage + 1;
    if ((next.ahead += Stage::CHUNKS) == chunks) next.ahead = 0, next.tile += GROUPS;
  };
  Next next{group, 0, 0};
  if (lane < a.stages) barrier_init(&barriers[warp][lane], 1);
  if (threadIdx.x == 0) barrier_init(&w_uk_full, ASKING);
  barriers_visible();
  // Load the norm before the weights: loads return in order of issue.
  const int preparing = threadIdx.x - ASKING * 32;  // index among the threads that prepare x
  if (preparing >= 0) {
    for (int k = preparing * 8; k < a.in.i; k += (WARPS - ASKING) * 256) copy16(norm + k, a.in.norm + k);
    copies_commit();
  }
  const bool scaled = W::BYTES == 1 && preparing >= 0 && preparing < ROWS;
  const float scale = scaled ? a.scale[row_of(preparing)] : 1;
  cluster_arrive();
  __syncthreads();
  if (preparing >= 0) {
    for (int s = 0; s < a.stages; s++) load(next, warp, false);
  } else {
    Next other{(warp + ASKING) / KS, 0, 0};
#pragma unroll 1
    for (int s = 0; s < a.stages; s++) load(next, warp), load(other, warp + ASKING);
  }
  if (preparing < 0 && elected()) {
    constexpr int EACH_WARP = NOPE / ASKING;
    barrier_expect(&w_uk_full, EACH_WARP * COLUMNS * 2);
    const bf16* from = a.w_uk + (static_cast<int64_t>(head) * NOPE + warp * EACH_WARP) * LATENT + rank * COLUMNS;
#pragma unroll
    for (int row = 0; row < EACH_WARP; row++) {
      bulk_load_once(w_uk + (warp * EACH_WARP + row) * PITCH, from + row * LATENT, COLUMNS * 2, &w_uk_full);
    }
  }
  wait_for_predecessor();
  if (preparing >= 0) {
    copies_wait<0>();
    if (scaled) scales[preparing] = scale;
    stream::prepared<ASKING>();  // the norm's weights have arrived
    stream::stage<W, ASKING>(a.in, xs, norm, lowered);
  }
  stream::hand_over<ASKING>(warp);

  const Value* x[X::KINDS];
#pragma unroll
  for (int n = 0; n < X::KINDS; n++) x[n] = X::from(xs, pitch, a.in.T, n);
  const uint8_t* mine = memory + warp * a.stages * Stage::BYTES + Stage::place(g) + 16 * t;
  int stage_out = 0, phase = 0;
  for (int n = 0; n < EACH; n++) {
    if (TILES % GROUPS && group + n * GROUPS >= TILES) break;
    X acc;
#pragma unroll 1
    for (int c = 0; c < chunks; c += Stage::CHUNKS) {
      barrier_wait(&barriers[warp][stage_out], phase);
      stream::multiply<W, Stage::CHUNKS>(acc, mine + stage_out * Stage::BYTES, x, (begin + c) * W::CHUNK);
      if (++stage_out == a.stages) stage_out = 0, phase ^= 1;
      __syncwarp();  // all lanes have read the stage that the next load overwrites
      load(next, warp);
    }
    acc.store(sums[part][group + n * GROUPS]);
  }
  cluster_wait();  // the other CTAs have started, so their shared memory may be written
  __syncthreads();
  // Rows n and n + 1 of this CTA for a token, rounded to bf16 like the projection's output.
  auto pair = [&](int token, int n) {
    const float* at = &sums[0][n / TILE][token * TILE + n % TILE];
    float v[2] = {at[0], at[1]};
#pragma unroll
    for (int s = 1; s < KS; s++) v[0] += at[s * TILES * TOKENS * TILE], v[1] += at[s * TILES * TOKENS * TILE + 1];
    if (W::BYTES == 1) v[0] *= scales[n] * lowered[token], v[1] *= scales[n + 1] * lowered[token];
    return narrow(v[0], v[1]);
  };
  for (int n = threadIdx.x; n < a.in.T * (NOPE_ROWS / 2); n += THREADS) {
    const int token = n / (NOPE_ROWS / 2), row = n % (NOPE_ROWS / 2) * 2;
    const uint32_t v = pair(token, row);
    float* to = reinterpret_cast<float*>(nope + token * STRIDE + rank * NOPE_ROWS + row);
    *to = __uint_as_float(v);
#pragma unroll
    for (int other = 1; other < C; other++) store_in(address_in(to, (rank + other) % C), __uint_as_float(v));
  }
  cluster_arrive();
  for (int n = threadIdx.x; n < a.in.T * (ROPE_ROWS / 2); n += THREADS) {
    const int token = n / (ROPE_ROWS / 2), row = n % (ROPE_ROWS / 2) * 2, angle = (rank * ROPE_ROWS + row) / 2;
    const float c = a.rows.cos[token * (ROPE / 2) + angle], s = a.rows.sin[token * (ROPE / 2) + angle];
    bf16* to = a.out + (static_cast<int64_t>(token) * a.H + head) * WIDTH + LATENT + rank * ROPE_ROWS + row;
    *reinterpret_cast<uint32_t*>(to) = rotate(pair(token, NOPE_ROWS + row), c, s);
  }
  barrier_wait(&w_uk_full, 0);
  cluster_wait();

#pragma unroll
  for (int block = 0; block < COLUMNS / 16; block += WARPS) {
    const int column = (warp + block) * 16;
    if (column >= COLUMNS) break;
    float d[2][4] = {};
#pragma unroll
    for (int step = 0; step < NOPE / 16; step++) {
      const int k = step * 16 + lane / 16 * 8 + lane % 8;
      uint32_t weights[4];
      load_matrices<true>(weights, w_uk + k * PITCH + (column + lane / 8 % 2 * 8) * 2);
      const uint32_t* q = reinterpret_cast<const uint32_t*>(nope + g * STRIDE + step * 16 + 2 * t);
      mma(d[step % 2], weights, q[0], q[4], bf16());
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 2 * t + i % 2;
      bf16* to = a.out + (static_cast<int64_t>(token) * a.H + head) * WIDTH + rank * COLUMNS + column + g + i / 2 * 8;
      if (token < a.in.T) *to = __float2bfloat16(d[0][i] + d[1][i]);
    }
  }
}

}  // namespace

// scale: of the rows of e4m3 weights; null for bf16. T is at most 8, i a multiple of 512 and at most 1,536; with fewer
// than 48 heads i is 1,536.
API int mla_project_query(const void* x, int64_t x_stride, int64_t i, const void* norm, const void* w, const void* scale,
                    const void* ckv, int64_t ckv_stride, const void* kv_norm, const void* cos, const void* sin,
                    void* cache, int64_t slots, int64_t packed, const void* slot, int64_t T, float eps,
                    const void* w_uk, void* out, int64_t H, void* stream) {
  Args a{{static_cast<const bf16*>(x), x_stride, static_cast<const bf16*>(norm), static_cast<int>(T),
          static_cast<int>(i), eps},
         static_cast<const uint8_t*>(w),
         static_cast<const float*>(scale),
         new_rows(ckv, ckv_stride, kv_norm, cos, sin, cache, slots, packed, slot, T, eps),
         static_cast<const bf16*>(w_uk),
         static_cast<bf16*>(out),
         static_cast<int>(H),
         0};
  auto start = [&](auto kind, auto share, auto kernel) {
    using W = decltype(kind);
    using S = Share<decltype(share)::value>;
    constexpr int C = decltype(share)::value;
    const int staged = NOPE * S::PITCH + static_cast<int>(T * stream::pitch_of(i) + i) * 2;
    const int round = WARPS * StageOf<W, C>::BYTES;
    a.stages = min((S::MEMORY - staged) / round, MOST_STAGES);
    return launch(kernel, dim3(C * (H + 1)), dim3(THREADS), staged + a.stages * round, stream, C, a);
  };
  auto choose = [&](auto share) {
    constexpr int C = decltype(share)::value;
    const bool few = T <= 4;
    return scale == nullptr ? start(Bf16(), share, few ? project<Bf16, 4, C> : project<Bf16, 8, C>)
                            : start(E4m3(), share, few ? project<E4m3, 4, C> : project<E4m3, 8, C>);
  };
  return H >= 48   ? choose(std::integral_constant<int, 2>())
         : H >= 24 ? choose(std::integral_constant<int, 4>())
                   : choose(std::integral_constant<int, 8>());
}
