// Inputs of the draft model's layer, in one launch: one CTA for each half of a token. Contract in draft_embed.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256;
constexpr int MOST = 4;  // max groups of 8 values per thread

struct Args {
  const int64_t *ids, *positions;
  const bf16 *table, *token_norm, *features, *feature_norm;
  const float *cos, *sin;  // [P, R]
  bf16* x;                 // [T, 2 D]
  float *cos_rows, *sin_rows;
  int64_t V;
  int D, R;
  float eps;
};

__global__ __launch_bounds__(THREADS) void draft_embed_kernel(Args a) {
  __shared__ float partial[THREADS / 32];
  const int groups = a.D / 8;
  const int64_t t = blockIdx.x;
  const bool feature = blockIdx.y;
  const bf16* norm = feature ? a.feature_norm : a.token_norm;
  uint4 weight[MOST];
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int g = n * THREADS + threadIdx.x;
    if (g < groups) weight[n] = load16(norm + g * 8);
  }
  let_successor_start();
  wait_for_predecessor();

  const bf16* row = a.features + t * a.D;
  if (!feature) {
    row = a.table + max(int64_t(0), min(a.ids[t], a.V - 1)) * a.D;
    const int64_t position = a.positions[t];
    for (int r = threadIdx.x; r < a.R; r += THREADS) {
      a.cos_rows[t * a.R + r] = a.cos[position * a.R + r];
      a.sin_rows[t * a.R + r] = a.sin[position * a.R + r];
    }
  }
  uint4 value[MOST];
  float squares = 0;
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int g = n * THREADS + threadIdx.x;
    if (g < groups) value[n] = *reinterpret_cast<const uint4*>(row + g * 8);
  }
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int g = n * THREADS + threadIdx.x;
    if (g >= groups) continue;
    const uint32_t* p = &value[n].x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float2 f = widen(p[i]);
      squares += f.x * f.x + f.y * f.y;
    }
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int n = 0; n < THREADS / 32; n++) total += partial[n];
  const float scale = rsqrtf(total / a.D + a.eps);
  bf16* out = a.x + (2 * t + feature) * a.D;
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int g = n * THREADS + threadIdx.x;
    if (g >= groups) continue;
    uint32_t* p = &value[n].x;
    const uint32_t* q = &weight[n].x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float2 f = widen(p[i]), w = widen(q[i]);
      p[i] = narrow(f.x * scale * w.x, f.y * scale * w.y);
    }
    *reinterpret_cast<uint4*>(out + g * 8) = value[n];
  }
}

}  // namespace

// D is a multiple of 8 and at most 8,192; rows of features are contiguous and start at 16 bytes.
API int draft_embed(const void* ids, const void* positions, const void* table, const void* token_norm,
                    const void* features, const void* feature_norm, const void* cos, const void* sin, void* x,
                    void* cos_rows, void* sin_rows, int64_t T, int64_t V, int64_t D, int64_t R, float eps,
                    void* stream) {
  Args a{static_cast<const int64_t*>(ids),
         static_cast<const int64_t*>(positions),
         static_cast<const bf16*>(table),
         static_cast<const bf16*>(token_norm),
         static_cast<const bf16*>(features),
         static_cast<const bf16*>(feature_norm),
         static_cast<const float*>(cos),
         static_cast<const float*>(sin),
         static_cast<bf16*>(x),
         static_cast<float*>(cos_rows),
         static_cast<float*>(sin_rows),
         V,
         static_cast<int>(D),
         static_cast<int>(R),
         eps};
  return launch(draft_embed_kernel, dim3(T, 2), dim3(THREADS), 0, stream, 1, a);
}
