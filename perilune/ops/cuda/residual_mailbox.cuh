// Computes x = rmsnorm(residual) while mla_decode_output's kernel still writes the residual to a mailbox, an inverted
// pair of bf16 per word (`written` in router_mailbox.cuh). 7 warps share x, up to 4 pieces of 8 values per thread.
// mla_decode_router_t1.cu and moe_int4_t1.cu both use this code, so that their x has the same bits.
#pragma once
#include "cuda/router_mailbox.cuh"

namespace fresh {

using namespace hopper;

constexpr int WARPS = 7, THREADS = WARPS * 32, PIECES = 4;
constexpr int LATE = 8;  // pieces, spread over the residual's last quarter, that a warp polls before it reads the rest

__device__ __forceinline__ int piece_of(int n) { return threadIdx.x + n * THREADS; }

// The norm's weights [D].
__device__ __forceinline__ void load_weights(uint4 (&w)[PIECES], const bf16* norm, int pieces) {
#pragma unroll
  for (int n = 0; n < PIECES; n++) w[n] = piece_of(n) < pieces ? load16(norm + piece_of(n) * 8) : uint4{};
}

// The address of the one of the LATE pieces that this lane polls.
__device__ __forceinline__ const uint32_t* late(const uint32_t* half, int pieces) {
  return half + (pieces - 1 - threadIdx.x % LATE * (pieces / 28)) * 4;
}

// Polls once: reads those of this thread's pieces that v lacks (v is 0 at first). True if all lanes have all pieces.
__device__ __forceinline__ bool look(uint4 (&v)[PIECES], const uint32_t* half, int pieces) {
  bool waits = false;
#pragma unroll
  for (int n = 0; n < PIECES; n++) {
    if (piece_of(n) < pieces && mailbox::misses(v[n])) v[n] = mailbox::glance16(half + piece_of(n) * 4);
  }
#pragma unroll
  for (int n = 0; n < PIECES; n++) waits |= piece_of(n) < pieces && mailbox::misses(v[n]);
  return !__any_sync(~0u, waits);
}

// d += dot product of this lane's 8 values v and 8 values w, in a quarter of the instructions of multiply-adds: the
// tensor cores compute all products between the 8 lanes of equal lane % 4; `of_diagonal` picks each lane's own.
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& v, const uint4& w) {
  const uint32_t low[4] = {v.x, 0, v.y, 0}, high[4] = {v.z, 0, v.w, 0};
  mma(d, low, w.x, w.y, bf16());
  mma(d, high, w.z, w.w, bf16());
}
__device__ __forceinline__ float of_diagonal(const float (&d)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  return warp_sum(t == g / 2 ? g % 2 ? d[1] : d[0] : 0);
}

// Converts v, inverted pairs from `look`, to x. squares: 8 floats of shared memory. meet: a barrier of the 7 warps. All
// that does not need the sum of squares comes before the barrier.
template <typename Meet>
__device__ __forceinline__ void normalise(uint4 (&v)[PIECES], const uint4 (&w)[PIECES], int pieces, float eps,
                                          float* squares, Meet meet) {
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int n = 0; n < PIECES; n++) {
    const bool real = piece_of(n) < pieces;
    v[n] = real ? make_uint4(~v[n].x, ~v[n].y, ~v[n].z, ~v[n].w) : uint4{};
    multiply(n % 2 ? odd : even, v[n], v[n]);
  }
#pragma unroll
  for (int n = 0; n < 4; n++) even[n] += odd[n];
  const float sum = of_diagonal(even);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  const float share = 1.0f / (pieces * 8);
  float2 products[PIECES][4];
#pragma unroll
  for (int n = 0; n < PIECES; n++) {
    const uint32_t pairs[4] = {v[n].x, v[n].y, v[n].z, v[n].w}, factors[4] = {w[n].x, w[n].y, w[n].z, w[n].w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 f = widen(pairs[j]), u = widen(factors[j]);
      products[n][j] = make_float2(f.x * u.x, f.y * u.y);
    }
  }
  meet();
  const float4 low = *reinterpret_cast<const float4*>(squares), high = *reinterpret_cast<const float4*>(squares + 4);
  const float total = low.x + low.y + (low.z + low.w) + (high.x + high.y + high.z);
  const float scale = rsqrtf(total * share + eps);
#pragma unroll
  for (int n = 0; n < PIECES; n++) {
    const auto pair = [&](int j) { return narrow(products[n][j].x * scale, products[n][j].y * scale); };
    v[n] = make_uint4(pair(0), pair(1), pair(2), pair(3));
  }
}

}  // namespace fresh
