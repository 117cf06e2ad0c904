// y = (x sx) (w sw)^T of e4m3 on the tensor cores, for prompts. Contract in linear_w8a8.py.
//
// A CTA computes WAVES x 128 tokens by 128 outputs. Each of two warpgroups takes half of the tokens, in waves of 64,
// and goes over k in blocks of 128: the tensor cores' sums of a block, times the tokens' scales for it, are added to
// fp32 sums in registers. Tensor cores keep only some 14 bits of sums of e4m3 products, so no sum there has more than
// 128 products. While one warpgroup adds, the other one multiplies.
//
// Two CTAs of a cluster have the same tokens and neighbouring outputs. Each copies half of the tokens to both, so that
// a CTA reads 32 KB instead of 48 from L2 for a stage of 256 tokens.
#include "cuda/tensor_map.cuh"

using namespace hopper;

namespace {

constexpr int BLOCK = 128;    // values of k that share a scale
constexpr int OUTPUTS = 128;  // outputs of a tile
constexpr int PAIR = 2;       // CTAs of a cluster
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int BAND = 8;  // Rows of tiles computed column by column, so that their activations stay in L2.

template <int WAVES>
struct Tile {
  static constexpr int TOKENS = WAVES * 128, STAGES = WAVES == 2 ? 4 : 6;
  static constexpr int X = TOKENS * BLOCK, W = OUTPUTS * BLOCK, SCALES = TOKENS * 4;  // bytes of a stage
  static constexpr int SHARED = 1024 + STAGES * (X + W + SCALES + 16) + 2 * CONSUMERS * 4;
};

struct Args {
  const float* x_scale;  // [blocks, scale_rows]
  const float* w_scale;  // [o]
  bf16* y;               // [T, o]
  int T, o, blocks, scale_rows;
};

// The 4 x 4 words of four lanes, transposed: word i of lane t becomes word t of lane i.
__device__ __forceinline__ uint4 transposed(const uint32_t (&v)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  const uint32_t x0 = odd ? a : v[0], x1 = odd ? v[1] : a, x2 = odd ? b : v[2], x3 = odd ? v[3] : b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? x0 : x2, 2), d = __shfl_xor_sync(~0u, high ? x1 : x3, 2);
  return high ? make_uint4(c, d, x2, x3) : make_uint4(x0, x1, c, d);
}

