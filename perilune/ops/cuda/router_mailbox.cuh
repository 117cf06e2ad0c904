// What the router tells the experts' kernel while it still runs, for one token: that x is there, and its choices.
// Whoever has been told either may use what the kernels before the router left, ahead of its own
// wait_for_predecessor(): they have ended. Of a kernel that hands over what x is the norm of (mla_decode_router_t1.cu),
// it is told in which half of that board this is, and makes x itself.
//
// Words of a board in global memory, one board to a stream. A word carries the number of the launch that wrote it,
// which no other launch has, so that what others left means nothing; and where a graph launches the same again, the
// last who could read the board has made it zero.
#pragma once
#include "cuda/hopper.cuh"

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

// What a kernel hands over word by word: a pair of bf16, inverted, but never zero, which is where there is nothing yet.
__device__ __forceinline__ uint32_t written(uint32_t pair) { return ~pair ? ~pair : 0x80000000u; }
__device__ __forceinline__ bool misses(const uint4& v) { return !v.x || !v.y || !v.z || !v.w; }
__device__ __forceinline__ uint4 glance16(const uint32_t* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Word 1: which half of its board the kernel before writes in this launch, and on which processor the choice is made.
constexpr int PROCESSOR_BITS = 8;
__device__ __forceinline__ uint32_t processor() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
  return v & ((1 << PROCESSOR_BITS) - 1);
}
__device__ __forceinline__ void tell_turn(uint32_t* board, uint32_t launch, uint32_t turn) {
  put(board + 1, (launch << PROCESSOR_BITS | processor()) << 1 | turn);
}
__device__ __forceinline__ bool told_turn(uint32_t word, uint32_t launch) {
  return word >> (PROCESSOR_BITS + 1) == launch;
}
__device__ __forceinline__ uint32_t processor_of(uint32_t word) { return word >> 1 & ((1 << PROCESSOR_BITS) - 1); }

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
  if (lane < 2) board[lane] = 0;
  board[CHOICES + lane] = 0;
}

}  // namespace announce
