// Router scores and the choice of experts in one launch. Contract in router.py.
//
// CTAs of 8 warps each multiply 8 rows of the gate over a part of the width, all of which is on its way to shared memory
// before the activations are there, with up to 16 tokens; the last CTA of these tokens to finish adds the parts in order,
// and a warp per token picks the experts.
#include "router_pick.cuh"
#include "wgmma.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 8;
constexpr int CHUNK = 32;
constexpr int PAD = 32;
constexpr int TOKENS = 16;  // of a CTA

struct Args {
  const bf16* x;     // [T, D]
  const bf16* gate;  // [E, D]
  const float* bias;
  float* scores;  // [split, T, E], scratch
  uint32_t* done;  // one for every 16 tokens, zero before and after
  int* ids;
  float* weights;
  int T, D, E, top_k, norm, workers;
  float scale;
};

// Bytes between a warp's rows of the gate: two neighbours share no bank.
__host__ __device__ constexpr int weight_pitch(int row) { return row % 128 ? row : row + 64; }

template <bool MANY>
__global__ __launch_bounds__(WARPS * 32) void router_kernel(Args a) {
  constexpr int ROWS = MANY ? 16 : 8;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[WARPS][ROWS * TILE];
  __shared__ uint64_t barriers[WARPS];
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int parts = gridDim.y, width = a.D / parts, k0 = blockIdx.y * width, chunks = width / CHUNK / a.workers;
  const int pitch = width + PAD, own = warp * chunks * CHUNK;
  const int row = chunks * CHUNK * 2, row_pitch = weight_pitch(row);
  const bool works = warp < a.workers;
  const int first = blockIdx.z * TOKENS, tokens = min(TOKENS, a.T - first);
  uint8_t* gate = memory + warp * TILE * row_pitch;
  bf16* xs = reinterpret_cast<bf16*>(memory + a.workers * TILE * row_pitch);
  if (works && lane == 0) {
    barrier_init(&barriers[warp], 1);
    barriers_visible();
    barrier_expect(&barriers[warp], TILE * row);
  }
  __syncwarp();
  if (works && lane < TILE) {
    const bf16* from = a.gate + static_cast<int64_t>(blockIdx.x * TILE + lane) * a.D + k0 + own;
    bulk_load(gate + lane * row_pitch, from, row, &barriers[warp]);
  }
  wait_for_predecessor();
  let_successor_start();  // not before: whoever starts after this kernel may take x as written
  for (int n = threadIdx.x; n < tokens * (width / 8); n += WARPS * 32) {
    int token = n / (width / 8), k = (n - token * (width / 8)) * 8;
    copy16(xs + token * pitch + k, a.x + static_cast<int64_t>(first + token) * a.D + k0 + k);
  }
  copies_commit();
  copies_wait<0>();
  __syncthreads();

  const bf16* low = xs + min(g, tokens - 1) * pitch + own + 8 * t;
  const bf16* high = MANY ? xs + min(g + 8, tokens - 1) * pitch + own + 8 * t : nullptr;
  float acc[2][4] = {};
  if (works) {
    barrier_wait(&barriers[warp], 0);
    const uint8_t* mine = gate + g * row_pitch + 16 * t;
#pragma unroll 2
    for (int c = 0; c < chunks; c++) {
      uint4 v = *reinterpret_cast<const uint4*>(mine + c * 64);
      uint4 x = *reinterpret_cast<const uint4*>(low + c * CHUNK);
      uint4 z = MANY ? *reinterpret_cast<const uint4*>(high + c * CHUNK) : make_uint4(0, 0, 0, 0);
      uint32_t first[4] = {x.x, z.x, x.y, z.y}, second[4] = {x.z, z.z, x.w, z.w};
      mma(acc[0], first, v.x, v.y, bf16());
      mma(acc[1], second, v.z, v.w, bf16());
    }
  }
  *reinterpret_cast<float2*>(&sums[warp][g * TILE + 2 * t]) = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
  if (MANY) {
    *reinterpret_cast<float2*>(&sums[warp][(g + 8) * TILE + 2 * t]) =
        make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
  }
  __syncthreads();
  for (int n = threadIdx.x; n < tokens * TILE; n += WARPS * 32) {
    float v = 0;
#pragma unroll
    for (int s = 0; s < WARPS; s++) v += sums[s][n];
    int token = first + n / TILE;
    __stcg(a.scores + (static_cast<int64_t>(blockIdx.y) * a.T + token) * a.E + blockIdx.x * TILE + n % TILE, v);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(a.done + blockIdx.z, 1) == gridDim.x * gridDim.y - 1;
    if (last) a.done[blockIdx.z] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  const routing::Choice choice = {a.bias, a.ids, a.weights, a.E, a.top_k, a.norm, a.scale};
  for (int token = first + warp; token < first + tokens; token += WARPS)
    routing::pick(choice, a.scores + static_cast<int64_t>(token) * a.E, parts, static_cast<int64_t>(a.T) * a.E, token,
                 lane);
}

}  // namespace

// E a multiple of 8 and at most 512, top_k at most 32, D / parts a multiple of 32 x workers (at most 8); `done` has
// T / 16 counters, rounded up.
API int router(const void* x, const void* gate, const void* bias, void* scores, void* done, void* ids, void* weights,
               int64_t T, int64_t D, int64_t E, int64_t top_k, int64_t norm, int64_t parts, int64_t workers,
               float scale, void* stream) {
  Args a{static_cast<const bf16*>(x), static_cast<const bf16*>(gate), static_cast<const float*>(bias),
         static_cast<float*>(scores), static_cast<uint32_t*>(done), static_cast<int*>(ids),
         static_cast<float*>(weights), static_cast<int>(T), static_cast<int>(D), static_cast<int>(E),
         static_cast<int>(top_k), static_cast<int>(norm), static_cast<int>(workers), scale};
  const int row = a.D / parts / a.workers * 2;
  const size_t shared =
      static_cast<size_t>(a.workers) * TILE * weight_pitch(row) + static_cast<size_t>(min(a.T, TOKENS)) * (D / parts + PAD) * 2;
  auto kernel = T > 8 ? router_kernel<true> : router_kernel<false>;
  return launch(kernel, dim3(a.E / TILE, parts, (a.T + TOKENS - 1) / TOKENS), dim3(WARPS * 32), shared, stream, 1, a);
}
