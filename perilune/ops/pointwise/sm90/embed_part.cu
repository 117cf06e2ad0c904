// A rank's part of the embedding, zeros to add the sum of all parts to, and rows of the rope tables, in one launch, a
// CTA per token. Contract in embed_part.py.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 256;

struct Args {
  const int64_t *ids, *rows, *last;  // rows and last may be null
  const int64_t* positions;
  const bf16* table;       // [V, D]
  const float *cos, *sin;  // [P, R]
  bf16 *zeros, *part;      // [T, D]
  float *cos_rows, *sin_rows;
  int64_t pending, first, V;
  int D, R;
};

__global__ __launch_bounds__(THREADS) void embed_part_kernel(Args a) {
  let_successor_start();
  wait_for_predecessor();

  const int64_t t = blockIdx.x, position = a.positions[t];
  int64_t id = a.ids[t];
  if (id == a.pending && a.last != nullptr) id = a.last[a.rows[t]];
  id -= a.first;
  const bool inside = id >= 0 && id < a.V;
  const bf16* row = a.table + (inside ? id : 0) * a.D;
  for (int g = threadIdx.x; g < a.D / 8; g += THREADS) {
    const uint4 value = inside ? load16(row + g * 8) : uint4{};
    *reinterpret_cast<uint4*>(a.part + t * a.D + g * 8) = value;
    *reinterpret_cast<uint4*>(a.zeros + t * a.D + g * 8) = uint4{};
  }
  for (int r = threadIdx.x; r < a.R; r += THREADS) {
    a.cos_rows[t * a.R + r] = a.cos[position * a.R + r];
    a.sin_rows[t * a.R + r] = a.sin[position * a.R + r];
  }
}

}  // namespace

// D is a multiple of 8.
API int embed_part(const void* ids, const void* rows, const void* last, const void* positions, const void* table,
                   const void* cos, const void* sin, void* zeros, void* part, void* cos_rows, void* sin_rows, int64_t T,
                   int64_t first, int64_t V, int64_t D, int64_t R, int64_t pending, void* stream) {
  Args a{static_cast<const int64_t*>(ids),
         static_cast<const int64_t*>(rows),
         static_cast<const int64_t*>(last),
         static_cast<const int64_t*>(positions),
         static_cast<const bf16*>(table),
         static_cast<const float*>(cos),
         static_cast<const float*>(sin),
         static_cast<bf16*>(zeros),
         static_cast<bf16*>(part),
         static_cast<float*>(cos_rows),
         static_cast<float*>(sin_rows),
         pending,
         first,
         V,
         static_cast<int>(D),
         static_cast<int>(R)};
  return launch(embed_part_kernel, dim3(T), dim3(THREADS), 0, stream, 1, a);
}
