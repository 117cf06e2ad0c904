// swiglu on CPU, fp32. I is a multiple of 8.
#include "cpp/vec.h"

API swiglu(const float* gate_up, int64_t ld, float* y, int64_t T, int64_t I, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T * I > (1 << 16))
  for (int64_t t = 0; t < T; t++)
    for (int64_t k = 0; k < I; k += 8)
      store(y + t * I + k, silu(load(gate_up + t * ld + k)) * load(gate_up + t * ld + I + k));
  return 0;
}
