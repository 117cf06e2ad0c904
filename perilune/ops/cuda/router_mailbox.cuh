// Mailbox from the router to the expert kernels of one token (T = 1): gate_up reads x and the ids before the router's
// grid has ended. One mailbox of 64 words in global memory for each stream (ops/moe/chosen.py).
//   word 0         "x is ready": the launch number. Unused with mla_decode_router_t1.cu: gate_up computes x itself.
//   word 1         of mla_decode_router_t1.cu: launch number, SM of the selecting CTA, half of the residual's mailbox
//   words 32 ..    word 32 + n is the n-th chosen expert: launch number << 10 | id
//
//   router     load gate ----- x ready: word 0 ---- partial sums ---- choice: words 32 .. ---- write ids, weights, end
//   gate_up      start, copy the shared expert's weights    |              |
//                wait for word 0, read x <------------------+              |
//                shared expert's products                                  |
//                wait for words 32 .., copy the chosen experts' weights <--+
//                wait for the router's end, then write h
//   down         start after the router's end, read ids; wait for gate_up's end; clear the mailbox
//
// A word carries the number of the launch that wrote it, so readers ignore words of other launches. A replayed CUDA
// graph repeats the numbers of its capture, so `down` clears the words after gate_up's end. A kernel that sees a word
// with number n knows that all kernels before router launch n have ended: it may read their results before its own
// wait_for_predecessor(). With mla_decode_router_t1.cu, mla_decode_output's kernel may still be writing the residual;
// gate_up computes x = norm(residual) from the half of the residual's mailbox that word 1 names (residual_mailbox.cuh).
#pragma once
#include "cuda/hopper.cuh"

namespace mailbox {

constexpr int ID_BITS = 10, MAX_CHOICES = 32;
constexpr int CHOICES = 32;  // index of the word with the first id

__device__ __forceinline__ uint32_t glance(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void put(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// A pair of bf16 or a float as a mailbox word: inverted, and never zero, because zero means "not written yet".
__device__ __forceinline__ uint32_t written(uint32_t bits) { return ~bits ? ~bits : 0x80000000u; }
__device__ __forceinline__ bool misses(const uint4& v) { return !v.x || !v.y || !v.z || !v.w; }
__device__ __forceinline__ uint4 glance16(const uint32_t* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void put16(uint32_t* p, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Word 1: launch number, SM that selects the experts (8 bits), half of the residual's mailbox of this launch (1 bit).
constexpr int SM_BITS = 8;
__device__ __forceinline__ uint32_t sm_id() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
  return v & ((1 << SM_BITS) - 1);
}
__device__ __forceinline__ void publish_turn(uint32_t* mailbox, uint32_t launch, uint32_t turn) {
  put(mailbox + 1, (launch << SM_BITS | sm_id()) << 1 | turn);
}
__device__ __forceinline__ bool arrived_turn(uint32_t word, uint32_t launch) {
  return word >> (SM_BITS + 1) == launch;
}
__device__ __forceinline__ uint32_t sm_of(uint32_t word) { return word >> 1 & ((1 << SM_BITS) - 1); }

__device__ __forceinline__ void publish_x(uint32_t* mailbox, uint32_t launch) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(mailbox), "r"(launch) : "memory");
}
// Called by a whole warp. Afterwards all of its lanes may read x.
__device__ __forceinline__ void wait_for_x(const uint32_t* mailbox, uint32_t launch) {
  if (threadIdx.x % 32 == 0) {
    uint32_t v;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(mailbox) : "memory");
    } while (v != launch);
  }
  __syncwarp();
}

__device__ __forceinline__ void publish_choice(uint32_t* mailbox, uint32_t launch, int n, int id) {
  put(mailbox + CHOICES + n, launch << ID_BITS | id);
}
// In lane n < k: the present word of choice n, without waiting.
__device__ __forceinline__ uint32_t glance_choice(const uint32_t* mailbox, int k) {
  const int lane = threadIdx.x % 32;
  return lane < k ? glance(mailbox + CHOICES + lane) : 0;
}
__device__ __forceinline__ bool arrived(uint32_t word, uint32_t launch) { return word >> ID_BITS == launch; }
__device__ __forceinline__ int choice_of(uint32_t word) { return static_cast<int>(word & ((1 << ID_BITS) - 1)); }

// Clears the mailbox. Called by one warp after the last reader has ended.
__device__ __forceinline__ void wipe(uint32_t* mailbox) {
  const int lane = threadIdx.x % 32;
  if (lane < 2) mailbox[lane] = 0;
  mailbox[CHOICES + lane] = 0;
}

}  // namespace mailbox
