// Absorbed MLA over one tile of 64 latents for a quarter of its query rows: where contexts are so short that most
// processors would idle, four of them share a tile. What takes time then is not bytes but 64 rows in one processor's
// hands: their queries, products and outputs.
#pragma once
#include "mla_work.cuh"
#include "wgmma.cuh"

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

constexpr int SCORES_BYTES = 2 * QUARTER * KEYS * 4;  // by halves of the width
constexpr int ODDS_PITCH = KEYS * 2 + 16;             // of a row's probabilities

// By warps 0 to 7, once the predecessors have finished. `keys` is the tile, [WIDTH / 64][KEYS][64] swizzled, there when
// `arrived()` returns; `scratch` 16 KB of shared memory; q the first of `rows` rows; unseen(r): row r sees positions
// before it. at: the tile's first position, end: its last's successor. partial, weights: of the first row, with `slots`
// weights to a row.
template <typename Arrived, typename Unseen>
__device__ __forceinline__ void attend_quarter(const bf16* q, int rows, char* keys, char* scratch, int at, int end,
                                               float scale, bf16* partial, float* weights, int slots,
                                               Arrived arrived, Unseen unseen) {
  constexpr int BLOCKS = WIDTH / 32 / 2;  // of 32 values of k, in half of the width
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp / 4, group = warp % 4 * 16;  // of the width; keys
  float* scores = reinterpret_cast<float*>(scratch);
  char* odds = scratch + SCORES_BYTES;
  float* inverses = reinterpret_cast<float*>(odds + QUARTER * ODDS_PITCH);

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
    const uint32_t a[4] = {low[n].x, high[n].x, low[n].y, high[n].y}, b[4] = {low[n].z, high[n].z, low[n].w, high[n].w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* row = keys + block / 2 * (KEYS * 128) + (group + i * 8 + key) * 128;
      const uint4 k = *reinterpret_cast<const uint4*>(row + ((block % 2 * 4 + t) ^ key) * 16);
      mma(d[i][0], a, k.x, k.y, bf16());
      mma(d[i][1], b, k.z, k.w, bf16());
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* to = scores + (part * QUARTER + g) * KEYS + group + i * 8 + t;
    to[0] = d[i][0][0] + d[i][1][0], to[4] = d[i][0][1] + d[i][1][1];
    to[8 * KEYS] = d[i][0][2] + d[i][1][2], to[8 * KEYS + 4] = d[i][0][3] + d[i][1][3];
  }
  named_sync(3, 256);

  // A row's 64 scores by 16 threads.
  const int row = threadIdx.x / 16, first = threadIdx.x % 16 * 4, seen = unseen(row) - at;
  const float4 u = *reinterpret_cast<const float4*>(scores + row * KEYS + first);
  const float4 v = *reinterpret_cast<const float4*>(scores + (QUARTER + row) * KEYS + first);
  float s[4] = {u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w}, top = -INFINITY, sum = 0;
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
  *reinterpret_cast<uint2*>(odds + row * ODDS_PITCH + first * 2) = make_uint2(narrow(s[0], s[1]), narrow(s[2], s[3]));
  if (first == 0) {
    inverses[row] = sum > 0 ? __frcp_rn(sum) : 0;
    weights[row * slots] = top + __log2f(sum);
  }
  // Past the end lies anything, nan included, and a probability of 0 does not hide that.
  for (int i = threadIdx.x; i < (KEYS - (end - at)) * (LATENT / 8); i += 256) {
    const int past = end - at + i / (LATENT / 8), piece = i % (LATENT / 8);
    *reinterpret_cast<uint4*>(keys + piece / 8 * (KEYS * 128) + past * 128 + piece % 8 * 16) = uint4{};
  }
  named_sync(3, 256);

  // A warp's columns are those of one chunk of the tile.
  float o[8][4] = {};
#pragma unroll
  for (int k = 0; k < KEYS; k += 16) {
    uint32_t a[4];
    load_matrices<false>(a, odds + lane % 16 * ODDS_PITCH + (k + lane / 16 * 8) * 2);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t b[4];
      const int position = k + lane % 16;
      load_matrices<true>(b, keys + warp * (KEYS * 128) + position * 128 + (((j + lane / 16) ^ (position & 7)) * 16));
      mma(o[j], a, b[0], b[1], bf16());
      mma(o[j + 1], a, b[2], b[3], bf16());
    }
  }
  const float by[2] = {inverses[g], inverses[g + 8]};
  char* const own = keys + warp * (KEYS * 128);  // its chunk of the tile, which no other warp reads any more
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

}  // namespace mla
