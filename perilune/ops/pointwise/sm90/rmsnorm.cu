// rmsnorm of many rows, alone or after something is added to the residual stream. Contracts in rmsnorm.py,
// add_rmsnorm.py, linear/add_rmsnorm_quantize.py, moe/combine_add_rmsnorm.py and moe/combine_add_rmsnorm_quantize.py.
// A row belongs to a warp, or to a whole CTA, which keeps it in registers from its sum of squares to its result.
#include "cuda/token_scale.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8, THREADS = WARPS * 32;
// Added to x: nothing, a row of bf16, rows of floats, the weighted sum of rows of bf16, the same with columns in
// moe_int4_cluster.cuh's order.
enum Added { NOTHING, NARROW, WIDE, PAIRS, CLUSTER_PAIRS };
__host__ __device__ constexpr bool paired(Added added) { return added == PAIRS || added == CLUSTER_PAIRS; }
constexpr int BATCH = 2;  // rows of pairs that are loaded at once: with more, an SM has registers for one CTA only

struct Args {
  bf16* x;  // rows `stride` apart; the sum goes back to it
  int64_t stride;
  const void* added;  // [T, D] bf16, or [T, parts, D] float
  const bf16* w;
  void* y;  // [T, D] bf16
  int parts, T, D;
  float eps;
  // QUANTIZED: y is [T, D] e4m3, and `scales` [ceil(D / 128), scale_rows] has the scales of its groups.
  float* scales;
  int scale_rows;
  // PAIRS: `added` [M, D] has the results of pairs. A row adds `parts` of them, at `position` (below 0: none), times
  // `weights`; then `shared`, if not null.
  const int* position;   // [T, parts]
  const float* weights;  // [T, parts]
  const bf16* shared;    // [T, D]
};

