// Queries from the input of their projection, in one launch: q_b with its norm, W_UK, rope, and the step's cache rows.
// Contract in mla_project.py.
//
// A cluster of two CTAs makes a head. Each streams half of the head's rows of q_b past the tokens (stream.cuh), gives
// the other its half of q_nope, and multiplies all of it by half of the columns of W_UK, which come while the rows do:
// both are asked for before the wait. The CTAs after the heads' write the cache, a warp per token.
#include "mla_cache.cuh"
#include "stream.cuh"

using namespace mla;
using stream::Bf16;
using stream::E4m3;
using stream::TILE;

namespace {

constexpr int TOKENS = 8, WARPS = 16, THREADS = WARPS * 32;
constexpr int KS = 4, GROUPS = WARPS / KS;                 // warps that share a tile; tiles at once
constexpr int NOPE_ROWS = NOPE / 2, ROPE_ROWS = ROPE / 2;  // of a CTA
constexpr int ROWS = NOPE_ROWS + ROPE_ROWS, TILES = ROWS / TILE, EACH = TILES / GROUPS;
constexpr int MOST_STAGES = 8;
template <typename W>
using StageOf = stream::Stage<W::BYTES == 2 ? 256 : 128>;
constexpr int COLUMNS = LATENT / 2, PITCH = COLUMNS * 2 + 16;  // of W_UK; its rows: eight meet no bank twice
constexpr int STRIDE = NOPE + 8;                               // of q_nope, likewise

struct Args {
  stream::Rows in;
  const uint8_t* w;    // [H (NOPE + ROPE), i]
  const float* scale;  // of its rows, of e4m3
  const bf16* ckv;     // [T, LATENT + ROPE], rows ckv_stride apart
  int64_t ckv_stride;
  const bf16* kv_norm;
  const float *cos, *sin;  // [T, ROPE / 2]
  const bf16* w_uk;        // [H, NOPE, LATENT]
  uint8_t* cache;
  int64_t slots;
  const int64_t* slot;
  bf16* out;  // [T, H, WIDTH]
  int H, packed, stages;
};

__device__ void write_rows(const Args& a) {
  const int lane = threadIdx.x % 32, token = (blockIdx.x - 2 * a.H) * WARPS + threadIdx.x / 32;
  uint4 norm[2];
#pragma unroll
  for (int i = 0; i < 2; i++) norm[i] = *reinterpret_cast<const uint4*>(a.kv_norm + i * 256 + lane * 8);
  wait_for_predecessor();
  if (token >= a.in.T) return;
  if (a.packed) {
    write_cache<true>(token, a.ckv, a.ckv_stride, norm, a.cos, a.sin, a.cache, a.slots, a.slot, a.in.eps);
  } else {
    write_cache<false>(token, a.ckv, a.ckv_stride, norm, a.cos, a.sin, a.cache, a.slots, a.slot, a.in.eps);
  }
}

template <typename W>
__global__ __launch_bounds__(THREADS, 1) void project(const __grid_constant__ Args a) {
  using Stage = StageOf<W>;
  let_successor_start();
  if (blockIdx.x >= 2 * a.H) return write_rows(a);
  extern __shared__ __align__(128) uint8_t memory[];
  uint8_t* w_uk = memory + WARPS * a.stages * Stage::BYTES;
  bf16* xs = reinterpret_cast<bf16*>(w_uk + NOPE * PITCH);
  bf16* norm = xs + a.in.T * (a.in.i + W::PAD);
  __shared__ float sums[KS][TILES][TOKENS * TILE], scales[ROWS];
  __shared__ __align__(16) bf16 nope[TOKENS * STRIDE];
  __shared__ uint64_t barriers[WARPS][MOST_STAGES], w_uk_full;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % KS, group = warp / KS, rank = cluster_rank(), head = blockIdx.x / 2;
  const int row_bytes = a.in.i * W::BYTES, chunks = a.in.i / W::CHUNK / KS, begin = part * chunks;
  // Row n of this CTA's in the head's: its share of the nope rows, then of the rope rows.
  auto row_of = [&](int n) {
    return head * (NOPE + ROPE) + (n < NOPE_ROWS ? rank * NOPE_ROWS + n : NOPE + rank * ROPE_ROWS + n - NOPE_ROWS);
  };
  uint8_t* ring = memory + warp * a.stages * Stage::BYTES;
  int ahead = 0, ahead_tile = group, stage_in = 0;
  auto load = [&] {
    if (ahead_tile >= TILES) return;
    uint64_t* barrier = &barriers[warp][stage_in];
    if (lane == 0) barrier_expect(barrier, TILE * 64 * Stage::CHUNKS);
    __syncwarp();
    if (lane < TILE) {
      const int64_t row = row_of(ahead_tile * TILE + lane);
      const uint8_t* from = a.w + row * row_bytes + (begin + ahead) * 64;
      bulk_load(ring + stage_in * Stage::BYTES + Stage::place(lane), from, 64 * Stage::CHUNKS, barrier);
    }
    stage_in = stage_in + 1 == a.stages ? 0 : stage_in + 1;
    if ((ahead += Stage::CHUNKS) == chunks) ahead = 0, ahead_tile += GROUPS;
  };
  if (lane < a.stages) barrier_init(&barriers[warp][lane], 1);
  if (threadIdx.x == 0) barrier_init(&w_uk_full, NOPE);
  barriers_visible();
  __syncwarp();
  for (int s = 0; s < a.stages; s++) load();
  for (int k = threadIdx.x * 8; k < a.in.i; k += THREADS * 8) copy16(norm + k, a.in.norm + k);
  copies_commit();
  if (W::BYTES == 1 && threadIdx.x < ROWS) scales[threadIdx.x] = e4m3::Y_SCALE * a.scale[row_of(threadIdx.x)];
  cluster_arrive();
  __syncthreads();
  if (threadIdx.x < NOPE) {
    barrier_expect(&w_uk_full, COLUMNS * 2);
    const bf16* from = a.w_uk + (static_cast<int64_t>(head) * NOPE + threadIdx.x) * LATENT + rank * COLUMNS;
    bulk_load(w_uk + threadIdx.x * PITCH, from, COLUMNS * 2, &w_uk_full);
  }
  copies_wait<0>();
  wait_for_predecessor();
  stream::stage<W>(a.in, xs, norm);
  __syncthreads();

  const bf16* x = xs + min(g, a.in.T - 1) * (a.in.i + W::PAD) + begin * W::CHUNK + 16 / W::BYTES * t;
  const uint8_t* mine = ring + Stage::place(g) + 16 * t;
  int stage_out = 0, phase = 0;
  for (int n = 0; n < EACH; n++) {
    float acc[2][4] = {};
#pragma unroll 1
    for (int c = 0; c < chunks; c += Stage::CHUNKS) {
      barrier_wait(&barriers[warp][stage_out], phase);
#pragma unroll
      for (int u = 0; u < Stage::CHUNKS; u++) {
        const uint4 w = *reinterpret_cast<const uint4*>(mine + stage_out * Stage::BYTES + u * 64);
        stream::multiply<W, false>(acc, w, x + (c + u) * W::CHUNK, nullptr);
      }
      if (++stage_out == a.stages) stage_out = 0, phase ^= 1;
      __syncwarp();  // everyone has read the stage that the next load overwrites
      load();
    }
    *reinterpret_cast<float2*>(&sums[part][group + n * GROUPS][g * TILE + 2 * t]) =
        make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
  }
  cluster_wait();  // the other has started: its memory is there
  __syncthreads();
  // Rows n and n + 1 of this CTA's for a token, rounded as the projection's output.
  auto pair = [&](int token, int n) {
    const float* at = &sums[0][n / TILE][token * TILE + n % TILE];
    float v[2] = {at[0], at[1]};
#pragma unroll
    for (int s = 1; s < KS; s++) v[0] += at[s * TILES * TOKENS * TILE], v[1] += at[s * TILES * TOKENS * TILE + 1];
    if (W::BYTES == 1) v[0] *= scales[n], v[1] *= scales[n + 1];
    return narrow(v[0], v[1]);
  };
  for (int n = threadIdx.x; n < a.in.T * (NOPE_ROWS / 2); n += THREADS) {
    const int token = n / (NOPE_ROWS / 2), row = n % (NOPE_ROWS / 2) * 2;
    const uint32_t v = pair(token, row);
    float* to = reinterpret_cast<float*>(nope + token * STRIDE + rank * NOPE_ROWS + row);
    *to = __uint_as_float(v);
    store_in(address_in(to, rank ^ 1), __uint_as_float(v));
  }
  cluster_arrive();
  for (int n = threadIdx.x; n < a.in.T * (ROPE_ROWS / 2); n += THREADS) {
    const int token = n / (ROPE_ROWS / 2), row = n % (ROPE_ROWS / 2) * 2, angle = (rank * ROPE_ROWS + row) / 2;
    const float c = a.cos[token * (ROPE / 2) + angle], s = a.sin[token * (ROPE / 2) + angle];
    bf16* to = a.out + (static_cast<int64_t>(token) * a.H + head) * WIDTH + LATENT + rank * ROPE_ROWS + row;
    *reinterpret_cast<uint32_t*>(to) = rotate(pair(token, NOPE_ROWS + row), c, s);
  }
  barrier_wait(&w_uk_full, 0);
  cluster_wait();

#pragma unroll
  for (int block = 0; block < COLUMNS / 16 / WARPS; block++) {
    const int column = (warp + block * WARPS) * 16;
    float d[2][4] = {};
#pragma unroll
    for (int step = 0; step < NOPE / 16; step++) {
      const int k = step * 16 + lane / 16 * 8 + lane % 8;
      const uint32_t from = shared_address(w_uk + k * PITCH + (column + lane / 8 % 2 * 8) * 2);
      uint32_t weights[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(weights[0]), "=r"(weights[1]), "=r"(weights[2]), "=r"(weights[3])
                   : "r"(from)
                   : "memory");
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

// scale: null for bf16 weights, else those of the rows of e4m3 weights. T is at most 8, i a multiple of 512
// and at most 1,536.
API int mla_project(const void* x, int64_t x_stride, const void* norm, const void* w, const void* scale,
                    const void* ckv, int64_t ckv_stride, const void* kv_norm, const void* cos, const void* sin,
                    const void* w_uk, void* cache, int64_t slots, int64_t packed, const void* slot, void* out,
                    int64_t T, int64_t i, int64_t H, float eps, void* stream) {
  Args a{{static_cast<const bf16*>(x), x_stride, static_cast<const bf16*>(norm), static_cast<int>(T),
                static_cast<int>(i), eps},
               static_cast<const uint8_t*>(w),
               static_cast<const float*>(scale),
               static_cast<const bf16*>(ckv),
               ckv_stride,
               static_cast<const bf16*>(kv_norm),
               static_cast<const float*>(cos),
               static_cast<const float*>(sin),
               static_cast<const bf16*>(w_uk),
               static_cast<uint8_t*>(cache),
               slots,
               static_cast<const int64_t*>(slot),
               static_cast<bf16*>(out),
               static_cast<int>(H),
               static_cast<int>(packed),
               0};
  auto start = [&](auto kind, auto kernel) {
    using W = decltype(kind);
    const int staged = NOPE * PITCH + static_cast<int>(T * (i + W::PAD) + i) * 2, round = WARPS * StageOf<W>::BYTES;
    a.stages = min((210 * 1024 - staged) / round, MOST_STAGES);
    return launch(kernel, dim3(2 * H + 2), dim3(THREADS), staged + a.stages * round, stream, 2, a);
  };
  return scale == nullptr ? start(Bf16(), project<Bf16>) : start(E4m3(), project<E4m3>);
}
