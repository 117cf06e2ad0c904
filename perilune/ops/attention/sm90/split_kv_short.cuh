// Absorbed MLA for short contexts. attend_quarter: one tile of at most 64 latents, for 16 of its 64 query rows. Four
// CTAs share a tile, because short contexts have few ranges: most SMs would idle, and the others would spend their time
// on 64 rows (queries, products, outputs), not on loading latents.
//
// attend_few: attention of one token with a narrow block table, at most 48 latents of a bf16 cache per range or 192 of
// a packed cache (two passes of 96). On each SM, a CTA of the next kernel (mla_decode_output) is then co-resident and
// loads weights while this kernel waits for its queries and computes.
#pragma once
#include "attention/sm90/split_kv_schedule.cuh"
#include "cuda/e4m3.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma.cuh"

namespace mla {

// Stores four 8 x 8 matrices to a 128-byte swizzled [rows][64] chunk: a at (row, column), b 8 rows lower, c 8 columns
// further, d both.
__device__ __forceinline__ void store_matrices(char* chunk, int row, int column, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  int lane = threadIdx.x % 32, r = row + lane % 16, piece = column / 8 + lane / 16;
  uint32_t to = shared_address(chunk) + r * 128 + ((piece ^ (r & 7)) * 16);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Shared memory of attend_quarter: a tile of N latents, [N / TOGETHER][WIDTH / 64][TOGETHER][64] swizzled, and SCRATCH
// bytes for scores and probabilities.
template <int N, int TOGETHER>
struct Short {
  static constexpr int COUNT = N, TILE = N * WIDTH * 2, STRIDE = TOGETHER * 128;  // bytes of a tile; of one chunk
  static constexpr int PITCH = N == KEYS ? N : N + 4;       // floats from row to row of scores
  static constexpr int ODDS_PITCH = N * 2 + 16;             // bytes from row to row of probabilities
  static constexpr int SCORES = 2 * QUARTER * PITCH * 4;
  static constexpr int SCRATCH = SCORES + QUARTER * (ODDS_PITCH + 4);
  static_assert(N % 16 == 0 && N <= KEYS && TOGETHER % 16 == 0);
  __device__ static int place(int position) {
    return position / TOGETHER * (TOGETHER * WIDTH * 2) + position % TOGETHER * 128;
  }
};

// Called by warps 0 to 7 after the PDL wait. q: the first of `rows` query rows. keys: the tile, loaded when arrived()
// returns, overwritten here; scratch: S::SCRATCH bytes of shared memory. The tile holds positions at .. end - 1, of
// which row r sees those before unseen(r). partial, weights: output and log-sum-exp of the first row; the next row's
// weight is `slots` floats further.
template <typename S, typename Arrived, typename Unseen>
__device__ __forceinline__ void attend_quarter(const bf16* q, int rows, char* keys, char* scratch, int at, int end,
                                               float scale, bf16* partial, float* weights, int slots,
                                               Arrived arrived, Unseen unseen) {
  constexpr int BLOCKS = WIDTH / 32 / 2;  // blocks of 32 values of k in half of the width
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int GROUPS = S::COUNT / 16;
  const int part = warp / GROUPS, group = warp % GROUPS * 16;  // this warp's half of the width; first of its 16 keys
  float* scores = reinterpret_cast<float*>(scratch);
  char* odds = scratch + S::SCORES;
  float* inverses = reinterpret_cast<float*>(odds + QUARTER * S::ODDS_PITCH);

  if (part < 2) {
    // In each 32 values of k, lane t holds 8 t .. 8 t + 7 of both operands. mma assigns other k to the lanes, but a dot
    // product may permute k.
    uint4 low[BLOCKS], high[BLOCKS];
    const bf16* from = q + part * (WIDTH / 2) + t * 8;
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
      low[n] = *reinterpret_cast<const uint4*>(from + min(g, rows - 1) * WIDTH + n * 32);
      high[n] = *reinterpret_cast<const uint4*>(from + min(g + 8, rows - 1) * WIDTH + n * 32);
    }
    arrived();
    const int key = g / 2 + g % 2 * 4;  // the key of column g: the two rows that 8 lanes read then share no bank
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
  arrived();  // warps that skipped the products read the tile below, too

  // 16 threads share a row of scores.
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
  // Latents past the end may hold NaN, and 0 x NaN is NaN, so set them to zero.
  for (int i = threadIdx.x; i < (S::COUNT - (end - at)) * (LATENT / 8); i += 256) {
    const int past = end - at + i / (LATENT / 8), piece = i % (LATENT / 8);
    *reinterpret_cast<uint4*>(keys + S::place(past) + piece / 8 * S::STRIDE + piece % 8 * 16) = uint4{};
  }
  named_sync(3, 256);

  // Warp w computes output columns 64 w .. + 63 from chunk w of the tile. No other warp reads this chunk from here on,
  // so the warp stages its output there.
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

// attend_few: one token of H heads, a CTA per range and 16 heads (or 8, if H is 8). Range i of n has groups i, i + n,
// i + 2 n .. of GROUP latents. This does not depend on the context's length, so table entries and the length are loaded
// in parallel. The successor may start once the loads of latents are issued: earlier, they would queue behind its
// weights. A CTA fits beside one of output_kernel, but claims over half of an SM's registers, more than it needs, so
// that no SM gets two: there would be no room for the next kernel's CTA there, and another SM would have none of
// attention's.
using Few = Short<48, GROUP>;
constexpr int FEW_THREADS = 256, FEW_REGISTERS = 136;
static_assert(2 * FEW_REGISTERS * FEW_THREADS > 65536 && FEW_REGISTERS * FEW_THREADS + 48 * 576 <= 65536);

// Shared memory of attend_packed. Packed latents (latent_cache.py) are loaded AT_ONCE groups at a time, per group
// [4][GROUP][128] e4m3 and the rope keys [GROUP][64] bf16, swizzled. Products with latents are in fp16, which
// represents every e4m3 value. Each query row is multiplied by a power of two, because fp16 has less range than bf16.
struct Packed {
  static constexpr int AT_ONCE = 6, COUNT = AT_ONCE * GROUP, ROPE_AT = GROUP * LATENT, BYTES = ROPE_AT + GROUP * ROPE * 2;
  static constexpr int Q_PITCH = WIDTH * 2 + 16, PITCH = COUNT + 4, ODDS_PITCH = COUNT * 2 + 16;
  static constexpr int Q_AT = AT_ONCE * BYTES, SCORES_AT = Q_AT + QUARTER * Q_PITCH;
  static constexpr int ODDS_AT = SCORES_AT + 2 * QUARTER * PITCH * 4, FACTORS_AT = ODDS_AT + QUARTER * ODDS_PITCH;
  static constexpr int ALL = FACTORS_AT + 2 * QUARTER * 4;
};
constexpr int FEW_BYTES = Few::TILE + Few::SCRATCH;
static_assert(FEW_BYTES <= 64 * 1024 && Packed::ALL <= 100 * 1024 && Packed::BYTES % 1024 == 0);

// Scores of this warp's 8 N keys, over this warp's half of the width. here: groups of keys in shared memory.
template <int N>
__device__ __forceinline__ void packed_scores(char* memory, uint64_t* full, int here, int phase) {
  using P = Packed;
  const int warp = threadIdx.x / 32, part = warp / 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int key = g / 2 + g % 2 * 4;  // the key of column g: the two rows that 8 lanes read then share no bank
  const char* q = memory + P::Q_AT + g * P::Q_PITCH;
  const char* row[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int eight = warp % 4 + i * 4, group = eight / 2;
    if (group < here) barrier_wait(&full[group], phase);
    row[i] = memory + group * P::BYTES + (eight % 2 * 8 + key) * 128;
  }
  float d[N][2][4] = {};
#pragma unroll 2
  for (int n = 0; n < 4; ++n) {  // 64 latents: lane t has 16 t .. 16 t + 15
    const int chunk = part * 2 + n / 2;
    uint4 a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const char* from = q + j % 2 * 8 * P::Q_PITCH + (part * 4 + n) * 128 + t * 32 + j / 2 * 16;
      a[j] = *reinterpret_cast<const uint4*>(from);
    }
    const uint32_t products[4][4] = {{a[0].x, a[1].x, a[0].y, a[1].y},
                                     {a[0].z, a[1].z, a[0].w, a[1].w},
                                     {a[2].x, a[3].x, a[2].y, a[3].y},
                                     {a[2].z, a[3].z, a[2].w, a[3].w}};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint4 k = *reinterpret_cast<const uint4*>(row[i] + chunk * GROUP * 128 + ((n % 2 * 4 + t) ^ key) * 16);
      const uint32_t words[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const uint2 b = e4m3::halves(words[s]);
        mma(d[i][s % 2], products[s], b.x, b.y, __half());
      }
    }
  }
  const uint4 low = *reinterpret_cast<const uint4*>(q + LATENT * 2 + (part * 4 + t) * 16);
  const uint4 high = *reinterpret_cast<const uint4*>(q + 8 * P::Q_PITCH + LATENT * 2 + (part * 4 + t) * 16);
  const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint4 k = *reinterpret_cast<const uint4*>(row[i] + P::ROPE_AT + ((part * 4 + t) ^ key) * 16);
    mma(d[i][0], a[0], k.x, k.y, bf16());
    mma(d[i][1], a[1], k.z, k.w, bf16());
    float* to = reinterpret_cast<float*>(memory + P::SCORES_AT) + (part * QUARTER + g) * P::PITCH + t +
                (warp % 4 + i * 4) * 8;
    to[0] = d[i][0][0] + d[i][1][0], to[4] = d[i][0][1] + d[i][1][1];
    to[8 * P::PITCH] = d[i][0][2] + d[i][1][2], to[8 * P::PITCH + 4] = d[i][0][3] + d[i][1][3];
  }
}

