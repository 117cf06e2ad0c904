// y = x w^T for a few rows of x: a stream of weights at the rate of the memory. Contracts in linear.py, norm_linear.py
// and linear_fp8.py.
//
// A tile is 8 rows of w. Tokens are the 16 rows of the tensor core's A, weights its B: a lane holds 16 bytes of one
// row of w, whose four lanes cover 32 k (bf16) or 64 (e4m3). Products only sum over k, so x is read in that same order
// and nothing is shuffled. KS warps split the k of a tile and meet in shared memory. Each warp has a ring of stages that
// bulk copies fill, across tiles, and starts them before it waits for the kernel that makes x. Not plain loads: those
// need lines of the first-level cache while they are in flight, and after a kernel that took nearly all of it as shared
// memory (attention, experts) the same kernel took half as long again.
//
// An e4m3 weight becomes the bf16 of 2^-120 times its value by moving bits: exact, subnormals included. x is staged
// times 2^100, so that the sums stay among normal floats, and the sum is multiplied by 2^20 and the scale of its row.
#include "wgmma.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 8;  // rows of w

// CHUNK: k of one load. PAD: elements between staged rows, so that 8 lanes' 16-byte reads of two rows meet no bank twice.
struct Bf16 {
  static constexpr int BYTES = 2, CHUNK = 32, PAD = 32;
};
struct E4m3 {
  static constexpr int BYTES = 1, CHUNK = 64, PAD = 8;
};

// A warp's ring. ROW: bytes of a row of w in a stage. PITCH: of rows, such that two neighbours share no bank.
template <int ROW>
struct Ring {
  static constexpr int PITCH = ROW % 128 ? ROW : ROW + 64, STAGES = ROW == 256 ? 4 : 8, BYTES = STAGES * TILE * PITCH;
};
constexpr float X_SCALE = 0x1p100f, Y_SCALE = 0x1p20f;  // of e4m3

struct Args {
  const bf16* x;  // [T, i], rows x_stride apart
  int64_t x_stride;
  const uint8_t* w;    // [o, i]
  const float* scale;  // [o], of e4m3
  const bf16* norm;    // [i] or null: x is normalised first
  void* y;             // [T, o] bf16, or float if wide
  int T, i, o, wide;
  float eps;
};

// x to shared memory, normalised if asked: one warp per row, rounded to bf16 as a norm of its own would.
template <typename W>
__device__ void stage(const Args& a, bf16* xs, int pitch) {
  constexpr float factor = W::BYTES == 1 ? X_SCALE : 1.0f;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = a.i / 8;
  if (a.norm == nullptr && W::BYTES == 2) {
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
    float scale = 1;
    if (a.norm != nullptr) {
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
      scale = rsqrtf(warp_sum(squares) / a.i + a.eps);
    }
    for (int k = lane * 8; k < a.i; k += 256) {
      const uint4 ones = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
      uint4 v = *reinterpret_cast<const uint4*>(row + k);
      uint4 g = a.norm != nullptr ? *reinterpret_cast<const uint4*>(a.norm + k) : ones;
      uint32_t *p = &v.x, *q = &g.x;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float2 f = widen(p[n]), s = widen(q[n]);
        p[n] = narrow(f.x * scale * s.x * factor, f.y * scale * s.y * factor);
      }
      *reinterpret_cast<uint4*>(xs + t * pitch + k) = v;
    }
  }
}

// Bytes 0, 1 (part 0) or 2, 3 (part 1) of a word as bf16 of 2^-120 times their e4m3 values.
__device__ __forceinline__ uint32_t raised(uint32_t word, uint32_t part) {
  uint32_t v = __byte_perm(word, 0, part ? 0x3424 : 0x1404);
  return (v & 0x80008000u) | ((v >> 4) & 0x07f007f0u);
}