// SHARE: warps of a row; EACH: pieces of 8 values of a thread. QUANTIZED: y is e4m3 with scales.
template <Added ADDED, int SHARE, int EACH, bool QUANTIZED>
__global__ void __launch_bounds__(THREADS, paired(ADDED) ? 2 : 0) rmsnorm_kernel(const Args a) {
  __shared__ float sums[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.x * (WARPS / SHARE) + warp / SHARE, place = threadIdx.x % (32 * SHARE);
  const int pieces = row < a.T ? a.D / 8 : 0;
  uint4 weight[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = place + i * 32 * SHARE;
    if (p < pieces) weight[i] = *reinterpret_cast<const uint4*>(a.w + 8 * p);
  }
  wait_for_predecessor();
  let_successor_start();
  bf16* x = a.x + row * a.stride;
  uint4 value[EACH];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = place + i * 32 * SHARE;
    if (p < pieces) value[i] = *reinterpret_cast<const uint4*>(x + 8 * p);
  }
  if constexpr (paired(ADDED)) {  // in the order of combine_kernel (moe/sm90/token_permute.cuh)
    float sum[EACH][8] = {};
    auto add = [&](int i, const uint4& v, float w, bool mixed) {
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float2 f = widen(words[n]);
        sum[i][mixed ? n : 2 * n] += w * f.x;
        sum[i][mixed ? n + 4 : 2 * n + 1] += w * f.y;
      }
    };
    const bool own = row < a.T && lane < a.parts;
    const int64_t pair = static_cast<int64_t>(row) * a.parts + lane;
    const int my_row = own ? a.position[pair] : -1;
    const float my_weight = own ? a.weights[pair] : 0.0f;
#pragma unroll 1
    for (int first = 0; first < a.parts; first += BATCH) {
      uint4 v[BATCH][EACH];
      float weight_of[BATCH];
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
        const int from = first + n < a.parts ? __shfl_sync(~0u, my_row, first + n) : -1;
        weight_of[n] = __shfl_sync(~0u, my_weight, first + n);
        const bf16* part = static_cast<const bf16*>(a.added) + static_cast<int64_t>(from) * a.D;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const int p = place + i * 32 * SHARE;
          v[n][i] = from >= 0 && p < pieces ? load16(part + 8 * p) : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
#pragma unroll
        for (int i = 0; i < EACH; i++) add(i, v[n][i], weight_of[n], ADDED == CLUSTER_PAIRS);
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int p = place + i * 32 * SHARE;
      if (a.shared && p < pieces) add(i, load16(a.shared + static_cast<int64_t>(row) * a.D + 8 * p), 1.0f, false);
      auto plus = [](uint32_t old, float low, float high) {
        const float2 v = widen(old);
        return narrow(v.x + low, v.y + high);
      };
      value[i] = make_uint4(plus(value[i].x, sum[i][0], sum[i][1]), plus(value[i].y, sum[i][2], sum[i][3]),
                            plus(value[i].z, sum[i][4], sum[i][5]), plus(value[i].w, sum[i][6], sum[i][7]));
    }
  }
  if (ADDED == WIDE) {
    float4 sum[EACH][2] = {};
    for (int part = 0; part < a.parts; part++) {
      const int64_t at = static_cast<int64_t>(row) * a.parts + part;
      const float4* from = static_cast<const float4*>(a.added) + at * (a.D / 4);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int p = place + i * 32 * SHARE;
        if (p >= pieces) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float4 v = from[2 * p + half];
          sum[i][half].x += v.x, sum[i][half].y += v.y, sum[i][half].z += v.z, sum[i][half].w += v.w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      auto plus = [](uint32_t pair, float low, float high) {
        const float2 v = widen(pair);
        return narrow(v.x + low, v.y + high);
      };
      const float4 low = sum[i][0], high = sum[i][1];
      value[i] = make_uint4(plus(value[i].x, low.x, low.y), plus(value[i].y, low.z, low.w),
                            plus(value[i].z, high.x, high.y), plus(value[i].w, high.z, high.w));
    }
  }
  if (ADDED == NARROW) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int p = place + i * 32 * SHARE;
      if (p >= pieces) continue;
      const bf16* from = static_cast<const bf16*>(a.added) + static_cast<int64_t>(row) * a.D;
      const uint4 v = *reinterpret_cast<const uint4*>(from + 8 * p);
      auto plus = [](uint32_t one, uint32_t other) {
        const float2 v = widen(one), w = widen(other);
        return narrow(v.x + w.x, v.y + w.y);
      };
      value[i] = make_uint4(plus(value[i].x, v.x), plus(value[i].y, v.y), plus(value[i].z, v.z), plus(value[i].w, v.w));
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = place + i * 32 * SHARE;
    if (p >= pieces) continue;
    if (ADDED != NOTHING) *reinterpret_cast<uint4*>(x + 8 * p) = value[i];
    for (uint32_t word : {value[i].x, value[i].y, value[i].z, value[i].w}) {
      const float2 v = widen(word);
      squares += v.x * v.x + v.y * v.y;
    }
  }
  squares = warp_sum(squares);
  if (SHARE > 1) {
    if (lane == 0) sums[warp] = squares;
    __syncthreads();
    squares = warp_sum(lane < SHARE ? sums[warp / SHARE * SHARE + lane] : 0.0f);
  }
  const float scale = rsqrtf(squares / a.D + a.eps);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = place + i * 32 * SHARE;
    if (!QUANTIZED && p >= pieces) continue;
    auto scaled = [scale](uint32_t pair, uint32_t weight) {
      const float2 v = widen(pair), w = widen(weight);
      return narrow(v.x * scale * w.x, v.y * scale * w.y);
    };
    uint4 y = {};
    if (p < pieces) {
      y = make_uint4(scaled(value[i].x, weight[i].x), scaled(value[i].y, weight[i].y), scaled(value[i].z, weight[i].z),
                     scaled(value[i].w, weight[i].w));
    }
    const int64_t at = static_cast<int64_t>(row) * a.D + 8 * p;
    if constexpr (QUANTIZED) {
      const float top = token_scale::top(token_scale::largest(y));
      if (p < pieces) *reinterpret_cast<uint2*>(static_cast<uint8_t*>(a.y) + at) = token_scale::rounded(y, top);
      if (p % 16 == 0 && p < a.D / 8) {  // rows past T: scale 0
        a.scales[static_cast<int64_t>(p / 16) * a.scale_rows + row] = row < a.T ? token_scale::scale(top) : 0.0f;
      }
    } else {
      *reinterpret_cast<uint4*>(static_cast<bf16*>(a.y) + at) = y;
    }
  }
}

