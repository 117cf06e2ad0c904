// Absorbed MLA over one tile of 64 latents for a quarter of its query rows: where contexts are so short that most
// processors would idle, four of them share a tile. What takes time then is not bytes but 64 rows in one processor's
// hands: their queries, products and outputs.
//
// One token's attention over a bf16 cache has a kernel of its own for that, if the block table holds no more than a CTA
// for each processor can take: tiles of 48 latents, so that mla_decode_output_t1.cu's CTA lies beside this one's and
// asks for weights while this one waits for its queries and attends.
#pragma once
#include "attention/sm90/split_kv_schedule.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma.cuh"

namespace mla {

// Four 8 x 8 matrices of a 128-byte swizzled [rows][64] chunk: rows from `row` and row + 8, columns likewise.
__device__ __forceinline__ void store_matrices(char* chunk, int row, int column, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  int lane = threadIdx.x % 32, r = row + lane % 16, piece = column / 8 + lane / 16;
  uint32_t to = shared_address(chunk) + r * 128 + ((piece ^ (r & 7)) * 16);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// How a tile of N latents lies in shared memory, [N / TOGETHER][WIDTH / 64][TOGETHER][64] swizzled, and what attending
// it needs besides.
template <int N, int TOGETHER>
struct Short {
  static constexpr int COUNT = N, TILE = N * WIDTH * 2, STRIDE = TOGETHER * 128;  // bytes of a tile; of one chunk
  static constexpr int PITCH = N == KEYS ? N : N + 4;       // of a row's scores, by halves of the width
  static constexpr int ODDS_PITCH = N * 2 + 16;             // of a row's probabilities, in bytes
  static constexpr int SCORES = 2 * QUARTER * PITCH * 4;
  static constexpr int SCRATCH = SCORES + QUARTER * (ODDS_PITCH + 4);
  static_assert(N % 16 == 0 && N <= KEYS && TOGETHER % 16 == 0);
  __device__ static int place(int position) {
    return position / TOGETHER * (TOGETHER * WIDTH * 2) + position % TOGETHER * 128;
  }
};

// By warps 0 to 7, once the predecessors have finished. `keys` is the tile, there when `arrived()` returns; `scratch`
// shared memory; q the first of `rows` rows; unseen(r): row r sees positions before it. at: the tile's first position,
// end: its last's successor. partial, weights: of the first row, with `slots` weights to a row.
template <typename S, typename Arrived, typename Unseen>
__device__ __forceinline__ void attend_quarter(const bf16* q, int rows, char* keys, char* scratch, int at, int end,
                                               float scale, bf16* partial, float* weights, int slots,
                                               Arrived arrived, Unseen unseen) {
  constexpr int BLOCKS = WIDTH / 32 / 2;  // of 32 values of k, in half of the width
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int GROUPS = S::COUNT / 16;
  const int part = warp / GROUPS, group = warp % GROUPS * 16;  // of the width; keys
  float* scores = reinterpret_cast<float*>(scratch);
  char* odds = scratch + S::SCORES;
  float* inverses = reinterpret_cast<float*>(odds + QUARTER * S::ODDS_PITCH);

  if (part < 2) {
    // Within 32 values of k, lane t has 8 t .. 8 t + 7 of either operand: a sum is the same in any order.
    uint4 low[BLOCKS], high[BLOCKS];
    const bf16* from = q + part * (WIDTH / 2) + t * 8;
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
      low[n] = *reinterpret_cast<const uint4*>(from + min(g, rows - 1) * WIDTH + n * 32);
      high[n] = *reinterpret_cast<const uint4*>(from + min(g + 8, rows - 1) * WIDTH + n * 32);
    }
    arrived();
    const int key = g / 2 + g % 2 * 4;  // column g of the products: so that two rows of 64 bytes share no bank
    float d[2][2][4] = {};
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
      const int block = part * BLOCKS + n;
      const uint32_t a[4] = {low[n].x, high[n].x, low[n].y, high[n].y};
      const uint32_t b[4] = {low[n].z, high[n].z, low[n].w, high[n].w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const char* row = keys + S::place(group + i * 8 + key) + block / 2 * S::STRIDE;
        const uint4 k = *reinterpret_cast<const uint4*>(row + ((block % 2 * 4 + t) ^ key) * 16);
        mma(d[i][0], a, k.x, k.y, bf16());
        mma(d[i][1], b, k.z, k.w, bf16());
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = scores + (part * QUARTER + g) * S::PITCH + group + i * 8 + t;
      to[0] = d[i][0][0] + d[i][1][0], to[4] = d[i][0][1] + d[i][1][1];
      to[8 * S::PITCH] = d[i][0][2] + d[i][1][2], to[8 * S::PITCH + 4] = d[i][0][3] + d[i][1][3];
    }
  }
  named_sync(3, 256);
  arrived();  // for those who have not multiplied

  // A row's scores by 16 threads.
  const int row = threadIdx.x / 16, first = threadIdx.x % 16 * 4, seen = unseen(row) - at;
  float s[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, top = -INFINITY, sum = 0;
  if (first < S::COUNT) {
    const float4 u = *reinterpret_cast<const float4*>(scores + row * S::PITCH + first);
    const float4 v = *reinterpret_cast<const float4*>(scores + (QUARTER + row) * S::PITCH + first);
    s[0] = u.x + v.x, s[1] = u.y + v.y, s[2] = u.z + v.z, s[3] = u.w + v.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i >= seen) s[i] = -INFINITY;
    top = fmaxf(top, s[i]);
  }
#pragma unroll
  for (int i = 1; i < 16; i <<= 1) top = fmaxf(top, __shfl_xor_sync(EVERYONE, top, i));
  top *= scale;
  const float base = top == -INFINITY ? 0 : top;
#pragma unroll
  for (float& x : s) sum += x = power_of_two(fmaf(x, scale, -base));
#pragma unroll
  for (int i = 1; i < 16; i <<= 1) sum += __shfl_xor_sync(EVERYONE, sum, i);
  if (first < S::COUNT) {
    uint2* to = reinterpret_cast<uint2*>(odds + row * S::ODDS_PITCH + first * 2);
    *to = make_uint2(narrow(s[0], s[1]), narrow(s[2], s[3]));
  }
  if (first == 0) {
    inverses[row] = sum > 0 ? __frcp_rn(sum) : 0;
    weights[row * slots] = top + __log2f(sum);
  }
  // Past the end lies anything, nan included, and a probability of 0 does not hide that.
  for (int i = threadIdx.x; i < (S::COUNT - (end - at)) * (LATENT / 8); i += 256) {
    const int past = end - at + i / (LATENT / 8), piece = i % (LATENT / 8);
    *reinterpret_cast<uint4*>(keys + S::place(past) + piece / 8 * S::STRIDE + piece % 8 * 16) = uint4{};
  }
  named_sync(3, 256);

  // A warp's columns are those of one chunk of the tile, which no other warp reads any more.
  char* const own = keys + warp * S::STRIDE;
  float o[8][4] = {};
#pragma unroll
  for (int k = 0; k < S::COUNT; k += 16) {
    uint32_t a[4];
    load_matrices<false>(a, odds + lane % 16 * S::ODDS_PITCH + (k + lane / 16 * 8) * 2);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t b[4];
      const int position = k + lane % 16;
      load_matrices<true>(b, own + S::place(position) + (((j + lane / 16) ^ (position & 7)) * 16));
      mma(o[j], a, b[0], b[1], bf16());
      mma(o[j + 1], a, b[2], b[3], bf16());
    }
  }
  const float by[2] = {inverses[g], inverses[g + 8]};
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const auto pair = [&](int n, int i) { return narrow(o[n][i] * by[i / 2], o[n][i + 1] * by[i / 2]); };
    store_matrices(own, 0, j * 8, pair(j, 0), pair(j, 2), pair(j + 1, 0), pair(j + 1, 2));
  }
  shared_writes_visible();
  __syncwarp();
  if (elected()) {
    bulk_store(partial + warp * (ROWS * 64), own, rows * 128);
    bulk_stores_read();
  }
}

