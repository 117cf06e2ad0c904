// The choice of experts from the logits of many tokens, a warp per token. Contract in router.py.
#include "moe/sm90/topk.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8;

__global__ void __launch_bounds__(WARPS * 32)
    router_choose_kernel(const routing::Choice c, const float* logits, int T) {
  const int token = blockIdx.x * WARPS + threadIdx.x / 32;
  wait_for_predecessor();
  let_successor_start();
  if (token < T) routing::pick(c, logits + static_cast<int64_t>(token) * c.E, token, threadIdx.x % 32);
}

}  // namespace

// logits [T, E]; E at most 512, top_k at most 32 and E.
API int router_topk(const void* logits, const void* bias, void* ids, void* weights, int64_t T, int64_t E, int64_t top_k,
                    int64_t norm, float scale, void* stream) {
  const routing::Choice c = {static_cast<const float*>(bias), static_cast<int*>(ids), static_cast<float*>(weights),
                            static_cast<int>(E), static_cast<int>(top_k), static_cast<int>(norm), scale};
  return launch(router_choose_kernel, dim3((T + WARPS - 1) / WARPS), dim3(WARPS * 32), 0, stream, 1, c,
                static_cast<const float*>(logits), static_cast<int>(T));
}
