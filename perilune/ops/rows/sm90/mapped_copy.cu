// Copies a few KB between the device and mapped host memory, without a copy engine. Contract in mapped_copy.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 128;
constexpr int MAX_CTAS = 128;  // with 16 bytes per thread, 256 KB are in flight at once

// `vectors` of 16 bytes, then `words` of 4. __ldcv bypasses caches: the host changes the memory between launches.
__global__ __launch_bounds__(THREADS) void mapped_copy_kernel(int4* to, const int4* from, int64_t vectors, int words) {
  wait_for_predecessor();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  for (int64_t i = thread; i < vectors; i += static_cast<int64_t>(gridDim.x) * THREADS) to[i] = __ldcv(from + i);
  if (thread < words) {
    const int* rest = reinterpret_cast<const int*>(from + vectors);
    reinterpret_cast<int*>(to + vectors)[thread] = __ldcv(rest + thread);
  }
}

__global__ __launch_bounds__(THREADS) void mapped_copy_words_kernel(int* to, const int* from, int64_t words) {
  wait_for_predecessor();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  for (int64_t i = thread; i < words; i += static_cast<int64_t>(gridDim.x) * THREADS) to[i] = __ldcv(from + i);
}

int ctas(int64_t items) {
  const int64_t wanted = (items + THREADS - 1) / THREADS;
  return static_cast<int>(wanted < 1 ? 1 : wanted > MAX_CTAS ? MAX_CTAS : wanted);
}

}  // namespace

API int mapped_copy(void* to, const void* from, int64_t words, void* stream) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16)
    return launch(mapped_copy_words_kernel, dim3(ctas(words)), dim3(THREADS), 0, stream, 1, static_cast<int*>(to),
                  static_cast<const int*>(from), words);
  const int64_t vectors = words / 4;
  return launch(mapped_copy_kernel, dim3(ctas(vectors)), dim3(THREADS), 0, stream, 1, static_cast<int4*>(to),
                static_cast<const int4*>(from), vectors, static_cast<int>(words % 4));
}
