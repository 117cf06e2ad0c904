// y *= scale, each column of y by its own number, in place. Contract in scale_columns.py.
//
// A thread has 16 bytes of a row, and the same columns of the next ROWS - 1 rows: it reads their scales once, and
// issues all of its loads before its first store.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256, ROWS = 8;

__device__ __forceinline__ uint32_t scaled(uint32_t pair, float low, float high) {
  const float2 v = widen(pair);
  return narrow(v.x * low, v.y * high);
}

__device__ __forceinline__ uint32_t scaled(uint32_t word, float by) { return __float_as_uint(__uint_as_float(word) * by); }

// pieces: of 16 bytes in a row. WIDE: y holds floats, 4 in a piece, else bf16, 8 in a piece.
template <bool WIDE>
__global__ void __launch_bounds__(THREADS) scale_columns_kernel(uint4* y, const float4* scale, int T,
                                                                uint32_t pieces) {
  const uint32_t thread = blockIdx.x * THREADS + threadIdx.x;
  const int first = thread / pieces * ROWS, piece = thread % pieces;
  let_successor_start();
  float4 low, high;
  if (first < T) {  // scales are weights: readable before the wait
    low = scale[WIDE ? piece : 2 * piece];
    if (!WIDE) high = scale[2 * piece + 1];
  }
  wait_for_predecessor();
  if (first >= T) return;
  uint4* at = y + static_cast<int64_t>(first) * pieces + piece;
  uint4 value[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (first + i < T) value[i] = at[static_cast<int64_t>(i) * pieces];
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (first + i >= T) break;
    const uint4 v = value[i];
    at[static_cast<int64_t>(i) * pieces] =
        WIDE ? make_uint4(scaled(v.x, low.x), scaled(v.y, low.y), scaled(v.z, low.z), scaled(v.w, low.w))
             : make_uint4(scaled(v.x, low.x, low.y), scaled(v.y, low.z, low.w), scaled(v.z, high.x, high.y),
                          scaled(v.w, high.z, high.w));
  }
}

}  // namespace

// y [T, o] of bf16, or of floats if wide, rows of a multiple of 16 bytes; scale [o]. Both at multiples of 16 bytes;
// at most 2^32 pieces of 16 bytes and 8 rows.
API int scale_columns(void* y, const void* scale, int64_t T, int64_t o, int64_t wide, void* stream) {
  const int64_t pieces = o / (wide ? 4 : 8), threads = (T + ROWS - 1) / ROWS * pieces;
  if (threads == 0) return 0;
  return launch(wide ? scale_columns_kernel<true> : scale_columns_kernel<false>,
                dim3((threads + THREADS - 1) / THREADS), dim3(THREADS), 0, stream, 1, static_cast<uint4*>(y),
                static_cast<const float4*>(scale), static_cast<int>(T), static_cast<uint32_t>(pieces));
}