// Tiles of one token of H heads, 48 positions each; a CTA for each 16 heads, or for 8 if there are no more. Memory and
// registers are what
// output_kernel leaves (166 KB, and 48 of each of 576 threads). Registers are claimed beyond need, more than half of a
// processor's: of two CTAs on one, neither would have the next kernel's beside it, and others would idle.
using Few = Short<48, GROUP>;
constexpr int FEW_THREADS = 256, FEW_BYTES = Few::TILE + Few::SCRATCH, FEW_REGISTERS = 136;
static_assert(FEW_BYTES <= 64 * 1024);
static_assert(2 * FEW_REGISTERS * FEW_THREADS > 65536 && FEW_REGISTERS * FEW_THREADS + 48 * 576 <= 65536);

// `latents` brings GROUP rows of the cache, all chunks.
__global__ void __maxnreg__(FEW_REGISTERS)
    attend_few(const __grid_constant__ CUtensorMap latents, const bf16* rows, const int* tables, const int* query_start,
               const int* context, bf16* partials, float* weights, int H, int block, int slots, float scale) {
  constexpr int GROUP_BYTES = GROUP * WIDTH * 2;
  extern __shared__ __align__(1024) char few_memory[];
  __shared__ uint64_t full;
  let_successor_start();
  registers_give<FEW_REGISTERS>();  // gives none: the compiler takes no fewer then
  const int warp = __shfl_sync(EVERYONE, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int quarters = ceil_div(H, QUARTER), range = blockIdx.x / quarters, skipped = blockIdx.x % quarters * QUARTER;
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    barriers_visible();
    prefetch_map(&latents);
  }
  const int token = kept(query_start), count = kept(query_start + 1) - token, known = count > 0 ? kept(context) : 0;
  // As share_work splits it, of which there is enough for all.
  const int size = known > 0 ? (quotient_up(known, quotient_up(known, Few::COUNT)) + GROUP - 1) & -GROUP : 0;
  const int at = range * size, end = min(at + size, known), groups = ceil_div(max(end - at, 0), GROUP);
  if (at >= known) {  // that all predecessors have finished when this kernel has is up to the others
    if (blockIdx.x == 0) wait_for_predecessor();
    return;
  }
  __syncthreads();
  if (warp == 7) {  // one of the two that have no scores to make
    const int position = at + min(lane, groups - 1) * GROUP, page = quotient(position, block);
    const int found = kept(tables + page) * block + (position - page * block);
    if (elected()) barrier_expect(&full, groups * GROUP_BYTES);
    for (int n = 0; n < groups; ++n) {
      if (at + (n + 1) * GROUP >= known) wait_for_predecessor();  // which may write the last
      const int row = __shfl_sync(EVERYONE, found, n);
      if (elected()) tensor_load(few_memory + n * GROUP_BYTES, &latents, 0, row, 0, &full);
      __syncwarp();
    }
  }
  wait_for_predecessor();
  const bf16* q = rows + (static_cast<int64_t>(token) * H + skipped) * WIDTH;
  attend_quarter<Few>(q, min(QUARTER, H), few_memory, few_memory + Few::TILE, at, end, scale,
                      partials + static_cast<int64_t>(range) * PARTIAL + skipped * 64,
                      weights + skipped * slots + range, slots, [&] { barrier_wait(&full, 0); },
                      [&](int) { return end; });
}

}  // namespace mla
