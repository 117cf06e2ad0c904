// What streams of weights past a few rows of x are made of; linear.cu says how they work.
#pragma once
#include "e4m3.cuh"
#include "wgmma.cuh"

namespace stream {

using namespace hopper;

constexpr int TILE = 8;        // rows of w
constexpr int SEGMENT = 256;   // values of a row of x that a warp prepares at a time
constexpr int SEGMENTS = 320;  // of all rows, at most

// CHUNK: k of one load. PAD: elements between staged rows, so that 8 lanes' 16-byte reads of two rows meet no bank twice.
struct Bf16 {
  static constexpr int BYTES = 2, CHUNK = 32, PAD = 32;
};
struct E4m3 {
  static constexpr int BYTES = 1, CHUNK = 64, PAD = 8;
};

// A stage of a warp's ring: ROW bytes of each row of a tile. Odd rows lie 64 bytes off the even ones, in a half of their
// own: the two rows that 8 lanes read together share no bank.
template <int ROW>
struct Stage {
  static constexpr int BYTES = TILE * ROW + (ROW % 128 ? 0 : 64), CHUNKS = ROW / 64;
  __device__ static int place(int row) { return ROW % 128 ? row * ROW : row / 2 * ROW + row % 2 * (TILE / 2 * ROW + 64); }
};

// What is multiplied: x [T, i], rows x_stride apart, normalised first if there is a norm [i].
struct Rows {
  const bf16* x;
  int64_t x_stride;
  const bf16* norm;
  int T, i;
  float eps;
};

// 8 values of x, times `scale` and the weights of a norm, rounded to bf16 as a norm of its own would; for e4m3 in the
// order in which its pairs come.
template <typename W>
__device__ __forceinline__ uint4 prepared(uint4 x, float scale, uint4 norm) {
  float2 v[4] = {widen(x.x), widen(x.y), widen(x.z), widen(x.w)};
  const float2 w[4] = {widen(norm.x), widen(norm.y), widen(norm.z), widen(norm.w)};
  constexpr float factor = W::BYTES == 1 ? e4m3::X_SCALE : 1.0f;
#pragma unroll
  for (int n = 0; n < 4; n++) v[n] = make_float2(v[n].x * scale * w[n].x * factor, v[n].y * scale * w[n].y * factor);
  const auto pair = [](float2 a, float2 b) {
    if (W::BYTES == 2) return make_uint2(narrow(a.x, a.y), narrow(b.x, b.y));
    return make_uint2(narrow(a.x, b.x), narrow(a.y, b.y));
  };
  const uint2 low = pair(v[0], v[1]), high = pair(v[2], v[3]);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// x to shared memory, normalised if asked; `norm` are the norm's weights, best in shared memory. A thread prepares what
// it has copied itself. A row's sum of squares is that of its segments' in order: the same whoever else is in the
// batch.
template <typename W>
__device__ void stage(const Rows& a, bf16* xs, const bf16* norm) {
  __shared__ float squares[SEGMENTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int pitch = a.i + W::PAD, segments = (a.i + SEGMENT - 1) / SEGMENT;
  const auto each = [&](auto what) {
    for (int row = 0, segment = warp;; segment += warps) {
      for (; segment >= segments; segment -= segments) row++;
      if (row >= a.T) break;
      const int k = segment * SEGMENT + lane * 8;
      what(row * segments + segment, row, k, k < a.i);
    }
  };
  const auto at = [&](int row, int k) { return reinterpret_cast<uint4*>(xs + row * pitch + k); };
  each([&](int, int row, int k, bool real) {
    if (real) copy16(at(row, k), a.x + row * a.x_stride + k);
  });
  copies_commit();
  copies_wait<0>();
  if (norm != nullptr) {
    each([&](int unit, int row, int k, bool real) {
      float sum = 0;
      if (real) {
        const uint4 v = *at(row, k);
        for (uint32_t pair : {v.x, v.y, v.z, v.w}) {
          const float2 f = widen(pair);
          sum += f.x * f.x + f.y * f.y;
        }
      }
      sum = warp_sum(sum);
      if (lane == 0) squares[unit] = sum;
    });
    __syncthreads();
  }
  if (norm == nullptr && W::BYTES == 2) return;
  each([&](int, int row, int k, bool real) {
    float scale = 1;
    uint4 weight = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
    if (norm != nullptr) {
      float sum = 0;
      for (int n = 0; n < segments; n++) sum += squares[row * segments + n];
      scale = rsqrtf(sum / a.i + a.eps);
      if (real) weight = *reinterpret_cast<const uint4*>(norm + k);
    }
    if (real) *at(row, k) = prepared<W>(*at(row, k), scale, weight);
  });
}

// acc += the chunk of w that the lanes hold, 16 bytes of row lane / 4 each, times x from `low` (tokens g) and `high`
// (g + 8): acc[.][0..1] are token g for rows 2 t and 2 t + 1 of the tile, acc[.][2..3] token g + 8.
template <typename W, bool MANY>
__device__ __forceinline__ void multiply(float (&acc)[2][4], uint4 w, const bf16* low, const bf16* high) {
#pragma unroll
  for (int half = 0; half < 2 / W::BYTES; half++) {
    const uint4 x = *reinterpret_cast<const uint4*>(low + 8 * half);
    const uint4 z = MANY ? *reinterpret_cast<const uint4*>(high + 8 * half) : make_uint4(0, 0, 0, 0);
    const uint32_t first[4] = {x.x, z.x, x.y, z.y}, second[4] = {x.z, z.z, x.w, z.w};
    if constexpr (W::BYTES == 2) {
      mma(acc[0], first, w.x, w.y, bf16());
      mma(acc[1], second, w.z, w.w, bf16());
    } else {
      const uint32_t a = half ? w.z : w.x, b = half ? w.w : w.y;
      mma(acc[0], first, e4m3::even(a), e4m3::odd(a), bf16());
      mma(acc[1], second, e4m3::even(b), e4m3::odd(b), bf16());
    }
  }
}

}  // namespace stream
