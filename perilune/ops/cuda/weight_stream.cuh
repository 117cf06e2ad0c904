// Parts of kernels that stream weights w and multiply them by a few rows of x; linear.cu describes a whole kernel.
//
// A tile is 8 rows of w, the A operand of mma.m16n8k16. A lane's 16 bytes of a row are used in memory order, as the A
// of one product (bf16) or of two (e4m3, converted to fp16). A has 16 rows: rows g and g + 8 hold the even and the odd
// pairs of k of row g of w. B (x) has columns for the even and for the odd pairs: up to 4 tokens have both in one
// product (columns 0-3 and 4-7), more tokens take two products. Elements of D that combine even with odd pairs are not
// used. A token's sums do not depend on the number of tokens.
#pragma once
#include "cuda/e4m3.cuh"
#include "cuda/wgmma.cuh"

namespace stream {

using namespace hopper;

constexpr int TILE = 8;        // rows of w
constexpr int SEGMENT = 256;   // values of a row of x that a warp prepares at a time
constexpr int SEGMENTS = 320;  // max segments of all rows together
constexpr int BLOCK = 64;      // adjacent values of x that two chunks (bf16) or one (e4m3) of w are multiplied by
constexpr int WARPS = 16;      // per CTA
constexpr int ASKING = 8;      // warps that issue loads of weights while the others prepare x
constexpr int PAD = 8;         // elements between staged rows, so that 16-byte reads of two rows have no bank conflict

// CHUNK: values of k in 64 bytes of a row of w, 16 bytes per lane.
struct Bf16 {
  using Value = bf16;
  static constexpr int BYTES = 2, CHUNK = 32;
};
struct E4m3 {
  using Value = __half;
  static constexpr int BYTES = 1, CHUNK = 64;
};

// A stage of a warp's ring: ROW bytes of each row of a tile. If ROW is a multiple of 128, odd rows are stored in a
// second half, shifted by 64 bytes, so that the two rows that 8 lanes read together have no bank conflict.
template <int ROW>
struct Stage {
  static constexpr int BYTES = TILE * ROW + (ROW % 128 ? 0 : 64), CHUNKS = ROW / 64;
  __device__ static int place(int row) {
    return ROW % 128 ? row * ROW : row / 2 * ROW + row % 2 * (TILE / 2 * ROW + 64);
  }
};

// The input: x [T, i], rows x_stride elements apart. norm: weights [i] of an RMSNorm of x, or null.
struct Rows {
  const bf16* x;
  int64_t x_stride;
  const bf16* norm;
  int T, i;
  float eps;
};

constexpr int RAW_PAD = 32;  // as PAD, for rows of x staged in memory order

__host__ __device__ constexpr int pitch_of(int i) { return (i + BLOCK - 1) / BLOCK * BLOCK + PAD; }

// For e4m3 weights, x is converted to fp16, which has more mantissa bits than bf16 but less range. So a row is first
// multiplied by the power of two that brings its largest magnitude (`largest`: float bits) to 2^14 or more: exact for
// values down to 2^-28 of the largest.
__device__ __forceinline__ uint32_t raise_exponent(uint32_t largest) { return min(268u - (largest >> 23), 253u); }
__device__ __forceinline__ float power_of_two(uint32_t exponent) { return __uint_as_float(exponent << 23); }

// A barrier of the warps that prepare x: warps FIRST and higher.
template <int FIRST>
__device__ __forceinline__ void prepared() {
  named_sync(15, (WARPS - FIRST) * 32);
}

// After this call, a warp may read the prepared x. Preparing warps do not wait for the warps that still issue loads.
template <int FIRST>
__device__ __forceinline__ void hand_over(int warp) {
  if (warp >= FIRST) prepared<FIRST>();
  if (FIRST == 0) return;
  if (warp >= FIRST) {
    asm volatile("bar.arrive 14, %0;" ::"n"(WARPS * 32) : "memory");
  } else {
    named_sync(14, WARPS * 32);
  }
}

// Warps FIRST and higher load x into shared memory, normalised if `norm` (the norm's weights, best in shared memory) is
// not null. In a block of 64 values, lane t of four reads the even pairs of its k at byte 32 t, the odd pairs 16 bytes
// later. A row's sums add its segments in order, whatever other requests are in the batch. lowered[row]: factor of sums
// with e4m3 weights, which undoes the row's power of two. Every product waits for this, so it must be fast: four
// segments are read at a time, and values pass through shared memory only if a row's sums must be known first.
template <typename W, int FIRST>
__device__ __forceinline__ void stage(const Rows& a, typename W::Value* xs, const bf16* norm, float* lowered) {
  constexpr bool RAISED = W::BYTES == 1;
  constexpr int AT_ONCE = 4, LANE = 16 / W::BYTES;  // LANE: k of a lane's piece of w
  __shared__ float squares[SEGMENTS];
  __shared__ uint32_t largest[RAISED ? SEGMENTS : 1];
  constexpr int PREPARING = WARPS - FIRST;
  const int warp = threadIdx.x / 32 - FIRST, lane = threadIdx.x % 32;
  const int pitch = pitch_of(a.i), segments = (a.i + SEGMENT - 1) / SEGMENT;
  const bool normed = norm != nullptr, twice = RAISED || normed;
  const auto raw = [&](int row, int k) { return reinterpret_cast<uint4*>(xs + row * pitch + k); };
  const auto write = [&](int row, int k, const uint4& v) {
    const int t = k / LANE % 4, second = RAISED ? k / 8 % 2 : k / W::CHUNK % 2;
    auto* to = reinterpret_cast<uint2*>(xs + row * pitch + k / BLOCK * BLOCK + t * 16 + second * 4);
    to[0] = make_uint2(v.x, v.z);
    to[2] = make_uint2(v.y, v.w);
  };
  int row = 0, segment = warp;
  const auto settle = [&] {
    for (; segment >= segments; segment -= segments) row++;
  };
#pragma unroll 1
  for (settle(); row < a.T;) {
    uint4 v[AT_ONCE];
    int rows[AT_ONCE], at[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      rows[n] = row, at[n] = segment;
      const int k = segment * SEGMENT + lane * 8;
      v[n] = make_uint4(0, 0, 0, 0);
      if (row < a.T && k < a.i) v[n] = __ldcg(reinterpret_cast<const uint4*>(a.x + row * a.x_stride + k));
      segment += PREPARING;
      settle();
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const int k = at[n] * SEGMENT + lane * 8;
      if (rows[n] >= a.T) break;
      if (!twice) {
        if (k < a.i) write(rows[n], k, v[n]);
        continue;
      }
      if (k < a.i) *raw(rows[n], k) = v[n];
      const uint32_t pairs[4] = {v[n].x, v[n].y, v[n].z, v[n].w};
      float most = 0;
      if (normed) {
        const uint4 w = RAISED && k < a.i ? *reinterpret_cast<const uint4*>(norm + k) : make_uint4(0, 0, 0, 0);
        const uint32_t factors[4] = {w.x, w.y, w.z, w.w};
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 f = widen(pairs[j]), u = widen(factors[j]);
          sum += f.x * f.x + f.y * f.y;
          most = fmaxf(most, fmaxf(fabsf(f.x * u.x), fabsf(f.y * u.y)));
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[rows[n] * segments + at[n]] = sum;
      } else {
#pragma unroll
        for (uint32_t pair : pairs) {
          const float2 f = widen(pair);
          most = fmaxf(most, fmaxf(fabsf(f.x), fabsf(f.y)));
        }
      }
      if (RAISED) {
        const uint32_t all = __reduce_max_sync(~0u, __float_as_uint(most));
        if (lane == 0) largest[rows[n] * segments + at[n]] = all;
      }
    }
  }
  if (!twice) return;
  prepared<FIRST>();

  row = 0, segment = warp;
  int known = -1;
  float scale = 1, raise = 1;
#pragma unroll 1
  for (settle(); row < a.T; segment += PREPARING, settle()) {
    if (row != known) {
      known = row;
      if (normed) {
        float sum = 0;
        for (int n = lane; n < segments; n += 32) sum += squares[row * segments + n];
        scale = rsqrtf(warp_sum(sum) / a.i + a.eps);
      }
      if (RAISED) {
        uint32_t most = 0;
        for (int n = lane; n < segments; n += 32) most = max(most, largest[row * segments + n]);
        most = __float_as_uint(__uint_as_float(__reduce_max_sync(~0u, most)) * scale);
        const uint32_t exponent = raise_exponent(most);
        raise = power_of_two(exponent);
        if (lane == 0) lowered[row] = power_of_two(254 - exponent);
      }
    }
    const int k = segment * SEGMENT + lane * 8;
    const bool real = k < a.i;
    const uint4 v = real ? *raw(row, k) : make_uint4(0, 0, 0, 0);
    const uint4 w = normed && real ? *reinterpret_cast<const uint4*>(norm + k) : make_uint4(0, 0, 0, 0);
    uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
    const uint32_t factors[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 f = widen(pairs[j]);
      if (normed) {
        const float2 u = widen(factors[j]);
        pairs[j] = narrow(f.x * scale * u.x, f.y * scale * u.y);
        f = widen(pairs[j]);
      }
      if (RAISED) {
        const __half2 h = __floats2half2_rn(f.x * raise, f.y * raise);
        pairs[j] = *reinterpret_cast<const uint32_t*>(&h);
      }
    }
    __syncwarp();  // all lanes have read the values that other lanes now overwrite
    if (real) write(row, k, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
}

// Accumulators of one tile for up to TOKENS tokens: two independent ones for each operand B (KINDS).
template <int TOKENS>
struct Sums {
  static constexpr int KINDS = TOKENS <= 4 ? 1 : TOKENS / 4;
  float d[2][KINDS][4] = {};

  // The address of this lane's values in the rows of x staged at `xs`, for the n-th B.
  template <typename V>
  __device__ static const V* from(const V* xs, int pitch, int T, int n) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int token = TOKENS <= 4 ? g % 4 : n / 2 * 8 + g, half = TOKENS <= 4 ? g / 4 : n % 2;
    return xs + min(token, T - 1) * pitch + t * 16 + half * 8;  // sums of rows past T are never stored
  }

  // += this lane's 16 bytes of a row of w times a block of x (bf16: half `second` of the block).
  __device__ void add(const uint4& w, const bf16* (&x)[KINDS], int offset, int second) {
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int n = 0; n < KINDS; n++) {
      const uint2 b = *reinterpret_cast<const uint2*>(x[n] + offset + second * 4);
      mma(d[second][n], a, b.x, b.y, bf16());
    }
  }
  __device__ void add(const uint4& w, const __half* (&x)[KINDS], int offset, int) {
    const uint2 v[4] = {e4m3::halves(w.x), e4m3::halves(w.y), e4m3::halves(w.z), e4m3::halves(w.w)};
    const uint32_t a[2][4] = {{v[0].x, v[0].y, v[1].x, v[1].y}, {v[2].x, v[2].y, v[3].x, v[3].y}};
#pragma unroll
    for (int n = 0; n < KINDS; n++) {
      const uint4 b = *reinterpret_cast<const uint4*>(x[n] + offset);
      mma(d[0][n], a[0], b.x, b.y, __half());
      mma(d[1][n], a[1], b.z, b.w, __half());
    }
  }
  // As above for both bf16 chunks of a block, with one read of x.
  __device__ void add(const uint4& w, const uint4& v, const bf16* (&x)[KINDS], int offset) {
    const uint32_t a[2][4] = {{w.x, w.y, w.z, w.w}, {v.x, v.y, v.z, v.w}};
#pragma unroll
    for (int n = 0; n < KINDS; n++) {
      const uint4 b = *reinterpret_cast<const uint4*>(x[n] + offset);
      mma(d[0][n], a[0], b.x, b.y, bf16());
      mma(d[1][n], a[1], b.z, b.w, bf16());
    }
  }

  // to[token * TILE + row] = the sums, of all TOKENS tokens.
  __device__ void store(float* to) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto total = [&](int n, int i) { return d[0][n][i] + d[1][n][i]; };
    if constexpr (TOKENS <= 4) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float even = total(0, i), odd = total(0, 2 + i);
        v[i] = even + __shfl_xor_sync(~0u, odd, 2);
      }
      if (t < 2) to[2 * t * TILE + g] = v[0], to[(2 * t + 1) * TILE + g] = v[1];
    } else {
#pragma unroll
      for (int n = 0; n < KINDS; n += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) to[(n / 2 * 8 + 2 * t + i) * TILE + g] = total(n, i) + total(n + 1, 2 + i);
      }
    }
  }
};

