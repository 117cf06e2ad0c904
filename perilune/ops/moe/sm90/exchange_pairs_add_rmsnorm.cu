// residual += expert results of a token, summed over experts and ranks; y = rmsnorm(residual). Contract in
// exchange_pairs_add_rmsnorm.py.
#include "cuda/two_shots.cuh"

using namespace two_shots;

// peers: in host memory. part [M, D], position and weights [T, k], shared [T, D] or null. `cluster`: columns of
// part in moe_int4_cluster.cuh's order. T > 0; k is at most 32; D is a multiple of 8, up to 7,168.
API int exchange_pairs_add_rmsnorm(const Peers* peers, void* residual, const void* part, const void* position,
                                   const void* weights, const void* shared, int64_t k, int64_t cluster, const void* w,
                                   void* y, int64_t T, int64_t D, float eps, void* stream) {
  const Args a = {static_cast<bf16*>(residual), part, static_cast<int>(k), static_cast<const int*>(position),
                  static_cast<const float*>(weights), static_cast<const bf16*>(shared), static_cast<const bf16*>(w), y,
                  nullptr, 0, static_cast<int>(T), static_cast<int>(D), 1.0f / D, eps};
  return cluster ? start<CLUSTER_PAIRS, false, false, MANY>(*peers, a, stream)
                 : start<PAIRS, false, false, MANY>(*peers, a, stream);
}
