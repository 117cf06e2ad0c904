// y = x w^T for a few rows of x: a stream of weights at the rate of the memory. Contract in linear.py and norm_linear.py.
//
// A tile is 8 rows of w. Tokens are the 16 rows of the tensor core's A, weights its B: a lane holds 16 bytes of one
// row of w, whose four lanes cover 32 k. Products only sum over k, so x is read in that same order and nothing is
// shuffled. KS warps split the k of a tile and meet in shared memory. Each warp keeps U loads in flight, across tiles,
// and starts them before it waits for the kernel that makes x.
#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 8;    // rows of w
constexpr int CHUNK = 32;  // k of one load
constexpr int PAD = 32;    // elements between staged rows: 8 lanes' 16-byte reads of two rows meet no bank twice

struct Args {
  const bf16* x;  // [T, i], rows x_stride apart
  int64_t x_stride;
  const bf16* w;       // [o, i]
  const bf16* norm;    // [i] or null: x is normalised first
  void* y;             // [T, o] bf16, or float if wide
  int T, i, o, wide;
  float eps;
};

// x to shared memory, normalised if asked: one warp per row, rounded to bf16 as a norm of its own would.
__device__ void stage(const Args& a, bf16* xs, int pitch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = a.i / 8;
  if (a.norm == nullptr) {
    for (int n = threadIdx.x; n < a.T * pieces; n += WARPS * 32) {
      int t = n / pieces, k = (n - t * pieces) * 8;
      copy16(xs + t * pitch + k, a.x + t * a.x_stride + k);
    }
    copies_commit();
    copies_wait<0>();
    return;
  }
  for (int t = warp; t < a.T; t += WARPS) {
    const bf16* row = a.x + t * a.x_stride;
    float squares = 0;
    for (int k = lane * 8; k < a.i; k += 256) {
      uint4 v = *reinterpret_cast<const uint4*>(row + k);
      const uint32_t* p = &v.x;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float2 f = widen(p[n]);
        squares += f.x * f.x + f.y * f.y;
      }
    }
    float scale = rsqrtf(warp_sum(squares) / a.i + a.eps);
    for (int k = lane * 8; k < a.i; k += 256) {
      uint4 v = *reinterpret_cast<const uint4*>(row + k), g = *reinterpret_cast<const uint4*>(a.norm + k);
      uint32_t *p = &v.x, *q = &g.x;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float2 f = widen(p[n]), s = widen(q[n]);
        p[n] = narrow(f.x * scale * s.x, f.y * scale * s.y);
      }
      *reinterpret_cast<uint4*>(xs + t * pitch + k) = v;
    }
  }
}