template <Added ADDED, bool QUANTIZED = false>
int start(const Args& a, void* stream) {
  const int all = QUANTIZED ? a.scale_rows : a.T;
  auto go = [&](auto kernel, int rows) {
    return launch(kernel, dim3((all + rows - 1) / rows), dim3(THREADS), 0, stream, 1, a);
  };
  if (a.T == 0) return 0;
  if (a.D <= 1024) return go(rmsnorm_kernel<ADDED, 1, 4, QUANTIZED>, WARPS);
  if (a.D <= 2048) return go(rmsnorm_kernel<ADDED, 2, 4, QUANTIZED>, WARPS / 2);
  if (a.D <= 4096) return go(rmsnorm_kernel<ADDED, WARPS, 2, QUANTIZED>, 1);
  return go(rmsnorm_kernel<ADDED, WARPS, 4, QUANTIZED>, 1);
}

}  // namespace

// D is a multiple of 8 and at most 8,192; rows of x start at 16 bytes.
API int rmsnorm(const void* x, int64_t stride, const void* w, void* y, int64_t T, int64_t D, float eps, void* stream) {
  const Args a = {static_cast<bf16*>(const_cast<void*>(x)), stride, nullptr, static_cast<const bf16*>(w),
                  y, 0, static_cast<int>(T), static_cast<int>(D), eps};
  return start<NOTHING>(a, stream);
}

// residual [T, D] is updated. wide: x holds floats [T, parts, D], else bf16 [T, D].
API int add_rmsnorm(void* residual, const void* x, int64_t parts, int64_t wide, const void* w, void* y, int64_t T,
                    int64_t D, float eps, void* stream) {
  const Args a = {static_cast<bf16*>(residual), D, x, static_cast<const bf16*>(w), y,
                  static_cast<int>(parts), static_cast<int>(T), static_cast<int>(D), eps};
  return wide ? start<WIDE>(a, stream) : start<NARROW>(a, stream);
}

// As add_rmsnorm, with y [T, D] in e4m3 and scales [ceil(D / 128), scale_rows]; scale_rows is a multiple of 8.
API int add_rmsnorm_quantize(void* residual, const void* x, int64_t parts, int64_t wide, const void* w, void* y,
                             void* scales, int64_t scale_rows, int64_t T, int64_t D, float eps, void* stream) {
  Args a = {static_cast<bf16*>(residual), D, x, static_cast<const bf16*>(w), y, static_cast<int>(parts),
            static_cast<int>(T), static_cast<int>(D), eps};
  a.scales = static_cast<float*>(scales), a.scale_rows = static_cast<int>(scale_rows);
  return wide ? start<WIDE, true>(a, stream) : start<NARROW, true>(a, stream);
}

// residual [T, D] is updated by sums of pairs: part [M, D], position and weights [T, k], shared [T, D] or null.
// `cluster`: columns of part in moe_int4_cluster.cuh's order. y [T, D] in bf16, or in e4m3 with scales as above if they
// are not null. k is at most 32.
API int combine_add_rmsnorm(void* residual, const void* part, const void* position, const void* weights,
                            const void* shared, int64_t k, int64_t cluster, const void* w, void* y, void* scales,
                            int64_t scale_rows, int64_t T, int64_t D, float eps, void* stream) {
  Args a = {static_cast<bf16*>(residual), D, part, static_cast<const bf16*>(w), y, static_cast<int>(k),
            static_cast<int>(T), static_cast<int>(D), eps};
  a.position = static_cast<const int*>(position), a.weights = static_cast<const float*>(weights);
  a.shared = static_cast<const bf16*>(shared);
  a.scales = static_cast<float*>(scales), a.scale_rows = static_cast<int>(scale_rows);
  if (scales) return cluster ? start<CLUSTER_PAIRS, true>(a, stream) : start<PAIRS, true>(a, stream);
  return cluster ? start<CLUSTER_PAIRS>(a, stream) : start<PAIRS>(a, stream);
}
