// Inputs of a step's first layer, in one launch, a CTA per token. Contract in embed_norm.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256;
constexpr int MOST = 4;  // max groups of 8 values per thread

struct Args {
  const int64_t *ids, *rows, *last;  // rows and last may be null
  const int64_t* positions;
  const bf16 *table, *norm;
  const float *cos, *sin;  // [P, R]
  bf16 *h, *x;
  float *cos_rows, *sin_rows;
  int64_t pending, V;
  int D, R;
  float eps;
};

__global__ __launch_bounds__(THREADS) void embed_norm_kernel(Args a) {
  __shared__ float partial[THREADS / 32];
  const int groups = a.D / 8;
  const int64_t t = blockIdx.x;
  uint4 weight[MOST];
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int g = n * THREADS + threadIdx.x;
    if (g < groups) weight[n] = load16(a.norm + g * 8);
  }
  let_successor_start();
  wait_for_predecessor();

  int64_t id = a.ids[t];
  const int64_t position = a.positions[t];
  if (id == a.pending && a.last != nullptr) id = a.last[a.rows[t]];
  id = max(int64_t(0), min(id, a.V - 1));
  for (int r = threadIdx.x; r < a.R; r += THREADS) {
    a.cos_rows[t * a.R + r] = a.cos[position * a.R + r];
    a.sin_rows[t * a.R + r] = a.sin[position * a.R + r];
  }
  const bf16* row = a.table + id * a.D;
  uint4 value[MOST];
  float squares = 0;
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int g = n * THREADS + threadIdx.x;
    if (g < groups) value[n] = load16(row + g * 8);
  }
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int g = n * THREADS + threadIdx.x;
    if (g >= groups) continue;
    *reinterpret_cast<uint4*>(a.h + t * a.D + g * 8) = value[n];
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
    *reinterpret_cast<uint4*>(a.x + t * a.D + g * 8) = value[n];
  }
}

}  // namespace

// D is a multiple of 8 and at most 8,192.
API int embed_norm(const void* ids, const void* rows, const void* last, const void* positions, const void* table,
                   const void* norm, const void* cos, const void* sin, void* h, void* x, void* cos_rows,
                   void* sin_rows, int64_t T, int64_t V, int64_t D, int64_t R, int64_t pending, float eps,
                   void* stream) {
  Args a{static_cast<const int64_t*>(ids),
         static_cast<const int64_t*>(rows),
         static_cast<const int64_t*>(last),
         static_cast<const int64_t*>(positions),
         static_cast<const bf16*>(table),
         static_cast<const bf16*>(norm),
         static_cast<const float*>(cos),
         static_cast<const float*>(sin),
         static_cast<bf16*>(h),
         static_cast<bf16*>(x),
         static_cast<float*>(cos_rows),
         static_cast<float*>(sin_rows),
         pending,
         V,
         static_cast<int>(D),
         static_cast<int>(R),
         eps};
  return launch(embed_norm_kernel, dim3(T), dim3(THREADS), 0, stream, 1, a);
}
