// The combine step of split-KV (flash decoding), fused with W_UV: a cluster of CTAs per head and 32 tokens. The splits
// ("ranges") are those of mla_decode.cu, or the parts of a KV cache that is sharded over ranks.
//
// For its part of the latent, a CTA adds the ranges' outputs, weighted by their log-sum-exps, and multiplies the sum by
// its rows of W_UV (loaded before the wait). The cluster adds the products of its CTAs.
#pragma once
#include "attention/sm90/split_kv_schedule.cuh"
#include "cuda/wgmma.cuh"

namespace mla {

constexpr int TOKENS = 32, COMBINE_THREADS = 256;

// Grid: x = CLUSTER CTAs per head, each with LATENT / CLUSTER latents; y = 32 tokens, at most MINE per warp. With up to
// 4 tokens in all, several warps share a token's ranges. AT_ONCE: ranges of a token that a warp reads together. RANKS:
// the ranges are the parts of `ctas` ranks, each with outputs [T, H, LATENT] and log-sum-exps [T, H]; the ranks'
// outputs are `least` elements apart, their log-sum-exps `B` elements apart; query_start and context are null.
template <int CLUSTER, int MINE, int AT_ONCE, bool RANKS>
__global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const bf16* partials, const float* weights, const int* query_start, const int* context, const bf16* w_uv,
            bf16* out, int ctas, int B, int T, int H, int least) {
  constexpr int K = LATENT / CLUSTER, LANES = K / 8, SIDE = 32 / LANES, STRIDE = K + 32, OWN = VALUE / CLUSTER;
  constexpr int WARPS = COMBINE_THREADS / 32;
  constexpr bool few = MINE <= 2;
  using Weights = HeadWeights<K, VALUE>;
  extern __shared__ __align__(1024) char shared[];
  bf16* latent = reinterpret_cast<bf16*>(shared + Weights::BYTES);       // [TOKENS][STRIDE]
  float* products = reinterpret_cast<float*>(latent + TOKENS * STRIDE);  // [CLUSTER][TOKENS][OWN], written by all
  float* piecewise = products + TOKENS * VALUE;                          // [WARPS][K]
  __shared__ Found found[TOKENS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, from = rank * K;
  int first = blockIdx.y * TOKENS, tokens = min(TOKENS, T - first);
  cluster_arrive();
  Weights values{shared};
  values.load(w_uv + (static_cast<int64_t>(head) * LATENT + from) * VALUE, VALUE, threadIdx.x, COMBINE_THREADS);
  copies_commit();
  if constexpr (!RANKS) {
    if (warp == 0) share_work<true>(query_start, context, B, H, ctas, least, found, first, tokens);
    __syncthreads();
  }

  int sharing = MINE > 1 || tokens > 4 ? 1 : tokens > 2 ? 2 : tokens > 1 ? 4 : 8;
  int column = from + lane % LANES * 8, side = lane / LANES;
  auto token_of = [&](int i) { return MINE == 1 ? warp / sharing : warp + WARPS * i; };
  int ranges[MINE], longest = 0;
  const float* weight[MINE];
  const bf16* partial[MINE];
  auto weight_of = [&](int i, int s) { return weight[i][RANKS ? s * B : s]; };
  auto partial_of = [&](int i, int s) {
    return *reinterpret_cast<const uint4*>(partial[i] + static_cast<int64_t>(s) * (RANKS ? least : PARTIAL));
  };
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    int token = token_of(i);
    if constexpr (RANKS) {
      const int row = (first + min(token, tokens - 1)) * H + head;
      ranges[i] = token < tokens ? ctas : 0;
      longest = ctas;
      weight[i] = weights + row;
      partial[i] = partials + static_cast<int64_t>(row) * LATENT + column;
      continue;
    }
    Found f = token < tokens ? found[token] : Found{};
    int row = f.index * H + head, slot = f.first + row / ROWS * f.ranges;
    row %= ROWS;
    ranges[i] = f.ranges;
    longest = max(longest, f.ranges);
    weight[i] = weights + row * ctas + slot;
    partial[i] = partials + static_cast<int64_t>(slot) * PARTIAL + column / 64 * (ROWS * 64) + row * 64 +
                 ((column / 8) % 8 ^ (row & 7)) * 8;
  }
  wait_for_predecessor();
  let_successor_start();  // after the wait: the next kernel may read cache rows before its own wait

  int step = SIDE * sharing, s0 = MINE == 1 ? warp % sharing * SIDE + side : side;
  uint4 x[MINE][AT_ONCE];
  float share[MINE][AT_ONCE], top[MINE], inverse[MINE], sum[MINE][8] = {};
  auto read = [&] {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (j && s0 - side + j * step >= longest) break;
        int s = s0 + j * step;
        bool valid = s < ranges[i];
        x[i][j] = valid ? partial_of(i, s) : uint4{};
        share[i][j] = valid ? weight_of(i, s) : -INFINITY;
      }
    }
  };
  read();
  float v[MINE][few ? MAX_RANGES / 32 : 1];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
#pragma unroll
    for (int j = 0; j < (few ? MAX_RANGES / 32 : 1); ++j) {
      v[i][j] = lane + j * 32 < ranges[i] ? weight_of(i, lane + j * 32) : -INFINITY;
    }
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    top[i] = -INFINITY;
#pragma unroll
    for (float w : v[i]) top[i] = fmaxf(top[i], w);
    if (!few) {
#pragma unroll 1
      for (int s = lane + 32; s < ranges[i]; s += 32) top[i] = fmaxf(top[i], weight_of(i, s));
    }
    top[i] = warp_max(top[i]);
    float total = 0;
