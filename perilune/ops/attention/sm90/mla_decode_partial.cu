// Combines the outputs of a context's ranges (mla_decode.cu) to the output over one rank's part of the KV cache, and
// computes its log-sum-exp, with which mla_decode_merge weighs the ranks' parts. Contract in mla_decode_partial.py.
#include "attention/sm90/split_kv_schedule.cuh"

using namespace mla;

namespace {

constexpr int WARPS = 8, THREADS = WARPS * 32, AT_ONCE = 4;  // AT_ONCE: ranges that a warp reads together
constexpr int FEW_TOKENS = 8;  // Max tokens for which all warps of a CTA share a head: it then has many ranges.

struct Args {
  const bf16* partials;  // [ctas][LATENT / 64][ROWS][64], swizzled
  const float* weights;  // [ROWS][ctas]
  const int *query_start, *context;
  bf16* o;     // [groups][T][H / groups][LATENT], groups o_step values apart
  float* lse;  // [groups][T][H / groups], groups lse_step values apart
  int64_t o_step, lse_step;
  int ctas, T, H, groups, least;  // T requests, one token each
};

// SHARED warps take the ranges of a head in turn, so a CTA combines WARPS / SHARED heads of a token.
template <int SHARED>
__global__ void __launch_bounds__(THREADS) weigh(const Args a) {
  __shared__ Found found;
  __shared__ float sums[SHARED > 1 ? WARPS : 1][LATENT];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
  const int head = blockIdx.x * (WARPS / SHARED) + warp / SHARED;
  if (warp == 0) share_work<true>(a.query_start, a.context, a.T, a.H, a.ctas, a.least, &found, token, 1);
  __syncthreads();
  wait_for_predecessor();
  let_successor_start();  // after the wait: the next kernel may read cache rows before its own wait
  if (head >= a.H) return;
  const int index = found.index * a.H + head, row = index % ROWS, slot = found.first + index / ROWS * found.ranges;
  const int ranges = found.ranges;
  const float* weight = a.weights + row * a.ctas + slot;
  // This lane combines latent values 8 lane .. + 7 and 256 + 8 lane .. + 7.
  const bf16* partial = a.partials + static_cast<int64_t>(slot) * PARTIAL + lane / 8 * (ROWS * 64) + row * 64 +
                        ((lane % 8) ^ (row & 7)) * 8;
  float top = -INFINITY, total = 0;
  for (int s = lane; s < ranges; s += 32) top = fmaxf(top, weight[s]);
  top = warp_max(top);
  const float base = top == -INFINITY ? 0 : top;
  for (int s = lane; s < ranges; s += 32) total += power_of_two(weight[s] - base);
  total = warp_sum(total);
  const float inverse = total > 0 ? 1 / total : 0;
  float sum[16] = {};
#pragma unroll 1
  for (int first = warp % SHARED; first < ranges; first += SHARED * AT_ONCE) {
    uint4 x[AT_ONCE][2];
    float w[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int s = first + j * SHARED;
      const uint4* from = reinterpret_cast<const uint4*>(partial + static_cast<int64_t>(s) * PARTIAL);
      x[j][0] = s < ranges ? from[0] : uint4{};
      x[j][1] = s < ranges ? from[ROWS * 256 / 8] : uint4{};
      w[j] = s < ranges ? weight[s] : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const float share = power_of_two(w[j] - base) * inverse;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t words[4] = {x[j][half].x, x[j][half].y, x[j][half].z, x[j][half].w};
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          const float2 y = widen(words[l]);
          sum[half * 8 + l * 2] += share * y.x;
          sum[half * 8 + l * 2 + 1] += share * y.y;
        }
      }
    }
  }
  const int own = a.H / a.groups;
  const int to = token * own + head % own, group = head / own;
  if (lane == 0 && warp % SHARED == 0) a.lse[group * a.lse_step + to] = total > 0 ? top + log2f(total) : -INFINITY;
  uint32_t* out = reinterpret_cast<uint32_t*>(a.o + group * a.o_step + static_cast<int64_t>(to) * LATENT);
  if constexpr (SHARED == 1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* y = sum + half * 8;
      reinterpret_cast<uint4*>(out)[half * 32 + lane] =
          make_uint4(narrow(y[0], y[1]), narrow(y[2], y[3]), narrow(y[4], y[5]), narrow(y[6], y[7]));
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int l = 0; l < 8; l += 4) {
        const float* y = sum + half * 8 + l;
        *reinterpret_cast<float4*>(&sums[warp][half * 256 + lane * 8 + l]) = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
    __syncthreads();
    float low = 0, high = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float2 y = *reinterpret_cast<const float2*>(&sums[w][threadIdx.x * 2]);
      low += y.x, high += y.y;
    }
    out[threadIdx.x] = narrow(low, high);
  }
}

}  // namespace

// partials, weights: from mla_decode without W_UV, for T tokens of H heads in `groups` groups. 8 divides o_step.
API int mla_decode_partial(const void* partials, const void* weights, const void* query_start, const void* context,
                           void* o, int64_t o_step, void* lse, int64_t lse_step, int64_t ctas, int64_t T, int64_t H,
                           int64_t groups, int64_t least, void* stream) {
  const Args a = {static_cast<const bf16*>(partials), static_cast<const float*>(weights),
                  static_cast<const int*>(query_start), static_cast<const int*>(context),
                  static_cast<bf16*>(o), static_cast<float*>(lse), o_step, lse_step, static_cast<int>(ctas),
                  static_cast<int>(T), static_cast<int>(H), static_cast<int>(groups), static_cast<int>(least)};
  const unsigned tokens = static_cast<unsigned>(T), heads = static_cast<unsigned>(H);
  if (T <= FEW_TOKENS) return launch(weigh<WARPS>, dim3(heads, tokens), dim3(THREADS), 0, stream, 1, a);
  return launch(weigh<1>, dim3((heads + WARPS - 1) / WARPS, tokens), dim3(THREADS), 0, stream, 1, a);
}
