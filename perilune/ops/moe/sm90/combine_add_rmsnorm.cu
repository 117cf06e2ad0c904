// The weighted sum of a token's experts, added to the residual stream, and the norm of that, in one pass over memory.
// Contract in combine_add_rmsnorm.py. A token is a CTA's, which keeps its row in registers from the sum to the norm.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int MAX_CHOICES = 32;

struct Args {
  bf16* residual;        // [T, D]
  const bf16* part;      // rows of D
  const int* position;   // [T, k]
  const float* weights;  // [T, k]
  const bf16* shared;    // [T, D] or null
  const bf16* norm;      // [D]
  bf16* y;               // [T, D]
  int k, D;
  float eps;
};

__device__ __forceinline__ void add(float (&sum)[8], uint4 v, float w) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 f = widen(words[i]);
    sum[2 * i] += w * f.x, sum[2 * i + 1] += w * f.y;
  }
}

// EACH: pieces of 8 values of a thread.
template <int EACH>
__global__ void __launch_bounds__(THREADS) combine_kernel(const Args a) {
  __shared__ float sums[WARPS], by[MAX_CHOICES];
  __shared__ int row[MAX_CHOICES];
  const int tid = threadIdx.x, pieces = a.D / 8;
  const int64_t token = blockIdx.x;
  uint4 weight[EACH], value[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = tid + i * THREADS;
    if (p < pieces) weight[i] = *reinterpret_cast<const uint4*>(a.norm + 8 * p);
  }
  wait_for_predecessor();
  let_successor_start();
  if (tid < a.k) {
    row[tid] = a.position[token * a.k + tid];
    by[tid] = a.weights[token * a.k + tid];
  }
  bf16* residual = a.residual + token * a.D;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = tid + i * THREADS;
    if (p < pieces) value[i] = *reinterpret_cast<const uint4*>(residual + 8 * p);
  }
  __syncthreads();
  float sum[EACH][8] = {};
#pragma unroll 2
  for (int j = 0; j < a.k; j++) {
    if (row[j] < 0) continue;
    const bf16* from = a.part + static_cast<int64_t>(row[j]) * a.D;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int p = tid + i * THREADS;
      if (p < pieces) add(sum[i], load16(from + 8 * p), by[j]);
    }
  }
  if (a.shared != nullptr) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int p = tid + i * THREADS;
      if (p < pieces) add(sum[i], load16(a.shared + token * a.D + 8 * p), 1.0f);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = tid + i * THREADS;
    if (p >= pieces) continue;
    uint32_t* words = &value[i].x;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      float2 v = widen(words[n]);
      words[n] = narrow(v.x + sum[i][2 * n], v.y + sum[i][2 * n + 1]);
      v = widen(words[n]);
      squares += v.x * v.x + v.y * v.y;
    }
    *reinterpret_cast<uint4*>(residual + 8 * p) = value[i];
  }
  squares = warp_sum(squares);
  if (tid % 32 == 0) sums[tid / 32] = squares;
  __syncthreads();
  squares = warp_sum(tid % 32 < WARPS ? sums[tid % 32] : 0.0f);
  const float scale = rsqrtf(squares / a.D + a.eps);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = tid + i * THREADS;
    if (p >= pieces) continue;
    auto scaled = [scale](uint32_t pair, uint32_t by) {
      const float2 v = widen(pair), w = widen(by);
      return narrow(v.x * scale * w.x, v.y * scale * w.y);
    };
    *reinterpret_cast<uint4*>(a.y + token * a.D + 8 * p) =
        make_uint4(scaled(value[i].x, weight[i].x), scaled(value[i].y, weight[i].y), scaled(value[i].z, weight[i].z),
                   scaled(value[i].w, weight[i].w));
  }
}

}  // namespace

// position: a pair's row of part, or -1. k is at most 32, D a multiple of 8 and at most 8,192.
API int combine_add_rmsnorm(void* residual, const void* part, const void* position, const void* weights,
                            const void* shared, const void* norm, void* y, int64_t T, int64_t k, int64_t D, float eps,
                            void* stream) {
  if (T == 0) return 0;
  const Args a = {static_cast<bf16*>(residual),       static_cast<const bf16*>(part),
                  static_cast<const int*>(position),  static_cast<const float*>(weights),
                  static_cast<const bf16*>(shared),   static_cast<const bf16*>(norm),
                  static_cast<bf16*>(y),              static_cast<int>(k),
                  static_cast<int>(D),                eps};
  auto go = [&](auto kernel) { return launch(kernel, dim3(T), dim3(THREADS), 0, stream, 1, a); };
  if (D <= 8 * THREADS) return go(combine_kernel<1>);
  return D <= 16 * THREADS ? go(combine_kernel<2>) : go(combine_kernel<4>);
}