template <int U, int KS, bool MANY>
__global__ __launch_bounds__(WARPS * 32, MANY ? 1 : 2) void linear_kernel(Args a) {
  constexpr int GROUPS = WARPS / KS;            // tiles at once
  constexpr int ROWS = MANY ? 16 : 8;           // tokens held
  extern __shared__ __align__(16) uint8_t memory[];
  bf16* xs = reinterpret_cast<bf16*>(memory);
  const int pitch = a.i + PAD;
  __shared__ float sums[2][KS > 1 ? WARPS : 1][ROWS * TILE];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % KS, group = warp / KS;
  const int chunks = a.i / CHUNK / KS, tiles = a.o / TILE, step = gridDim.x * GROUPS;
  const int64_t stride = static_cast<int64_t>(step) * TILE * a.i;
  const int k0 = part * chunks * CHUNK;
  int tile = blockIdx.x * GROUPS + group;
  const bf16* base = a.w + (static_cast<int64_t>(tile) * TILE + g) * a.i + k0 + 8 * t;

  uint4 ring[U];
  if (tile < tiles) {
#pragma unroll
    for (int u = 0; u < U; u++) ring[u] = load16(base + u * CHUNK);
  }
  let_successor_start();
  wait_for_predecessor();
  stage(a, xs, pitch);
  __syncthreads();

  // Rows past T repeat row T - 1: what they yield is never stored.
  const bf16* low = xs + min(g, a.T - 1) * pitch + k0 + 8 * t;
  const bf16* high = MANY ? xs + min(g + 8, a.T - 1) * pitch + k0 + 8 * t : nullptr;
  const int passes = (tiles + step - 1) / step;
  for (int pass = 0; pass < passes; pass++, tile += step, base += stride) {
    float acc[2][4] = {};
    if (tile < tiles) {
      for (int c = 0; c < chunks; c += U) {
        const bool same = c + U < chunks, more = same || tile + step < tiles;
        const bf16* next = same ? base + (c + U) * CHUNK : base + stride;
#pragma unroll
        for (int u = 0; u < U; u++) {
          uint4 w = ring[u];
          if (more) ring[u] = load16(next + u * CHUNK);
          uint4 x = *reinterpret_cast<const uint4*>(low + (c + u) * CHUNK);
          uint4 z = MANY ? *reinterpret_cast<const uint4*>(high + (c + u) * CHUNK) : make_uint4(0, 0, 0, 0);
          uint32_t first[4] = {x.x, z.x, x.y, z.y}, second[4] = {x.z, z.z, x.w, z.w};
          mma(acc[0], first, w.x, w.y, bf16());
          mma(acc[1], second, w.z, w.w, bf16());
        }
      }
    }
    float* mine = sums[pass & 1][KS > 1 ? warp : 0];
    float total[4];
#pragma unroll
    for (int n = 0; n < 4; n++) total[n] = acc[0][n] + acc[1][n];
    auto store = [&](int token, int row, float v) {
      if (token >= a.T || tile >= tiles) return;
      int64_t at = static_cast<int64_t>(token) * a.o + tile * TILE + row;
      if (a.wide) {
        static_cast<float*>(a.y)[at] = v;
      } else {
        static_cast<bf16*>(a.y)[at] = __float2bfloat16(v);
      }
    };
    if constexpr (KS == 1) {
      store(g, 2 * t, total[0]);
      store(g, 2 * t + 1, total[1]);
      if (MANY) {
        store(g + 8, 2 * t, total[2]);
        store(g + 8, 2 * t + 1, total[3]);
      }
    } else {
      // Two buffers: a warp can be one pass ahead of the slowest reader, never two.
      *reinterpret_cast<float2*>(mine + g * TILE + 2 * t) = make_float2(total[0], total[1]);
      if (MANY) *reinterpret_cast<float2*>(mine + (g + 8) * TILE + 2 * t) = make_float2(total[2], total[3]);
      __syncthreads();
      for (int n = part * 32 + lane; n < ROWS * TILE; n += KS * 32) {
        float v = 0;
#pragma unroll
        for (int s = 0; s < KS; s++) v += sums[pass & 1][group * KS + s][n];
        store(n / TILE, n % TILE, v);
      }
    }
  }
}

template <int U, int KS>
int start(const Args& a, int sms, void* stream) {
  const size_t shared = static_cast<size_t>(a.T) * (a.i + PAD) * sizeof(bf16);
  const int tiles = a.o / TILE / (WARPS / KS) + (a.o / TILE % (WARPS / KS) != 0);
  if (a.T > 8) return launch(linear_kernel<U, KS, true>, dim3(min(tiles, sms)), dim3(WARPS * 32), shared, stream, 1, a);
  const int ctas = shared <= 100 * 1024 ? 2 * sms : sms;
  return launch(linear_kernel<U, KS, false>, dim3(min(tiles, ctas)), dim3(WARPS * 32), shared, stream, 1, a);
}

template <int KS>
int choose(const Args& a, int sms, void* stream) {
  const int chunks = a.i / CHUNK / KS;
  if (chunks % 8 == 0) return start<8, KS>(a, sms, stream);
  if (chunks % 7 == 0) return start<7, KS>(a, sms, stream);
  if (chunks % 6 == 0) return start<6, KS>(a, sms, stream);
  if (chunks % 4 == 0) return start<4, KS>(a, sms, stream);
  if (chunks % 3 == 0) return start<3, KS>(a, sms, stream);
  return start<1, KS>(a, sms, stream);
}

}  // namespace

// k_split: warps that share a tile, 1, 2, 4 or 8. i / 32 must be a multiple of it, o of 8, T at most 16.
API int linear(const void* x, int64_t x_stride, const void* w, const void* norm, float eps, void* y, int64_t T,
               int64_t i, int64_t o, int64_t wide, int64_t k_split, int64_t sms, void* stream) {
  Args a{static_cast<const bf16*>(x), x_stride, static_cast<const bf16*>(w), static_cast<const bf16*>(norm), y,
         static_cast<int>(T), static_cast<int>(i), static_cast<int>(o), static_cast<int>(wide), eps};
  switch (k_split) {
    case 1: return choose<1>(a, sms, stream);
    case 2: return choose<2>(a, sms, stream);
    case 4: return choose<4>(a, sms, stream);
    default: return choose<8>(a, sms, stream);
  }
}
