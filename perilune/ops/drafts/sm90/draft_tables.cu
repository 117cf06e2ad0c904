// Inputs for drafting chains, several CTAs per request. Contract in draft_tables.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256;
constexpr int MOST_CTAS = 16;  // max CTAs per request
constexpr int EACH = 4;        // copies of 16 bytes in flight per thread

struct Args {
  const int* tables;             // [S, M]
  const int64_t* last;           // [S]
  uint4* pages;
  int* found;                    // [S, M + ahead]
  int64_t *positions, *slots;    // [k, S]
  int* contexts;                 // [k, S]
  int64_t S, M, scratch, ahead, k, size, words;  // words: of 16 bytes in a block
};

__global__ __launch_bounds__(THREADS) void draft_tables_kernel(Args a) {
  wait_for_predecessor();  // no let_successor_start(): the next kernel must start after this one's end (see .py)
  const int64_t b = blockIdx.x, p = a.last[b] + 1, first = p / a.size, own = a.scratch + a.ahead * b;
  const int64_t thread = static_cast<int64_t>(blockIdx.y) * THREADS + threadIdx.x, threads = gridDim.y * THREADS;
  const int* table = a.tables + b * a.M;
  const int64_t block = first < a.M ? table[first] : -1;
  if (block >= 0 && block < a.scratch) {
    const uint4* from = a.pages + block * a.words;
    uint4* to = a.pages + own * a.words;
    for (int64_t i = thread; i < a.words; i += EACH * threads) {
      uint4 x[EACH];
#pragma unroll
      for (int n = 0; n < EACH; n++)
        if (i + n * threads < a.words) x[n] = from[i + n * threads];
#pragma unroll
      for (int n = 0; n < EACH; n++)
        if (i + n * threads < a.words) to[i + n * threads] = x[n];
    }
  }
  const int64_t width = a.M + a.ahead;
  for (int64_t c = thread; c < width; c += threads) {
    const int64_t beyond = c - first;
    a.found[b * width + c] = beyond < 0 ? (c < a.M ? table[c] : static_cast<int>(own))
                                        : static_cast<int>(own + min(beyond, a.ahead - 1));
  }
  for (int64_t i = thread; i < a.k; i += threads) {
    a.positions[i * a.S + b] = p + i;
    a.slots[i * a.S + b] = own * a.size + p % a.size + i;
    a.contexts[i * a.S + b] = static_cast<int>(p + i + 1);
  }
}

}  // namespace

API int draft_tables(const void* tables, const void* last, void* pages, void* found, void* positions, void* slots,
               void* contexts, int64_t S, int64_t M, int64_t scratch, int64_t ahead, int64_t k, int64_t size,
               int64_t block_bytes, void* stream) {
  Args a{static_cast<const int*>(tables),
         static_cast<const int64_t*>(last),
         static_cast<uint4*>(pages),
         static_cast<int*>(found),
         static_cast<int64_t*>(positions),
         static_cast<int64_t*>(slots),
         static_cast<int*>(contexts),
         S,
         M,
         scratch,
         ahead,
         k,
         size,
         block_bytes / 16};
  const int64_t ctas = (a.words + EACH * THREADS - 1) / (EACH * THREADS);
  return launch(draft_tables_kernel, dim3(S, ctas < MOST_CTAS ? ctas : MOST_CTAS), dim3(THREADS), 0, stream, 1, a);
}
