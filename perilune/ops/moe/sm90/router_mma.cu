// Router scores and the choice of experts in one launch. Contract in router.py.
//
// CTAs of 8 warps each multiply 8 rows of the gate over a part of the width with up to 16 tokens; copies of the gate to
// shared memory begin before the activations are ready. CTA t then polls for the sums of token t, adds the parts in order
// and selects the experts. While the experts' weights stream, a round trip to memory or an instruction cache miss takes
// microseconds. So biases are loaded early; all code is first run without effect (`rehearsal`); a sum's word is nonzero
// once written (no fence, no counter); ids are published one by one (router_mailbox.cuh).
#include "cuda/router_mailbox.cuh"
#include "moe/sm90/topk.cuh"
#include "cuda/wgmma.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 8;
constexpr int CHUNK = 32;
constexpr int MOST_CHUNKS = 14;  // per warp, which holds its activations in registers

struct Args {
  const bf16* x;     // [T, D]
  const bf16* gate;  // [E, D]
  routing::Choice choice;
  uint32_t* sums;   // [parts, T, E]: inverted bits of a float; 0: not written. Zero before and after the launch
  uint32_t* mailbox;
  uint32_t launch;  // the launch's number, if T is 1; 0: nothing is published
  int T, D, workers;
};

// Bytes between a warp's rows of the gate, so that two neighbouring rows share no bank.
__host__ __device__ constexpr int weight_pitch(int row) { return row % 128 ? row : row + 64; }

// Waits for the sums of this thread's experts (first + 32 n) of a token, adds their parts, clears them, and returns their
// sigmoids. rehearsal: neither waits nor clears.
template <int EACH>
__device__ __forceinline__ void add_up(const Args& a, int token, int first, bool rehearsal, float (&score)[EACH]) {
  const auto real = [&](int n) { return first + n * 32 < a.choice.E; };
#pragma unroll
  for (int n = 0; n < EACH; n++) score[n] = 0;
#pragma unroll 1
  for (int p = 0; p < gridDim.y; p++) {
    uint32_t* sums = a.sums + (static_cast<int64_t>(p) * a.T + token) * a.choice.E + first;
    uint32_t seen[EACH] = {};
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        if (real(n) && seen[n] == 0) seen[n] = mailbox::glance(sums + n * 32);
      }
#pragma unroll
      for (int n = 0; n < EACH; n++) missing |= real(n) && seen[n] == 0;
    } while (__any_sync(~0u, missing && !rehearsal));
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      score[n] += __uint_as_float(~seen[n]);
      if (real(n) && !rehearsal) sums[n * 32] = 0;
    }
  }
#pragma unroll
  for (int n = 0; n < EACH; n++) score[n] = 1.0f / (1.0f + expf(-score[n]));
}

// Waits for x and writes this CTA's sums. rehearsal: neither waits nor writes; x may be incomplete.
template <bool MANY>
__device__ __forceinline__ void multiply(const Args& a, const uint8_t* gate,
                                         float (&sums)[WARPS][(MANY ? 16 : 8) * TILE], uint64_t (&barriers)[WARPS],
                                         bool rehearsal) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int width = a.D / gridDim.y, chunks = width / CHUNK / a.workers, E = a.choice.E;
  const int row_pitch = weight_pitch(chunks * CHUNK * 2), k0 = blockIdx.y * width + warp * chunks * CHUNK;
  if (!rehearsal) {
    wait_for_predecessor();
    // Without publication, the next kernel may read x as soon as it starts.
    if (!a.launch) let_successor_start();
    if (a.launch && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) mailbox::publish_x(a.mailbox, a.launch);
  }

  float acc[2][4] = {};
  if (warp < a.workers) {
    const bf16* low = a.x + static_cast<int64_t>(min(g, a.T - 1)) * a.D + k0 + 8 * t;
    const bf16* high = a.x + static_cast<int64_t>(min(g + 8, a.T - 1)) * a.D + k0 + 8 * t;
    uint4 x[MOST_CHUNKS], z[MANY ? MOST_CHUNKS : 1];
#pragma unroll
    for (int c = 0; c < MOST_CHUNKS; c++) {
      if (c >= chunks) break;
      x[c] = __ldcg(reinterpret_cast<const uint4*>(low + c * CHUNK));
      if (MANY) z[c] = __ldcg(reinterpret_cast<const uint4*>(high + c * CHUNK));
    }
    if (!rehearsal) barrier_wait(&barriers[warp], 0);
    const uint8_t* mine = gate + g * row_pitch + 16 * t;
#pragma unroll
    for (int c = 0; c < MOST_CHUNKS; c++) {
      if (c >= chunks) break;
      const uint4 v = *reinterpret_cast<const uint4*>(mine + c * 64), w = MANY ? z[c] : make_uint4(0, 0, 0, 0);
      const uint32_t even[4] = {x[c].x, w.x, x[c].y, w.y}, odd[4] = {x[c].z, w.z, x[c].w, w.w};
      mma(acc[0], even, v.x, v.y, bf16());
      mma(acc[1], odd, v.z, v.w, bf16());
    }
  }
  *reinterpret_cast<float2*>(&sums[warp][g * TILE + 2 * t]) = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
  if (MANY) {
    *reinterpret_cast<float2*>(&sums[warp][(g + 8) * TILE + 2 * t]) =
        make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
  }
  __syncthreads();
  for (int n = threadIdx.x; n < a.T * TILE; n += WARPS * 32) {
    float v = 0;
#pragma unroll
    for (int s = 0; s < WARPS; s++) v += sums[s][n];
    const int64_t token = n / TILE;
    uint32_t* to = a.sums + (blockIdx.y * a.T + token) * E + blockIdx.x * TILE + n % TILE;
    if (!rehearsal) mailbox::put(to, mailbox::written(__float_as_uint(v)));
  }
}