template <int WAVES>
__global__ void __launch_bounds__(THREADS, 1)
    w8a8_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const Args a) {
  using S = Tile<WAVES>;
  extern __shared__ uint8_t memory[];
  uint8_t* xs = memory + (-shared_address(memory) & 1023);
  uint8_t* ws = xs + S::STAGES * S::X;
  float* scales = reinterpret_cast<float*>(ws + S::STAGES * S::W);
  uint64_t* full = reinterpret_cast<uint64_t*>(scales + S::STAGES * S::TOKENS);
  uint64_t* empty = full + S::STAGES;
  float* w_scales = reinterpret_cast<float*>(empty + S::STAGES);  // [2][2 warpgroups][OUTPUTS]
  const int tid = threadIdx.x, rank = cluster_rank(), clusters = gridDim.x / PAIR;
  const int rows = (a.T + S::TOKENS - 1) / S::TOKENS;  // rows of tiles
  const int pairs = (a.o + PAIR * OUTPUTS - 1) / (PAIR * OUTPUTS), tiles = rows * pairs;
  if (tid == 0) {
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, PAIR * CONSUMERS / 32);
    }
    barriers_visible();
  }
  cluster_sync();  // the barriers are initialised
  wait_for_predecessor();
  let_successor_start();

  // Where tile n begins: (token, output).
  const auto place = [&](int n) {
    const int band = n / (BAND * pairs), within = n % (BAND * pairs), height = min(BAND, rows - band * BAND);
    return make_int2((band * BAND + within % height) * S::TOKENS, (within / height * PAIR + rank) * OUTPUTS);
  };

  if (tid >= CONSUMERS) {
    registers_give<40>();
    if (tid == CONSUMERS) {
      int stage = 0, phase = 1;
      for (int n = blockIdx.x / PAIR; n < tiles; n += clusters) {
        const int2 first = place(n);
        for (int k = 0; k < a.blocks; k++) {
          barrier_wait_to_refill(empty + stage, phase);
          barrier_expect(full + stage, S::X + S::W + S::SCALES);
          const int half = rank * (S::TOKENS / PAIR);
          tensor_load_to(xs + stage * S::X + half * BLOCK, &x, k * BLOCK, first.x + half, 0, full + stage,
                         (1 << PAIR) - 1);
          tensor_load(ws + stage * S::W, &w, k * BLOCK, first.y, 0, full + stage);
          bulk_load(scales + stage * S::TOKENS, a.x_scale + static_cast<int64_t>(k) * a.scale_rows + first.x, S::SCALES,
                    full + stage);
          if (++stage == S::STAGES) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    registers_take<232>();
    const int group = tid / 128, lane = tid % 32, t = lane % 4;
    const int row = group * (64 * WAVES) + tid / 32 % 4 * 16 + lane / 4;  // this thread's first row in a tile
    const uint64_t x0 = slab_descriptor(xs) + (group * 64 * WAVES * BLOCK >> 4), w0 = slab_descriptor(ws);
    float sums[WAVES][64], part[64];
    int stage = 0, phase = 0, turn = 0;
    for (int n = blockIdx.x / PAIR; n < tiles; n += clusters, turn ^= 1) {
      const int2 first = place(n);
      // Loaded now, used after the products: loaded there, 10,000 tokens of q_b took 413 us instead of 389.
      const int own = first.y + tid % OUTPUTS;
      const float w_scale = own < a.o ? a.w_scale[own] : 0.0f;
#pragma unroll
      for (int v = 0; v < WAVES; v++) {
#pragma unroll
        for (int i = 0; i < 64; i++) sums[v][i] = 0.0f;
      }
      for (int k = 0; k < a.blocks; k++) {
        barrier_wait(full + stage, phase);
        float scale[WAVES][2];
#pragma unroll
        for (int v = 0; v < WAVES; v++) {
          scale[v][0] = scales[stage * S::TOKENS + row + 64 * v];
          scale[v][1] = scales[stage * S::TOKENS + row + 64 * v + 8];
        }
        const uint64_t from = w0 + stage * (S::W >> 4);
#pragma unroll
        for (int v = 0; v < WAVES; v++) {
          const uint64_t of = x0 + stage * (S::X >> 4) + (v * 64 * BLOCK >> 4);
          wgmma_fence();
          wgmma_e4m3<0>(part, of, from);
#pragma unroll
          for (int i = 1; i < BLOCK / 32; i++) wgmma_e4m3<1>(part, of + 2 * i, from + 2 * i);
          wgmma_commit();
          wgmma_wait<0>();
          if (v == WAVES - 1 && lane < PAIR) barrier_arrive_at(empty + stage, lane);
#pragma unroll
          for (int i = 0; i < 64; i++) sums[v][i] += scale[v][i / 2 % 2] * part[i];
        }
        if (++stage == S::STAGES) stage = 0, phase ^= 1;
      }
      // Two buffers: a warp can be one tile ahead of the slowest reader, never two.
      float* of_tile = w_scales + (turn * 2 + group) * OUTPUTS;
      of_tile[tid % OUTPUTS] = w_scale;
      named_sync(1 + group, 128);
#pragma unroll
      for (int j = 0; j < 16; j += 4) {  // four times 8 outputs
        float2 of[4];
#pragma unroll
        for (int i = 0; i < 4; i++) of[i] = *reinterpret_cast<const float2*>(of_tile + 8 * (j + i) + 2 * t);
        const int output = first.y + 8 * (j + t);
#pragma unroll
        for (int v = 0; v < WAVES; v++) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const float* sum = &sums[v][4 * (j + i) + 2 * r];
              words[i] = narrow(sum[0] * of[i].x, sum[1] * of[i].y);
            }
            const uint4 whole = transposed(words, t);
            const int token = first.x + row + 64 * v + 8 * r;
            if (token < a.T && output < a.o) {
              *reinterpret_cast<uint4*>(a.y + static_cast<int64_t>(token) * a.o + output) = whole;
            }
          }
        }
      }
    }
  }
  __syncwarp();
  cluster_sync();  // each CTA writes to the other's shared memory, so neither may end first
}

template <int WAVES>
int start(const void* x, const void* w, const Args& a, int i, int sms, void* stream) {
  using S = Tile<WAVES>;
  CUtensorMap maps[2];
  const int64_t width = i;
  if (!maps::describe(&maps[0], x, maps::SWIZZLED_BYTES, {width, a.T, 1}, {width, width * a.T},
                      {BLOCK, S::TOKENS / PAIR, 1}) ||
      !maps::describe(&maps[1], w, maps::SWIZZLED_BYTES, {width, a.o, 1}, {width, width * a.o}, {BLOCK, OUTPUTS, 1})) {
    return -1;
  }
  const int rows = (a.T + S::TOKENS - 1) / S::TOKENS, pairs = (a.o + PAIR * OUTPUTS - 1) / (PAIR * OUTPUTS);
  return launch(w8a8_kernel<WAVES>, dim3(PAIR * min(rows * pairs, sms / PAIR)), dim3(THREADS), S::SHARED, stream, PAIR,
                maps[0], maps[1], a);
}

}  // namespace

// x [T, i] and w [o, i] e4m3; x_scale [ceil(i / 128), scale_rows], scale_rows a multiple of 256 and at least T; w_scale
// [o]; y [T, o]. i is a multiple of 16, o of 8. tall: tiles of 256 tokens, not 128. -1: no driver entry point for
// tensor maps, or the driver refuses one.
API int linear_w8a8(const void* x, const void* x_scale, const void* w, const void* w_scale, void* y, int64_t T,
                    int64_t i, int64_t o, int64_t scale_rows, int64_t tall, int64_t sms, void* stream) {
  const Args a{static_cast<const float*>(x_scale),
               static_cast<const float*>(w_scale),
               static_cast<bf16*>(y),
               static_cast<int>(T),
               static_cast<int>(o),
               static_cast<int>((i + BLOCK - 1) / BLOCK),
               static_cast<int>(scale_rows)};
  return tall ? start<2>(x, w, a, static_cast<int>(i), static_cast<int>(sms), stream)
              : start<1>(x, w, a, static_cast<int>(i), static_cast<int>(sms), stream);
}
