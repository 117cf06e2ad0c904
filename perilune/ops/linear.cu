// y = x w^T for a few rows of x: a stream of weights at the rate of the memory. Contracts in linear.py, norm_linear.py
// and linear_fp8.py.
//
// A tile is 8 rows of w. Tokens are the 16 rows of the tensor core's A, weights its B: a lane holds 16 bytes of one row of
// w, whose four lanes cover 32 k (bf16) or 64 (e4m3). Products only sum over k, so x is read in that same order and
// nothing is shuffled. KS warps split the k of a tile and meet in shared memory. Each warp has a ring of stages that bulk
// copies fill, across tiles, and starts them before it waits for the kernel that makes x. Not plain loads: those need
// lines of the first-level cache while they are in flight, and after a kernel that took nearly all of it as shared memory
// (attention, experts) the same kernel took half as long again. Nor tensor maps: their rows of 128 bytes reach 4.1 TB/s
// where copies of 256 reach 4.5.
//
// e4m3 weights become bf16 on the way from shared memory (e4m3.cuh).
#include "stream.cuh"

using namespace stream;

namespace {

constexpr int WARPS = 8;

template <int ROW>
constexpr int STAGES = ROW == 512 ? 2 : ROW == 256 ? 4 : 8;

struct Args {
  Rows in;
  const uint8_t* w;    // [o, i]
  const float* scale;  // [o], of e4m3
  void* y;             // [T, o] bf16, or float if wide
  int o, wide;
};

// Whether the weights of a norm are fetched before the wait.
__host__ __device__ constexpr bool kept(const Rows& in) { return in.norm != nullptr && in.i <= 2048; }

template <typename W, int ROW, int KS, bool MANY>
__global__ __launch_bounds__(WARPS * 32, MANY ? 1 : 2) void linear_kernel(Args a) {
  using S = Stage<ROW>;
  constexpr int LANE = 16 / W::BYTES;  // k of a lane's piece
  constexpr int GROUPS = WARPS / KS;   // tiles at once
  constexpr int ROWS = MANY ? 16 : 8;  // tokens held
  constexpr int RING = STAGES<ROW> * S::BYTES;
  extern __shared__ __align__(128) uint8_t memory[];
  bf16* xs = reinterpret_cast<bf16*>(memory + WARPS * RING);
  const int pitch = a.in.i + W::PAD;
  bf16* norm = kept(a.in) ? xs + a.in.T * pitch : nullptr;
  __shared__ float sums[2][KS > 1 ? WARPS : 1][ROWS * TILE];
  __shared__ uint64_t barriers[WARPS][STAGES<ROW>];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % KS, group = warp / KS;
  const int chunks = a.in.i / W::CHUNK / KS, loads = chunks / S::CHUNKS, tiles = a.o / TILE, step = gridDim.x * GROUPS;
  const int64_t row_bytes = static_cast<int64_t>(a.in.i) * W::BYTES;
  const int k0 = part * chunks * W::CHUNK;
  int tile = blockIdx.x + group * gridDim.x;  // evenly over processors

  // What is to be loaded next: piece `ahead` of tile `ahead_tile`, for this lane (of the first 8) a row of it.
  uint8_t* ring = memory + warp * RING;
  int ahead = 0, ahead_tile = tile, stage_in = 0;
  const uint8_t* from = a.w + (static_cast<int64_t>(tile) * TILE + lane % TILE) * row_bytes + k0 * W::BYTES;
  auto load = [&]() {
    if (ahead_tile >= tiles) return;
    uint64_t* barrier = &barriers[warp][stage_in];
    if (lane == 0) barrier_expect(barrier, TILE * ROW);
    __syncwarp();
    if (lane < TILE) bulk_load(ring + stage_in * S::BYTES + S::place(lane), from, ROW, barrier);
    from += ROW;
    stage_in = (stage_in + 1) % STAGES<ROW>;
    if (++ahead == loads) {
      ahead = 0, ahead_tile += step;
      from += step * TILE * row_bytes - loads * ROW;
    }
  };
  if (lane < STAGES<ROW>) barrier_init(&barriers[warp][lane], 1);
  barriers_visible();
  __syncwarp();
  for (int s = 0; s < STAGES<ROW>; s++) load();
  if (norm != nullptr) {
    for (int k = threadIdx.x * 8; k < a.in.i; k += WARPS * 256) copy16(norm + k, a.in.norm + k);
    copies_commit();
  }
  // Rows of w whose results this lane writes; their scales come with the tile, not after its sum.
  const int first_row = KS == 1 ? 2 * t : lane % TILE;
  float scales[2] = {1, 1};
  auto load_scales = [&]() {
    if (W::BYTES == 1 && tile < tiles) {
      scales[0] = a.scale[tile * TILE + first_row];
      if (KS == 1) scales[1] = a.scale[tile * TILE + first_row + 1];
    }
  };
  load_scales();
  let_successor_start();
  if (norm != nullptr) copies_wait<0>();
  wait_for_predecessor();
  stage<W>(a.in, xs, norm != nullptr ? norm : a.in.norm);
  __syncthreads();

  // Rows past T repeat row T - 1: what they yield is never stored.
  const bf16* low = xs + min(g, a.in.T - 1) * pitch + k0 + LANE * t;
  const bf16* high = MANY ? xs + min(g + 8, a.in.T - 1) * pitch + k0 + LANE * t : nullptr;
  const uint8_t* mine_in_ring = ring + S::place(g) + 16 * t;
  const int passes = (tiles + step - 1) / step;
  int stage_out = 0, phase = 0;
  for (int pass = 0; pass < passes; pass++) {
    float acc[2][4] = {};
    if (tile < tiles) {
      for (int n = 0; n < loads; n++) {
        barrier_wait(&barriers[warp][stage_out], phase);
        const uint8_t* at = mine_in_ring + stage_out * S::BYTES;
        const int c = n * S::CHUNKS;
#pragma unroll
        for (int u = 0; u < S::CHUNKS; u++) {
          const uint4 w = *reinterpret_cast<const uint4*>(at + u * 64);
          multiply<W, MANY>(acc, w, low + (c + u) * W::CHUNK, MANY ? high + (c + u) * W::CHUNK : nullptr);
        }
        if (++stage_out == STAGES<ROW>) stage_out = 0, phase ^= 1;
        __syncwarp();  // everyone has read the stage that the next load overwrites
        load();
      }
    }
    float total[4];
#pragma unroll
    for (int n = 0; n < 4; n++) total[n] = acc[0][n] + acc[1][n];
    auto store = [&](int token, int row, float v, float scale) {
      if (token >= a.in.T || tile >= tiles) return;
      const int64_t at = static_cast<int64_t>(token) * a.o + tile * TILE + row;
      if (W::BYTES == 1) v *= e4m3::Y_SCALE * scale;
      if (a.wide) {
        static_cast<float*>(a.y)[at] = v;
      } else {
        static_cast<bf16*>(a.y)[at] = __float2bfloat16(v);
      }
    };
    if constexpr (KS == 1) {
      store(g, 2 * t, total[0], scales[0]);
      store(g, 2 * t + 1, total[1], scales[1]);
      if (MANY) {
        store(g + 8, 2 * t, total[2], scales[0]);
        store(g + 8, 2 * t + 1, total[3], scales[1]);
      }
    } else {
      // Two buffers: a warp can be one pass ahead of the slowest reader, never two.
      float* mine = sums[pass & 1][warp];
      *reinterpret_cast<float2*>(mine + g * TILE + 2 * t) = make_float2(total[0], total[1]);
      if (MANY) *reinterpret_cast<float2*>(mine + (g + 8) * TILE + 2 * t) = make_float2(total[2], total[3]);
      named_sync(1 + group, KS * 32);
      for (int n = part * 32 + lane; n < ROWS * TILE; n += KS * 32) {
        float v = 0;
#pragma unroll
        for (int s = 0; s < KS; s++) v += sums[pass & 1][group * KS + s][n];
        store(n / TILE, n % TILE, v, scales[0]);
      }
    }
    tile += step;
    load_scales();
  }
}

template <typename W, int ROW, int KS>
int start(const Args& a, int sms, void* stream) {
  const size_t rings = WARPS * STAGES<ROW> * Stage<ROW>::BYTES;
  const size_t rows = (static_cast<size_t>(a.in.T) * (a.in.i + W::PAD) + (kept(a.in) ? a.in.i : 0)) * sizeof(bf16);
  const int units = (a.o / TILE + WARPS / KS - 1) / (WARPS / KS);
  // One or two CTAs to a processor, never more: a third would fit, and where a predecessor that ends unevenly lets the
  // hardware put three on one processor and one on another, work that is dealt out evenly takes half as long again.
  const bool two = a.in.T <= 8 && rings + rows <= 108 * 1024;
  const size_t claimed = max(rings + rows, static_cast<size_t>(two ? 78 : 116) * 1024);
  auto kernel = a.in.T > 8 ? linear_kernel<W, ROW, KS, true> : linear_kernel<W, ROW, KS, false>;
  return launch(kernel, dim3(min(units, two ? 2 * sms : sms)), dim3(WARPS * 32), claimed, stream, 1, a);
}

template <typename W, int KS>
int choose(const Args& a, int sms, void* stream) {
  const int chunks = a.in.i / W::CHUNK / KS;
  // Long rows of few bytes a value: half the copies are worth more than twice the stages.
  if (W::BYTES == 1 && chunks % 8 == 0 && chunks >= 32) return start<W, 512, KS>(a, sms, stream);
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
  const Args a{{static_cast<const bf16*>(x), x_stride, static_cast<const bf16*>(norm), static_cast<int>(T),
                static_cast<int>(i), eps},
               static_cast<const uint8_t*>(w),
               static_cast<const float*>(scale),
               y,
               static_cast<int>(o),
               static_cast<int>(wide)};
  return scale == nullptr ? split<Bf16>(a, k_split, sms, stream) : split<E4m3>(a, k_split, sms, stream);
}
