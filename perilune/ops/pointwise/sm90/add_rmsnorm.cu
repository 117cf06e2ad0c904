// residual += sum of x's parts, y = rmsnorm(residual), for up to some hundred tokens. Contract in add_rmsnorm.py.
//
// A cluster of CTAs shares a row: one CTA would take 2 us longer for nine partial rows of 7,168 floats, because of
// latency. Each warp writes its sum of squares to the shared memory of every CTA of the cluster, so that one cluster
// barrier is enough.
#include "cuda/wgmma.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int MOST = 4;     // max groups of 4 values per thread
constexpr int CLUSTER = 8;  // max CTAs of a cluster

template <bool WIDE>
__global__ __launch_bounds__(THREADS) void add_rmsnorm_kernel(bf16* residual, const void* x, int parts,
                                                              const bf16* w, bf16* y, int D, float eps) {
  const int ctas = cluster_size(), rank = cluster_rank(), row = blockIdx.x / ctas;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int quads = D / 4, each = (quads + ctas - 1) / ctas;
  const int begin = rank * each, end = min(begin + each, quads);
  __shared__ float sums[CLUSTER * WARPS];

  cluster_arrive();
  uint2 weight[MOST];
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int q = begin + n * THREADS + threadIdx.x;
    if (q < end) weight[n] = *reinterpret_cast<const uint2*>(w + q * 4);
  }
  let_successor_start();
  wait_for_predecessor();

  float4 value[MOST];
  float squares = 0;
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int q = begin + n * THREADS + threadIdx.x;
    if (q >= end) continue;
    uint2* at = reinterpret_cast<uint2*>(residual + static_cast<int64_t>(row) * D + q * 4);
    uint2 old = *at;
    float2 a = widen(old.x), b = widen(old.y);
    float4 sum = make_float4(0, 0, 0, 0);
    if (WIDE) {
      const float4* from = static_cast<const float4*>(x) + static_cast<int64_t>(row) * parts * quads + q;
#pragma unroll 9
      for (int p = 0; p < parts; p++) {
        float4 v = from[static_cast<int64_t>(p) * quads];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
    } else {
      uint2 v = static_cast<const uint2*>(x)[static_cast<int64_t>(row) * quads + q];
      float2 c = widen(v.x), d = widen(v.y);
      sum = make_float4(c.x, c.y, d.x, d.y);
    }
    uint2 fresh = make_uint2(narrow(a.x + sum.x, a.y + sum.y), narrow(b.x + sum.z, b.y + sum.w));
    *at = fresh;
    a = widen(fresh.x), b = widen(fresh.y);
    value[n] = make_float4(a.x, a.y, b.x, b.y);
    squares += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
  }
  squares = warp_sum(squares);
  cluster_wait();  // all CTAs have started, so their shared memory may be written
  if (lane < ctas) store_in(address_in(sums + rank * WARPS + warp, lane), squares);
  cluster_sync();
  float total = 0;
  for (int n = lane; n < ctas * WARPS; n += 32) total += sums[n];
  total = warp_sum(total);
  const float scale = rsqrtf(total / D + eps);
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    int q = begin + n * THREADS + threadIdx.x;
    if (q >= end) continue;
    float2 a = widen(weight[n].x), b = widen(weight[n].y);
    *reinterpret_cast<uint2*>(y + static_cast<int64_t>(row) * D + q * 4) =
        make_uint2(narrow(value[n].x * scale * a.x, value[n].y * scale * a.y),
                   narrow(value[n].z * scale * b.x, value[n].w * scale * b.y));
  }
}

}  // namespace

// wide: x holds floats [T, parts, D], else bf16 [T, D]. D is a multiple of 4 and at most 4,096 x cluster.
API int add_rmsnorm(void* residual, const void* x, int64_t parts, int64_t wide, const void* w, void* y, int64_t T,
                    int64_t D, int64_t cluster, float eps, void* stream) {
  auto kernel = wide ? add_rmsnorm_kernel<true> : add_rmsnorm_kernel<false>;
  return launch(kernel, dim3(T * cluster), dim3(THREADS), 0, stream, cluster, static_cast<bf16*>(residual), x,
                static_cast<int>(parts), static_cast<const bf16*>(w), static_cast<bf16*>(y), static_cast<int>(D), eps);
}
