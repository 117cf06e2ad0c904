// A thread per row; contract in shard_rows.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 128;

__global__ void __launch_bounds__(THREADS) rows_kernel(const int64_t* slots, const int64_t* positions, int64_t* own,
                                                       int* context, int T, int rank, int ranks, int tokens) {
  wait_for_predecessor();
  let_successor_start();
  const int t = blockIdx.x * THREADS + threadIdx.x;
  if (t >= T) return;
  const int64_t slot = slots[t], shard = slot / tokens;
  own[t] = slot >= 0 && shard % ranks == rank ? shard / ranks * tokens + slot % tokens : -1;
  const int length = static_cast<int>(positions[t]) + 1, block = ranks * tokens;
  const int rest = length % block - rank * tokens;
  context[t] = length / block * tokens + min(max(rest, 0), tokens);
}

}  // namespace

API int shard_rows(const void* slots, const void* positions, void* own, void* context, int64_t T, int64_t rank,
                   int64_t ranks, int64_t tokens, void* stream) {
  if (T == 0) return 0;
  return launch(rows_kernel, dim3((T + THREADS - 1) / THREADS), dim3(THREADS), 0, stream, 1,
                static_cast<const int64_t*>(slots), static_cast<const int64_t*>(positions), static_cast<int64_t*>(own),
                static_cast<int*>(context), static_cast<int>(T), static_cast<int>(rank), static_cast<int>(ranks),
                static_cast<int>(tokens));
}
