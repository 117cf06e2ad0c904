// silu(gate) * up of bf16, 8 values a thread. Contract in swiglu.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ uint32_t weighed(uint32_t gate, uint32_t up) {
  const float2 g = widen(gate), u = widen(up);
  return narrow(g.x / (1.0f + __expf(-g.x)) * u.x, g.y / (1.0f + __expf(-g.y)) * u.y);
}

__global__ void __launch_bounds__(THREADS) swiglu_kernel(const bf16* gate_up, int64_t stride, bf16* y, int T, int I) {
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int row = static_cast<int>(piece / (I / 8)), column = static_cast<int>(piece % (I / 8)) * 8;
  wait_for_predecessor();
  let_successor_start();
  if (row >= T) return;
  const uint4 g = load16(gate_up + row * stride + column), u = load16(gate_up + row * stride + I + column);
  *reinterpret_cast<uint4*>(y + static_cast<int64_t>(row) * I + column) =
      make_uint4(weighed(g.x, u.x), weighed(g.y, u.y), weighed(g.z, u.z), weighed(g.w, u.w));
}

}  // namespace

// gate_up [T, 2 I] with rows `stride` apart, y [T, I]; I and stride multiples of 8, gate_up at a multiple of 16 bytes.
API int swiglu(const void* gate_up, int64_t stride, void* y, int64_t T, int64_t I, void* stream) {
  const int64_t pieces = T * (I / 8);
  if (pieces == 0) return 0;
  return launch(swiglu_kernel, dim3((pieces + THREADS - 1) / THREADS), dim3(THREADS), 0, stream, 1,
                static_cast<const bf16*>(gate_up), stride, static_cast<bf16*>(y), static_cast<int>(T),
                static_cast<int>(I));
}