template <bool MANY>
__global__ __launch_bounds__(WARPS * 32, MANY ? 1 : 2) void router_kernel(const __grid_constant__ Args a) {
  constexpr int ROWS = MANY ? 16 : 8, EACH = routing::MOST_EXPERTS / (WARPS * 32);
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[WARPS][ROWS * TILE];
  __shared__ routing::Choosing<EACH, WARPS> choosing;
  __shared__ uint64_t barriers[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int width = a.D / gridDim.y, chunks = width / CHUNK / a.workers, ctas = gridDim.x * gridDim.y;
  const int row = chunks * CHUNK * 2, row_pitch = weight_pitch(row), k0 = blockIdx.y * width + warp * chunks * CHUNK;
  const int cta = blockIdx.y * gridDim.x + blockIdx.x;
  if (a.launch) let_successor_start();
  uint8_t* gate = memory + warp * TILE * row_pitch;
  if (warp < a.workers && lane == 0) {
    barrier_init(&barriers[warp], 1);
    barriers_visible();
    barrier_expect(&barriers[warp], TILE * row);
  }
  __syncwarp();
  if (warp < a.workers && lane < TILE) {
    const bf16* from = a.gate + static_cast<int64_t>(blockIdx.x * TILE + lane) * a.D + k0;
    bulk_load_once(gate + lane * row_pitch, from, row, &barriers[warp]);
  }
  if (cta < a.T) choosing.begin(a.choice);
#pragma unroll 1
  for (bool rehearsal = true;; rehearsal = false) {
    multiply<MANY>(a, gate, sums, barriers, rehearsal);
#pragma unroll 1
    for (int token = cta; token < a.T; token += ctas) {
      choosing.choose(
          a.choice, token, rehearsal,
          [&](float (&score)[EACH]) { add_up<EACH>(a, token, choosing.first(), rehearsal, score); },
          [&](int k, int id) {
            if (a.launch) mailbox::publish_choice(a.mailbox, a.launch, k, id);
          });
      if (rehearsal) break;
    }
    if (!rehearsal) return;
    __syncthreads();
  }
}

}  // namespace

// T at most 16, E a multiple of 8 and at most 512, top_k at most 32, D / parts = 32 x workers (at most 8) x up to 14.
// sums: zero before and after. mailbox: of router_mailbox.cuh, of this stream; launch: if T is 1, a number that no other
// launch has, below 2^22; or 0: then nothing is published, and the next kernel may read x as soon as it starts.
API int router(const void* x, const void* gate, const void* bias, void* sums, void* mailbox, void* ids, void* weights,
               int64_t launch_number, int64_t T, int64_t D, int64_t E, int64_t top_k, int64_t norm, int64_t parts,
               int64_t workers, float scale, void* stream) {
  const Args a{static_cast<const bf16*>(x),
               static_cast<const bf16*>(gate),
               {static_cast<const float*>(bias), static_cast<int*>(ids), static_cast<float*>(weights),
                static_cast<int>(E), static_cast<int>(top_k), static_cast<int>(norm), scale},
               static_cast<uint32_t*>(sums),
               static_cast<uint32_t*>(mailbox),
               static_cast<uint32_t>(launch_number),
               static_cast<int>(T),
               static_cast<int>(D),
               static_cast<int>(workers)};
  const int64_t row = D / parts / workers * 2;
  if (row / 2 / CHUNK > MOST_CHUNKS || (launch_number && T > 1)) return -1;
  const size_t shared = static_cast<size_t>(workers) * TILE * weight_pitch(static_cast<int>(row));
  auto kernel = T > 8 ? router_kernel<true> : router_kernel<false>;
  return launch(kernel, dim3(E / TILE, parts), dim3(WARPS * 32), shared, stream, 1, a);
}