// acc += a stage of w times x from k0 on. w: this lane's first 16 bytes of the stage; x: as `Sums::from` returns.
template <typename W, int CHUNKS, int TOKENS>
__device__ __forceinline__ void multiply(Sums<TOKENS>& acc, const uint8_t* w,
                                         const typename W::Value* (&x)[Sums<TOKENS>::KINDS], int k0) {
  const auto piece = [&](int u) { return *reinterpret_cast<const uint4*>(w + u * 64); };
  if constexpr (W::BYTES == 1) {
#pragma unroll
    for (int u = 0; u < CHUNKS; u++) acc.add(piece(u), x, k0 + u * BLOCK, 0);
  } else if constexpr (CHUNKS % 2 == 0) {
#pragma unroll
    for (int u = 0; u < CHUNKS; u += 2) acc.add(piece(u), piece(u + 1), x, k0 + u * W::CHUNK);
  } else {
    const int second = k0 / W::CHUNK % 2;  // whether the stage begins with the second half of a block
    if (second) acc.add(piece(0), x, k0 - W::CHUNK, 1);
#pragma unroll
    for (int u = 0; u + 1 < CHUNKS; u += 2) {
      acc.add(piece(u + second), piece(u + 1 + second), x, k0 + (u + second) * W::CHUNK);
    }
    if (!second) acc.add(piece(CHUNKS - 1), x, k0 + (CHUNKS - 1) * W::CHUNK, 0);
  }
}

// As `multiply`, with the same products in the same order, for bf16 rows of x that are staged in memory order. x[n]:
// this lane's 8 values of a chunk, of token 8 n + lane / 4.
template <int CHUNKS, int TOKENS>
__device__ __forceinline__ void multiply_raw(Sums<TOKENS>& acc, const uint8_t* w, const bf16* (&x)[TOKENS / 8],
                                             int k0) {
#pragma unroll
  for (int u = 0; u < CHUNKS; u++) {
    const uint4 v = *reinterpret_cast<const uint4*>(w + u * 64);
    const uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
      const uint4 b = *reinterpret_cast<const uint4*>(x[n] + k0 + u * Bf16::CHUNK);
      mma(acc.d[u % 2][2 * n], a, b.x, b.z, bf16());
      mma(acc.d[u % 2][2 * n + 1], a, b.y, b.w, bf16());
    }
  }
}

}  // namespace stream