#pragma unroll
    for (float w : v[i]) total += w == -INFINITY ? 0 : power_of_two(w - top[i]);
    if (!few) {
#pragma unroll 1
      for (int s = lane + 32; s < ranges[i]; s += 32) total += power_of_two(weight_of(i, s) - top[i]);
    }
    total = warp_sum(total);
    inverse[i] = total > 0 ? 1 / total : 0;
  }
#pragma unroll 1
  while (s0 < longest) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (j && s0 - side + j * step >= longest) break;
        float w = share[i][j] == -INFINITY ? 0 : power_of_two(share[i][j] - top[i]) * inverse[i];
        uint32_t words[4] = {x[i][j].x, x[i][j].y, x[i][j].z, x[i][j].w};
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          float2 y = widen(words[l]);
          sum[i][l * 2] += w * y.x;
          sum[i][l * 2 + 1] += w * y.y;
        }
      }
    }
    s0 += step * AT_ONCE;
    if (s0 < longest) read();
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int l = LANES; l < 32; l <<= 1) sum[i][j] += __shfl_xor_sync(EVERYONE, sum[i][j], l);
    }
  }
  if (MINE == 1 && sharing > 1) {
    if (lane < LANES) {
      float4* to = reinterpret_cast<float4*>(piecewise + warp * K + lane * 8);
      to[0] = {sum[0][0], sum[0][1], sum[0][2], sum[0][3]};
      to[1] = {sum[0][4], sum[0][5], sum[0][6], sum[0][7]};
    }
  } else if (lane < LANES) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      uint4 y = {narrow(sum[i][0], sum[i][1]), narrow(sum[i][2], sum[i][3]), narrow(sum[i][4], sum[i][5]),
                 narrow(sum[i][6], sum[i][7])};
      if (token_of(i) < tokens) *reinterpret_cast<uint4*>(latent + token_of(i) * STRIDE + lane * 8) = y;
    }
  }
  copies_wait<0>();
  __syncthreads();
  uint32_t a[K / 16][4];
#pragma unroll
  for (int k = 0; k < K / 16; ++k) values.fragment(a[k], k, warp * 16);
  if (MINE == 1 && sharing > 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * K; i += COMBINE_THREADS) {
      float y = 0;
#pragma unroll 1
      for (int w = 0; w < sharing; ++w) y += piecewise[(i / K * sharing + w) * K + i % K];
      latent[i / K * STRIDE + i % K] = __float2bfloat16(y);
    }
    __syncthreads();
  }
  cluster_wait();  // the other CTAs have started, so their shared memory may be written
  int column_out = warp * 16 + lane / 4;
  uint32_t there = address_in(products + rank * (TOKENS * OWN) + column_out % OWN, column_out / OWN);
#pragma unroll 1
  for (int group = 0; group * 8 < tokens; ++group) {
    float d[2][4] = {};
#pragma unroll
    for (int k = 0; k < K / 32; ++k) {
      uint4 y = *reinterpret_cast<const uint4*>(latent + (group * 8 + lane / 4) * STRIDE + k * 32 + lane % 4 * 8);
      mma(d[0], a[k * 2], y.x, y.y, bf16());
      mma(d[1], a[k * 2 + 1], y.z, y.w, bf16());
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int token = group * 8 + lane % 4 * 2 + i % 2;
      if (token < tokens) store_in(there + (token * OWN + i / 2 * 8) * 4, d[0][i] + d[1][i]);
    }
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * OWN; i += COMBINE_THREADS) {
    float y = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) y += products[r * (TOKENS * OWN) + i];
    out[(static_cast<int64_t>(first + i / OWN) * H + head) * VALUE + rank * OWN + i % OWN] = __float2bfloat16(y);
  }
}

template <int CLUSTER, bool RANKS>
int start_combine(const void* partials, const void* weights, const void* query_start, const void* context,
                  const void* w_uv, void* out, int64_t ctas, int64_t B, int64_t T, int64_t H, int64_t least,
                  void* stream) {
  constexpr int K = LATENT / CLUSTER;
  constexpr size_t bytes =
      HeadWeights<K, VALUE>::BYTES + TOKENS * (K + 32) * 2 + TOKENS * VALUE * 4 + COMBINE_THREADS / 32 * K * 4;
  dim3 grid(H * CLUSTER, (T + TOKENS - 1) / TOKENS);
  // Above 32 tokens, reading more than one range of each token at once was slower: 16 us instead of 10.
  auto kernel = T <= 8    ? combine<CLUSTER, 1, 16, RANKS>
                : T <= 16 ? combine<CLUSTER, 2, 8, RANKS>
                : T <= 32 ? combine<CLUSTER, 4, 4, RANKS>
                          : combine<CLUSTER, 4, 1, RANKS>;
  return launch(kernel, grid, dim3(COMBINE_THREADS), bytes, stream, CLUSTER, static_cast<const bf16*>(partials),
                static_cast<const float*>(weights), static_cast<const int*>(query_start),
                static_cast<const int*>(context), static_cast<const bf16*>(w_uv), static_cast<bf16*>(out), ctas, B, T,
                H, least);
}

template <bool RANKS>
int combine_ranges(const void* partials, const void* weights, const void* query_start, const void* context,
                   const void* w_uv, void* out, int64_t ctas, int64_t B, int64_t T, int64_t H, int64_t least,
                   void* stream) {
  auto start = H >= 48 ? start_combine<2, RANKS> : H >= 24 ? start_combine<4, RANKS> : start_combine<8, RANKS>;
  return start(partials, weights, query_start, context, w_uv, out, ctas, B, T, H, least, stream);
}

}  // namespace mla
