// Completes the inputs of a chained step: one thread per column. Contract in advance_inputs.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 128;

struct Args {
  int64_t *ids, *positions, *slots;                   // [B, m]
  double* u;                                          // [B, m]
  int* context;                                       // [B]
  const int *front, *chained;                          // [B]
  const int* tables;                                  // [B, M]
  const int64_t *rows, *seeds, *draws;                // [B]
  const int64_t *last_tokens, *shifts, *drafts;        // [N], [N], [N, K]
  int64_t B, m, M, N, K, block_size;
};

__device__ double uniform(uint64_t seed, uint64_t draw) {
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + (draw + 1) * 0xD1B54A32D192ED03ull;
  for (int i = 0; i < 2; i++) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
  }
  return static_cast<double>(z >> 11) * 0x1p-53;
}

__global__ __launch_bounds__(THREADS) void advance_inputs_kernel(Args a) {
  wait_for_predecessor();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= a.B * a.m) return;
  const int64_t b = i / a.m, own = i % a.m - a.front[b], row = a.rows[b];
  if (!a.chained[b] || row < 0 || row >= a.N) return;
  const int64_t shift = a.shifts[row], position = a.positions[i] + shift, block = position / a.block_size;
  if (i % a.m == 0) a.context[b] += static_cast<int>(shift);
  a.positions[i] = position;
  if (a.slots[i] >= 0)
    a.slots[i] = block < a.M ? a.tables[b * a.M + block] * a.block_size + position % a.block_size : int64_t(-1);
  a.ids[i] = own <= 0 ? a.last_tokens[row] : a.drafts[row * a.K + min(own - 1, a.K - 1)];
  if (own >= 0) a.u[i] = uniform(static_cast<uint64_t>(a.seeds[b]), static_cast<uint64_t>(a.draws[b] + shift + own));
}

}  // namespace

API int advance_inputs(void* ids, void* positions, void* slots, void* u, void* context, const void* front, const void* chained,
               const void* tables, const void* rows, const void* seeds, const void* draws, const void* last_tokens,
               const void* shifts, const void* drafts, int64_t B, int64_t m, int64_t M, int64_t N, int64_t K,
               int64_t block_size, void* stream) {
  Args a{static_cast<int64_t*>(ids),
         static_cast<int64_t*>(positions),
         static_cast<int64_t*>(slots),
         static_cast<double*>(u),
         static_cast<int*>(context),
         static_cast<const int*>(front),
         static_cast<const int*>(chained),
         static_cast<const int*>(tables),
         static_cast<const int64_t*>(rows),
         static_cast<const int64_t*>(seeds),
         static_cast<const int64_t*>(draws),
         static_cast<const int64_t*>(last_tokens),
         static_cast<const int64_t*>(shifts),
         static_cast<const int64_t*>(drafts),
         B,
         m,
         M,
         N,
         K,
         block_size};
  return launch(advance_inputs_kernel, dim3((B * m + THREADS - 1) / THREADS), dim3(THREADS), 0, stream, 1, a);
}