// acc += the chunk of w that the lanes hold, times x from `low` (tokens g) and `high` (g + 8).
template <typename W, bool MANY>
__device__ __forceinline__ void multiply(float (&acc)[2][4], uint4 w, const bf16* low, const bf16* high) {
#pragma unroll
  for (int half = 0; half < 2 / W::BYTES; half++) {
    uint4 x = *reinterpret_cast<const uint4*>(low + 8 * half);
    uint4 z = MANY ? *reinterpret_cast<const uint4*>(high + 8 * half) : make_uint4(0, 0, 0, 0);
    uint32_t first[4] = {x.x, z.x, x.y, z.y}, second[4] = {x.z, z.z, x.w, z.w};
    if constexpr (W::BYTES == 2) {
      mma(acc[0], first, w.x, w.y, bf16());
      mma(acc[1], second, w.z, w.w, bf16());
    } else {
      uint32_t a = half ? w.z : w.x, b = half ? w.w : w.y;
      mma(acc[0], first, raised(a, 0), raised(a, 1), bf16());
      mma(acc[1], second, raised(b, 0), raised(b, 1), bf16());
    }
  }
}

template <typename W, int ROW, int KS, bool MANY>
__global__ __launch_bounds__(WARPS * 32, MANY ? 1 : 2) void linear_kernel(Args a) {
  using R = Ring<ROW>;
  constexpr int LANE = 16 / W::BYTES;   // k of a lane's piece
  constexpr int GROUPS = WARPS / KS;    // tiles at once
  constexpr int ROWS = MANY ? 16 : 8;   // tokens held
  constexpr int PIECES = ROW / 64;      // chunks in a stage
  extern __shared__ __align__(128) uint8_t memory[];
  bf16* xs = reinterpret_cast<bf16*>(memory + WARPS * R::BYTES);
  const int pitch = a.i + W::PAD;
  __shared__ float sums[2][KS > 1 ? WARPS : 1][ROWS * TILE];
  __shared__ uint64_t barriers[WARPS][R::STAGES];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % KS, group = warp / KS;
  const int chunks = a.i / W::CHUNK / KS, loads = chunks / PIECES, tiles = a.o / TILE, step = gridDim.x * GROUPS;
  const int64_t row_bytes = static_cast<int64_t>(a.i) * W::BYTES;
  const int k0 = part * chunks * W::CHUNK;
  int tile = blockIdx.x * GROUPS + group;

  // What is to be loaded next: piece `ahead` of tile `ahead_tile`, for this lane (of the first 8) a row of it.
  uint8_t* ring = memory + warp * R::BYTES;
  int ahead = 0, ahead_tile = tile, stage_in = 0;
  const uint8_t* from = a.w + (static_cast<int64_t>(tile) * TILE + lane % TILE) * row_bytes + k0 * W::BYTES;
  auto load = [&]() {
    if (ahead_tile >= tiles) return;
    uint64_t* barrier = &barriers[warp][stage_in];
    if (lane == 0) barrier_expect(barrier, TILE * ROW);
    __syncwarp();
    if (lane < TILE) bulk_load(ring + (stage_in * TILE + lane) * R::PITCH, from, ROW, barrier);
    from += ROW;
    stage_in = (stage_in + 1) % R::STAGES;
    if (++ahead == loads) {
      ahead = 0, ahead_tile += step;
      from += step * TILE * row_bytes - loads * ROW;
    }
  };
  if (lane < R::STAGES) barrier_init(&barriers[warp][lane], 1);
  barriers_visible();
  __syncwarp();
  for (int s = 0; s < R::STAGES; s++) load();
  let_successor_start();
  wait_for_predecessor();
  stage<W>(a, xs, pitch);
  __syncthreads();

  // Rows past T repeat row T - 1: what they yield is never stored.
  const bf16* low = xs + min(g, a.T - 1) * pitch + k0 + LANE * t;
  const bf16* high = MANY ? xs + min(g + 8, a.T - 1) * pitch + k0 + LANE * t : nullptr;
  const uint8_t* mine_in_ring = ring + g * R::PITCH + 16 * t;
  const int passes = (tiles + step - 1) / step;
  int stage_out = 0, phase = 0;
  for (int pass = 0; pass < passes; pass++, tile += step) {
    float acc[2][4] = {};
    if (tile < tiles) {
      for (int n = 0; n < loads; n++) {
        barrier_wait(&barriers[warp][stage_out], phase);
        const uint8_t* at = mine_in_ring + stage_out * TILE * R::PITCH;
        const int c = n * PIECES;
#pragma unroll
        for (int u = 0; u < PIECES; u++) {
          uint4 w = *reinterpret_cast<const uint4*>(at + u * 64);
          multiply<W, MANY>(acc, w, low + (c + u) * W::CHUNK, MANY ? high + (c + u) * W::CHUNK : nullptr);
        }
        if (++stage_out == R::STAGES) stage_out = 0, phase ^= 1;
        __syncwarp();  // everyone has read the stage that the next load overwrites
        load();
      }
    }
    float* mine = sums[pass & 1][KS > 1 ? warp : 0];
    float total[4];
#pragma unroll
    for (int n = 0; n < 4; n++) total[n] = acc[0][n] + acc[1][n];
    auto store = [&](int token, int row, float v) {
      if (token >= a.T || tile >= tiles) return;
      int64_t at = static_cast<int64_t>(token) * a.o + tile * TILE + row;
      if (W::BYTES == 1) v *= Y_SCALE * a.scale[tile * TILE + row];
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

template <typename W, int ROW, int KS>
int start(const Args& a, int sms, void* stream) {
  const size_t rows = static_cast<size_t>(a.T) * (a.i + W::PAD) * sizeof(bf16), rings = WARPS * Ring<ROW>::BYTES;
  const int tiles = (a.o / TILE + WARPS / KS - 1) / (WARPS / KS);
  // One or two CTAs to a processor, never more: a third would fit, and where a predecessor that ends unevenly lets the
  // hardware put three on one processor and one on another, work that is dealt out evenly takes half as long again.
  const bool two = a.T <= 8 && rings + rows <= 108 * 1024;
  const size_t claimed = max(rings + rows, static_cast<size_t>(two ? 78 : 116) * 1024);
  auto kernel = a.T > 8 ? linear_kernel<W, ROW, KS, true> : linear_kernel<W, ROW, KS, false>;
  return launch(kernel, dim3(min(tiles, two ? 2 * sms : sms)), dim3(WARPS * 32), claimed, stream, 1, a);
}

template <typename W, int KS>
int choose(const Args& a, int sms, void* stream) {
  const int chunks = a.i / W::CHUNK / KS;
  if (chunks % 4 == 0) return start<W, 256, KS>(a, sms, stream);
  if (chunks % 2 == 0) return start<W, 128, KS>(a, sms, stream);
  return start<W, 64, KS>(a, sms, stream);
}

template <typename W>
int split(const Args& a, int k_split, int sms, void* stream) {
  switch (k_split) {
    case 1: return choose<W, 1>(a, sms, stream);
    case 2: return choose<W, 2>(a, sms, stream);
    case 4: return choose<W, 4>(a, sms, stream);
    default: return choose<W, 8>(a, sms, stream);
  }
}

}  // namespace

// scale: null for bf16 weights, else those of the rows of e4m3 weights. k_split: warps that share a tile, 1, 2, 4 or 8.
// i / 32 (e4m3: i / 64) must be a multiple of it, o of 8, T at most 16.
API int linear(const void* x, int64_t x_stride, const void* w, const void* scale, const void* norm, float eps, void* y,
               int64_t T, int64_t i, int64_t o, int64_t wide, int64_t k_split, int64_t sms, void* stream) {
  Args a{static_cast<const bf16*>(x), x_stride, static_cast<const uint8_t*>(w), static_cast<const float*>(scale),
         static_cast<const bf16*>(norm), y, static_cast<int>(T), static_cast<int>(i), static_cast<int>(o),
         static_cast<int>(wide), eps};
  return scale == nullptr ? split<Bf16>(a, k_split, sms, stream) : split<E4m3>(a, k_split, sms, stream);
}
