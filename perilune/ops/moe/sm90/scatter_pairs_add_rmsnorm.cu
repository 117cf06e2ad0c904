// As exchange_pairs_add_rmsnorm.cu, for the rows that this rank owns. Contracts in scatter_pairs_add_rmsnorm.py and
// scatter_pairs_add_rmsnorm_quantize.py.
#include "cuda/two_shots.cuh"

using namespace two_shots;

// y: the rank's rows, in bf16, or in e4m3 if scales [ceil(D / 128), scale_rows] is not null. Other arguments as there.
API int scatter_pairs_add_rmsnorm(const Peers* peers, void* residual, const void* part, const void* position,
                                  const void* weights, const void* shared, int64_t k, int64_t cluster, const void* w,
                                  void* y, void* scales, int64_t scale_rows, int64_t T, int64_t D, float eps,
                                  void* stream) {
  const Args a = {static_cast<bf16*>(residual), part, static_cast<int>(k), static_cast<const int*>(position),
                  static_cast<const float*>(weights), static_cast<const bf16*>(shared), static_cast<const bf16*>(w), y,
                  static_cast<float*>(scales), static_cast<int>(scale_rows), static_cast<int>(T), static_cast<int>(D),
                  1.0f / D, eps};
  if (scales) {
    return cluster ? start<CLUSTER_PAIRS, true, true, MANY>(*peers, a, stream)
                   : start<PAIRS, true, true, MANY>(*peers, a, stream);
  }
  return cluster ? start<CLUSTER_PAIRS, false, true, MANY>(*peers, a, stream)
                 : start<PAIRS, false, true, MANY>(*peers, a, stream);
}