// As attend_quarter, for `have` packed latents. bring(n) issues the loads of groups n .. n + AT_ONCE - 1.
template <typename Bring>
__device__ __forceinline__ void attend_packed(const bf16* q, int rows, char* memory, uint64_t* full, int have,
                                              float scale, bf16* partial, float* weights, int slots, Bring bring) {
  using P = Packed;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = threadIdx.x / 16, own = threadIdx.x % 16;  // 16 threads share a row of queries, and of scores
  const float* scores = reinterpret_cast<const float*>(memory + P::SCORES_AT) + row * P::PITCH + own * 6;
  float* factors = reinterpret_cast<float*>(memory + P::FACTORS_AT);
  {
    const bf16* from = q + min(row, rows - 1) * WIDTH + own * 8;
    uint4 raw[5];
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      raw[i] = i < 4 || own < ROPE / 8 ? *reinterpret_cast<const uint4*>(from + i * 128) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      for (uint32_t pair : {raw[i].x, raw[i].y, raw[i].z, raw[i].w}) {
        most = max(most, max((pair & 0x7fff) << 16, pair & 0x7fff0000));
      }
    }
#pragma unroll
    for (int i = 1; i < 16; i <<= 1) most = max(most, __shfl_xor_sync(EVERYONE, most, i));
    const uint32_t exponent = min(268u - (most >> 23), 253u);  // the row's largest magnitude becomes 2^14 to 2^15
    const float by = __uint_as_float(exponent << 23);
    scale *= __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      uint32_t pairs[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (uint32_t& pair : pairs) {
        const float2 f = widen(pair);
        const __half2 h = __floats2half2_rn(f.x * by, f.y * by);
        pair = i < 4 ? *reinterpret_cast<const uint32_t*>(&h) : narrow(f.x * by, f.y * by);
      }
      if (i < 4 || own < ROPE / 8) {
        *reinterpret_cast<uint4*>(memory + P::Q_AT + row * P::Q_PITCH + (i * 128 + own * 8) * 2) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
  __syncthreads();
  float o[8][4] = {}, top = -INFINITY, sum = 0;
#pragma unroll 1
  for (int first = 0, phase = 0; first < have; first += P::COUNT, phase ^= 1) {
    const int left = have - first, here = min(ceil_div(left, GROUP), P::AT_ONCE);
    if (first > 0) {
      __syncthreads();
      shared_writes_visible();  // all reads of the previous latents come before the copies that overwrite them
      bring(first / GROUP);
    }
    if (here <= 2) {
      packed_scores<1>(memory, full, here, phase);
    } else if (here <= 4) {
      packed_scores<2>(memory, full, here, phase);
    } else {
      packed_scores<3>(memory, full, here, phase);
    }
    __syncthreads();
    for (int i = 0; i < here; ++i) barrier_wait(&full[i], phase);  // a warp has waited only for groups it multiplied
    float s[6], largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 6; i += 2) {
      const float2 u = *reinterpret_cast<const float2*>(scores + i);
      const float2 v = *reinterpret_cast<const float2*>(scores + QUARTER * P::PITCH + i);
      s[i] = own * 6 + i < left ? u.x + v.x : -INFINITY, s[i + 1] = own * 6 + i + 1 < left ? u.y + v.y : -INFINITY;
      largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
    }
#pragma unroll
    for (int i = 1; i < 16; i <<= 1) largest = fmaxf(largest, __shfl_xor_sync(EVERYONE, largest, i));
    const float before = top;
    top = fmaxf(top, largest * scale);
    const float base = top == -INFINITY ? 0 : top, factor = power_of_two(before - base);
    sum *= factor;
#pragma unroll
    for (float& x : s) sum += x = power_of_two(fmaf(x, scale, -base));
    uint32_t* odds = reinterpret_cast<uint32_t*>(memory + P::ODDS_AT + row * P::ODDS_PITCH + own * 12);
#pragma unroll
    for (int i = 0; i < 6; i += 2) {
      const __half2 h = __floats2half2_rn(s[i], s[i + 1]);
      odds[i / 2] = *reinterpret_cast<const uint32_t*>(&h);
    }
    if (left <= P::COUNT) {
      float all = sum;
#pragma unroll
      for (int i = 1; i < 16; i <<= 1) all += __shfl_xor_sync(EVERYONE, all, i);
      if (own == 0) {
        factors[QUARTER + row] = all > 0 ? __frcp_rn(all) : 0;
        weights[row * slots] = top + __log2f(all);
      }
      for (int i = threadIdx.x; i < (here * GROUP - left) * (LATENT / 16); i += 256) {  // 0 x NaN is NaN
        const int past = left + i / (LATENT / 16), piece = i % (LATENT / 16);
        char* to = memory + past / GROUP * P::BYTES + (piece / 8 * GROUP + past % GROUP) * 128 + piece % 8 * 16;
        *reinterpret_cast<uint4*>(to) = uint4{};
      }
    }
    if (own == 0) factors[row] = factor;
    __syncthreads();
    if (first > 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i / 4][i % 4] *= factors[g + i % 4 / 2 * 8];
    }
    // A warp computes 64 output columns. ldmatrix transposes pairs of bytes (two adjacent columns), so that one product
    // has even columns and the next one odd columns.
    const char* values = memory + warp / 2 * GROUP * 128 + lane % 16 * 128;
    const char* odd = memory + P::ODDS_AT + lane % 16 * P::ODDS_PITCH + lane / 16 * 16;
#pragma unroll 2
    for (int n = 0; n < here; ++n, values += P::BYTES, odd += 32) {
      uint32_t a[4];
      load_matrices<false>(a, odd);
#pragma unroll
      for (int piece = 0; piece < 4; piece += 2) {
        uint32_t b[4];
        load_matrices<true>(b, values + (((warp % 2 * 4 + piece + lane / 16) ^ (lane & 7)) * 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 low = e4m3::halves(__byte_perm(b[i * 2], 0, 0x3120));
          const uint2 high = e4m3::halves(__byte_perm(b[i * 2 + 1], 0, 0x3120));
          mma(o[(piece + i) * 2], a, low.x, high.x, __half());
          mma(o[(piece + i) * 2 + 1], a, low.y, high.y, __half());
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float by = factors[QUARTER + g + i * 8];
    if (g + i * 8 >= rows) break;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const float(&even)[4] = o[piece * 2], (&odd)[4] = o[piece * 2 + 1];
      bf16* to = partial + (warp * ROWS + g + i * 8) * 64 + ((piece * 2 + t / 2) ^ g) * 8 + t % 2 * 4;
      *reinterpret_cast<uint2*>(to) = make_uint2(narrow(even[i * 2] * by, odd[i * 2] * by),
                                                 narrow(even[i * 2 + 1] * by, odd[i * 2 + 1] * by));
    }
  }
}

// A box of `latents` has GROUP whole rows of a bf16 cache, or GROUP latents of a packed cache; a box of `ropes` has the
// rope keys of the latter.
template <bool PACKED>
__global__ void __maxnreg__(FEW_REGISTERS)
    attend_few(const __grid_constant__ CUtensorMap latents, const __grid_constant__ CUtensorMap ropes, const bf16* rows,
               const int* tables, const int* query_start, const int* context, bf16* partials, float* weights, int H,
               int M, int block, int slots, float scale) {
  constexpr int BYTES = PACKED ? Packed::BYTES : GROUP * WIDTH * 2, AT_ONCE = PACKED ? Packed::AT_ONCE : 3;
  static_assert(PACKED || AT_ONCE * GROUP == Few::COUNT);
  extern __shared__ __align__(1024) char few_memory[];
  __shared__ uint64_t full[AT_ONCE];
  registers_give<FEW_REGISTERS>();  // releases none: keeps the compiler from allocating fewer
  const int warp = __shfl_sync(EVERYONE, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int quarters = ceil_div(H, QUARTER), range = blockIdx.x / quarters, skipped = blockIdx.x % quarters * QUARTER;
  const int ranges = gridDim.x / quarters, position = (range + lane * ranges) * GROUP, page = quotient(position, block);
  int entry = 0;  // block of this lane's group; loaded before it is known whether the context reaches the group
  if (warp == 7 && page < M) entry = kept(tables + page);
  const int token = kept(query_start), next = kept(query_start + 1), there = kept(context);
  if (warp == 7) {  // with a bf16 cache, one of the two warps that compute no scores
    if (lane < AT_ONCE) barrier_init(&full[lane], 1);
    barriers_visible();
    if (elected()) prefetch_map(&latents);
    if (PACKED && elected()) prefetch_map(&ropes);
  }
  __syncthreads();
  const int known = next > token ? there : 0, all = ceil_div(max(known, 0), GROUP);
  if (range >= all) {  // no latents. CTA 0 always waits, so that this kernel does not end before its predecessors
    if (blockIdx.x == 0) wait_for_predecessor();
    return;
  }
  const int groups = quotient(all - 1 - range, ranges) + 1;
  const bool newest = range + (groups - 1) * ranges == all - 1;
  const int have = groups * GROUP - (newest ? all * GROUP - known : 0);
  const auto bring = [&](int first) {
    if (warp != 7) return;
    const int found = entry * block + (position - page * block), end = min(first + AT_ONCE, groups);
#pragma unroll 1
    for (int n = first; n < end; ++n) {
      if (newest && n == groups - 1) wait_for_predecessor();  // it may write the newest latent
      const int row = __shfl_sync(EVERYONE, found, n);
      char* to = few_memory + (n - first) * BYTES;
      if (elected()) {
        barrier_expect(&full[n - first], BYTES);
        tensor_load(to, &latents, 0, row, 0, &full[n - first]);
        if (PACKED) tensor_load(to + Packed::ROPE_AT, &ropes, 0, row, 0, &full[n - first]);
      }
      __syncwarp();
    }
  };
  bring(0);
  if (warp == 7) let_successor_start();
  wait_for_predecessor();
  const bf16* q = rows + (static_cast<int64_t>(token) * H + skipped) * WIDTH;
  bf16* partial = partials + static_cast<int64_t>(range) * PARTIAL + skipped * 64;
  float* weight = weights + skipped * slots + range;
  if constexpr (PACKED) {
    attend_packed(q, min(QUARTER, H), few_memory, full, have, scale, partial, weight, slots, bring);
  } else {
    const auto arrived = [&] {
      for (int n = 0; n < groups; ++n) barrier_wait(&full[n], 0);
    };
    attend_quarter<Few>(q, min(QUARTER, H), few_memory, few_memory + Few::TILE, 0, have, scale, partial, weight, slots,
                        arrived, [&](int) { return have; });
  }
}

}  // namespace mla
