// What the router tells the experts' kernel while it still runs, for one token: that x is there, and its choices.
// Whoever has been told either may use what the kernels before the router left, ahead of its own
// wait_for_predecessor(): they have ended.
//
// Words of a board in global memory, one board to a stream. A word carries the number of the launch that wrote it,
// which no other launch has, so that what others left means nothing; and where a graph launches the same again, the
// last who could read the board has made it zero.
#pragma once
#include "hopper.cuh"

namespace announce {

constexpr int ID_BITS = 10, MAX_CHOICES = 32;
constexpr int CHOICES = 32;  // where they begin on the board; word 0 says that x is there

__device__ __forceinline__ uint32_t glance(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void put(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void tell_x(uint32_t* board, uint32_t launch) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(board), "r"(launch) : "memory");
}
// By a whole warp, which may read x afterwards.
__device__ __forceinline__ void wait_for_x(const uint32_t* board, uint32_t launch) {
  if (threadIdx.x % 32 == 0) {
    uint32_t v;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(board) : "memory");
    } while (v != launch);
  }
  __syncwarp();
}

__device__ __forceinline__ void tell_choice(uint32_t* board, uint32_t launch, int n, int id) {
  put(board + CHOICES + n, launch << ID_BITS | id);
}
// Lane n of a warp: what the board now says of choice n of k.
__device__ __forceinline__ uint32_t glance_choice(const uint32_t* board, int k) {
  const int lane = threadIdx.x % 32;
  return lane < k ? glance(board + CHOICES + lane) : 0;
}
__device__ __forceinline__ bool told(uint32_t word, uint32_t launch) { return word >> ID_BITS == launch; }
__device__ __forceinline__ int choice_of(uint32_t word) { return static_cast<int>(word & ((1 << ID_BITS) - 1)); }

// By one warp of a kernel before which all have read it.
__device__ __forceinline__ void wipe(uint32_t* board) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) board[0] = 0;
  board[CHOICES + lane] = 0;
}

}  // namespace announce
