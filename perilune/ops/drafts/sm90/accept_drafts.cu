// Accepts the drafts of a step: one thread per request. Contract in accept_drafts.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 128;

struct Args {
  const int64_t *drawn, *ids;  // [B m]
  const int *front, *stop;     // [B]
  const int64_t* stores;       // [B]
  int64_t *last_tokens, *shifts;  // [N]
  double* out;                 // [B, W]
  int64_t *following, *last;   // [B m], [B]
  int64_t B, m, W, N;
};

__global__ __launch_bounds__(THREADS) void accept_drafts_kernel(Args a) {
  wait_for_predecessor();
  const int64_t b = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (b >= a.B) return;
  const int64_t* drawn = a.drawn + b * a.m;
  const int64_t* ids = a.ids + b * a.m;
  const int64_t first = a.front[b], stop = min(static_cast<int64_t>(a.stop[b]), a.m - 1);
  int64_t at = first;
  while (at < stop && drawn[at] == ids[at + 1]) at++;
  for (int64_t j = 0; j < a.m; j++) {
    a.following[b * a.m + j] = max(drawn[j], int64_t(0));
    a.out[b * a.W + j] = static_cast<double>(drawn[j]);
  }
  const bool failed = drawn[at] < 0;
  a.last[b] = b * a.m + at;
  a.out[b * a.W + a.m] = static_cast<double>(at - first + !failed);
  a.out[b * a.W + a.m + 1] = failed;
  const int64_t row = a.stores[b];
  if (row < 0 || row >= a.N) return;
  a.last_tokens[row] = max(drawn[at], int64_t(0));
  a.shifts[row] = at - first;
}

}  // namespace

API int accept_drafts(const void* drawn, const void* ids, const void* front, const void* stop, const void* stores,
                void* last_tokens, void* shifts, void* out, void* following, void* last, int64_t B, int64_t m, int64_t W, int64_t N,
                void* stream) {
  Args a{static_cast<const int64_t*>(drawn),
         static_cast<const int64_t*>(ids),
         static_cast<const int*>(front),
         static_cast<const int*>(stop),
         static_cast<const int64_t*>(stores),
         static_cast<int64_t*>(last_tokens),
         static_cast<int64_t*>(shifts),
         static_cast<double*>(out),
         static_cast<int64_t*>(following),
         static_cast<int64_t*>(last),
         B,
         m,
         W,
         N};
  return launch(accept_drafts_kernel, dim3((B + THREADS - 1) / THREADS), dim3(THREADS), 0, stream, 1, a);
}
