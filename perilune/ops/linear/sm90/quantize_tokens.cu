// Quantises rows of bf16 to e4m3 with a scale for 128 values; may normalise or gate them first. Contract in
// quantize_tokens.py.
//
// A CTA has a row, or a part of one; a thread has pieces of 8 values, and 16 lanes a group.
#include "cuda/token_scale.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8, THREADS = WARPS * 32;
enum Kind { PLAIN, NORMED, GATED };

struct Args {
  const bf16* x;  // rows `stride` apart
  int64_t stride;
  const bf16* norm;
  uint8_t* y;    // [T, width]
  float* scale;  // [groups, scale_rows]
  int T, width, scale_rows;
  float eps;
};

__device__ __forceinline__ float2 gated(uint32_t gate, uint32_t up) {
  const float2 g = widen(gate), u = widen(up);
  return make_float2(g.x / (1.0f + __expf(-g.x)) * u.x, g.y / (1.0f + __expf(-g.y)) * u.y);
}

template <Kind KIND, int EACH>
__global__ void __launch_bounds__(THREADS) quantize_kernel(const Args a) {
  __shared__ float sums[WARPS];
  const int row = blockIdx.x, pieces = a.width / 8, groups = (pieces + 15) / 16;
  const int first = blockIdx.y * (EACH * THREADS) + threadIdx.x;
  uint4 value[EACH] = {}, weight[EACH];
  if (KIND == NORMED) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int p = first + i * THREADS;
      if (p < pieces) weight[i] = *reinterpret_cast<const uint4*>(a.norm + 8 * p);
    }
  }
  wait_for_predecessor();
  let_successor_start();
  if (row >= a.T) {  // padding of the scales to whole tiles
    for (int g = threadIdx.x; g < groups; g += THREADS) a.scale[static_cast<int64_t>(g) * a.scale_rows + row] = 0.0f;
    return;
  }
  const bf16* x = a.x + row * a.stride;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = first + i * THREADS;
    if (p < pieces) value[i] = load16(x + 8 * p);
    if (KIND == GATED) weight[i] = p < pieces ? load16(x + a.width + 8 * p) : make_uint4(0, 0, 0, 0);
  }
  if (KIND == GATED) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      auto of = [](uint32_t gate, uint32_t up) {
        const float2 v = gated(gate, up);
        return narrow(v.x, v.y);
      };
      value[i] = make_uint4(of(value[i].x, weight[i].x), of(value[i].y, weight[i].y), of(value[i].z, weight[i].z),
                            of(value[i].w, weight[i].w));
    }
  }
  if (KIND == NORMED) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      for (uint32_t word : {value[i].x, value[i].y, value[i].z, value[i].w}) {
        const float2 v = widen(word);
        squares += v.x * v.x + v.y * v.y;
      }
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = warp_sum(threadIdx.x % 32 < WARPS ? sums[threadIdx.x % 32] : 0.0f);
    const float by = rsqrtf(squares / a.width + a.eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (first + i * THREADS >= pieces) continue;
      auto of = [by](uint32_t pair, uint32_t weight) {
        const float2 v = widen(pair), w = widen(weight);
        return narrow(v.x * by * w.x, v.y * by * w.y);
      };
      value[i] = make_uint4(of(value[i].x, weight[i].x), of(value[i].y, weight[i].y), of(value[i].z, weight[i].z),
                            of(value[i].w, weight[i].w));
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = first + i * THREADS;
    const __nv_bfloat16 largest = token_scale::largest(value[i]);
    if (p >= pieces) continue;
    const float top = token_scale::top(largest);
    *reinterpret_cast<uint2*>(a.y + static_cast<int64_t>(row) * a.width + 8 * p) = token_scale::rounded(value[i], top);
    if (p % 16 == 0) a.scale[static_cast<int64_t>(p / 16) * a.scale_rows + row] = token_scale::scale(top);
  }
}

template <Kind KIND>
int start(const Args& a, void* stream) {
  const int pieces = a.width / 8;
  auto go = [&](auto kernel, int each) {
    return launch(kernel, dim3(a.scale_rows, (pieces + each * THREADS - 1) / (each * THREADS)), dim3(THREADS), 0, stream,
                  1, a);
  };
  if (pieces <= THREADS) return go(quantize_kernel<KIND, 1>, 1);
  if (pieces <= 2 * THREADS) return go(quantize_kernel<KIND, 2>, 2);
  return go(quantize_kernel<KIND, 4>, 4);
}

}  // namespace

// x [T, width], or [T, 2 width] if gated; norm [width] or null, then width is at most 8,192; y [T, width] e4m3; scale
// [ceil(width / 128), scale_rows]. width and stride are multiples of 8, x and norm at multiples of 16 bytes.
API int quantize_tokens(const void* x, int64_t stride, const void* norm, void* y, void* scale, int64_t T, int64_t width,
                        int64_t scale_rows, int64_t gate, float eps, void* stream) {
  const Args a = {static_cast<const bf16*>(x), stride,
                  static_cast<const bf16*>(norm), static_cast<uint8_t*>(y),
                  static_cast<float*>(scale), static_cast<int>(T),
                  static_cast<int>(width), static_cast<int>(scale_rows),
                  eps};
  if (gate) return start<GATED>(a, stream);
  return norm != nullptr ? start<NORMED>(a, stream) : start<PLAIN>(a, stream);
}
