// Shared by the kernels around absorbed MLA: Kimi's sizes, and one head's weights as the A operand of tensor cores.
#pragma once
#include "cuda/hopper.cuh"

namespace mla {

using namespace hopper;

constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE, NOPE = 128, VALUE = 128;

// ldmatrix of four 8 x 8 matrices; each lane gives the address of one of their rows.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], const void* row) {
  if (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(row)));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(row)));
  }
}

// A part of a weight in shared memory, K rows and COLUMNS columns: y[column] = sum over k of w[k][column] x[k].
// Inside 32 values of k, rows are ordered so that lane t of a quad loads x[8 t .. 8 t + 7] as 16 bytes: fragment(2 i)
// is multiplied by words 0 and 1, fragment(2 i + 1) by words 2 and 3. 16-byte pieces of a row are swizzled by `spread`,
// which differs among the eight rows that one ldmatrix reads together.
template <int K, int COLUMNS>
struct HeadWeights {
  static constexpr int PIECES = COLUMNS / 8, BYTES = K * COLUMNS * 2;
  static_assert(PIECES % 8 == 0 && K % 32 == 0);
  char* shared;

  __device__ static int spread(int k) { return (k & 1) | (k >> 2 & 6); }

  // Starts the copies; `w` points at the first row and column, rows are `stride` elements apart.
  __device__ void load(const bf16* w, int stride, int thread, int threads) const {
#pragma unroll 2
    for (int i = thread; i < K * PIECES; i += threads) {
      int k = i / PIECES, piece = i % PIECES;
      copy16_once(shared + (k * PIECES + (piece ^ spread(k))) * 16, w + static_cast<int64_t>(k) * stride + piece * 8);
    }
  }

  // The operand A of columns `column` .. + 15 and the 16 k of `step`.
  __device__ void fragment(uint32_t (&a)[4], int step, int column) const {
    int lane = threadIdx.x % 32, j = lane % 8;
    int k = step / 2 * 32 + j / 2 * 8 + step % 2 * 4 + lane / 16 * 2 + j % 2;
    int piece = column / 8 + lane / 8 % 2;
    load_matrices<true>(a, shared + (k * PIECES + (piece ^ spread(k))) * 16);
  }
};

}  // namespace mla
