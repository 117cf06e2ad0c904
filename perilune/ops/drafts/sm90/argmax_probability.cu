// The largest logit per row and its probability, in one pass. Contract in argmax_probability.py.
//
// A cluster of CTAs shares a row. A thread keeps the largest of its logits, its index, and the sum of e^(logit -
// largest); two such triples are merged to one (online softmax).
#include <cooperative_groups.h>

#include "cuda/hopper.cuh"

using namespace hopper;
namespace cg = cooperative_groups;

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int MOST_CTAS = 8;  // max CTAs per row: the portable size of a cluster
constexpr int FEW = 8192;     // a vocabulary up to this size needs one CTA
constexpr int BATCH = 8;      // loads in flight per thread
constexpr float INFINITE = __builtin_inff();

struct Args {
  const float* logits;  // [S, V]
  int64_t* ids;
  float* probability;
  int V;
};

// Of a set of logits: the largest, its lowest index, the sum of e^(logit - largest); `broken` if one is nan or +inf.
struct Best {
  float largest, sum;
  int at, broken;
};

__device__ __forceinline__ Best join(Best a, Best b) {
  const bool first = a.largest > b.largest || (a.largest == b.largest && a.at < b.at);
  const Best more = first ? a : b, less = first ? b : a;
  const float share = less.largest == -INFINITE ? 0.0f : __expf(less.largest - more.largest);
  return Best{more.largest, more.sum + less.sum * share, more.at, a.broken | b.broken};
}

__device__ __forceinline__ Best over_warp(Best b) {
#pragma unroll
  for (int n = 16; n; n >>= 1)
    b = join(b, Best{__shfl_xor_sync(~0u, b.largest, n), __shfl_xor_sync(~0u, b.sum, n), __shfl_xor_sync(~0u, b.at, n),
                     __shfl_xor_sync(~0u, b.broken, n)});
  return b;
}

__global__ __launch_bounds__(THREADS) void argmax_probability_kernel(Args a) {
  __shared__ Best warps[WARPS], ctas[MOST_CTAS];
  cg::cluster_group cluster = cg::this_cluster();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = cluster.num_blocks(), rank = cluster.block_rank(), row = blockIdx.x / count;
  cluster.barrier_arrive();
  wait_for_predecessor();  // no let_successor_start(): the next kernel must start after this one's end (see .py)

  const float* from = a.logits + static_cast<int64_t>(row) * a.V;
  const int each = (a.V + count - 1) / count, end = min(a.V, (rank + 1) * each);
  Best best{-INFINITE, 0.0f, a.V, 0};
  for (int i = rank * each + threadIdx.x; i < end; i += BATCH * THREADS) {
    float x[BATCH], top = best.largest;
#pragma unroll
    for (int n = 0; n < BATCH; n++) x[n] = i + n * THREADS < end ? __ldcg(from + i + n * THREADS) : -INFINITE;
#pragma unroll
    for (int n = 0; n < BATCH; n++) {
      best.broken |= !(x[n] < INFINITE);
      if (x[n] > top) top = x[n], best.at = i + n * THREADS;
    }
    if (top == -INFINITE) continue;
    best.sum *= best.largest == -INFINITE ? 0.0f : __expf(best.largest - top);
    best.largest = top;
#pragma unroll
    for (int n = 0; n < BATCH; n++) best.sum += __expf(x[n] - top);
  }
  best = over_warp(best);
  if (lane == 0) warps[warp] = best;
  __syncthreads();
  cluster.barrier_wait();  // every CTA of the row has started, so its shared memory may be written
  if (warp == 0) {
    best = over_warp(lane < WARPS ? warps[lane] : Best{-INFINITE, 0.0f, a.V, 0});
    if (lane == 0) *cluster.map_shared_rank(&ctas[rank], 0) = best;
  }
  cluster.sync();
  if (rank == 0 && threadIdx.x == 0) {
    best = ctas[0];
    for (int n = 1; n < count; n++) best = join(best, ctas[n]);
    const bool broken = best.broken || best.at >= a.V;
    a.ids[row] = broken ? 0 : best.at;
    a.probability[row] = broken ? 0.0f : 1.0f / best.sum;
  }
}

}  // namespace

API int argmax_probability(const void* logits, void* ids, void* probability, int64_t S, int64_t V, void* stream) {
  int ctas = 1;
  while (ctas < MOST_CTAS && V > ctas * FEW) ctas *= 2;
  Args a{static_cast<const float*>(logits), static_cast<int64_t*>(ids), static_cast<float*>(probability),
         static_cast<int>(V)};
  return launch(argmax_probability_kernel, dim3(S * ctas), dim3(THREADS), 0, stream, ctas, a);
}
