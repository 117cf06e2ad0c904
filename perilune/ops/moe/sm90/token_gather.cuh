// Copies each token's activations to the rows of its pairs, for moe_int4_grouped.cuh and moe_int4_cluster.cuh.
#pragma once
#include "moe/sm90/token_permute.cuh"

namespace {

// One token per CTA. The row is permuted in shared memory first, so that eight lanes write a whole line.
__global__ void __launch_bounds__(256) gather_kernel(const bf16* x, int64_t stride, const int* position, int k, int D,
                                                     int64_t groups, uint8_t* out) {
  extern __shared__ uint4 ordered[];  // [D / 8] chunks
  const int token = blockIdx.x;
  wait_for_predecessor();
  let_successor_start();  // only after the wait: moe_int4_cluster.cuh reads the plan before its own wait
  for (int unit = threadIdx.x; unit < D / 32; unit += blockDim.x) permute(x + token * stride, unit, ordered);
  __syncthreads();
  for (int j = 0; j < k; j++) {
    const int row = position[token * k + j];
    if (row < 0) continue;
    uint8_t* to = out + static_cast<int64_t>(row / 8) * 1024 + (row % 8) * 128;
    for (int chunk = threadIdx.x; chunk < D / 8; chunk += blockDim.x)
      *reinterpret_cast<uint4*>(to + chunk / 8 * groups * 1024 + ((chunk ^ row) % 8) * 16) = ordered[chunk];
  }
}

}  // namespace
