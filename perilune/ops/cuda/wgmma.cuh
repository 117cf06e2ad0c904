// Warpgroup products (wgmma) and what feeds them: barriers in shared memory, bulk copies, clusters.
//
// A "slab" is 64 values of k of 8 rows, 1,024 bytes with the 128-byte swizzle: 16-byte chunk c of row r is stored at
// chunk c ^ r. Slabs of consecutive rows are adjacent, so the B of a product over 64 k is one contiguous copy.
#pragma once
#include "cuda/hopper.cuh"

namespace hopper {

// ---- barriers ----
// Arrive and wait order accesses to shared memory, also those of bulk copies and wgmma, but not ordinary writes to
// global memory: cluster-wide release and acquire would flush the L1 cache each time.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives at the barrier at the same address in CTA `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int phase) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
      " @done bra.uni over; bra.uni again; over: }" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, int phase) {
  uint32_t yes;
  asm volatile(
      "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
      : "=r"(yes)
      : "r"(shared_address(barrier)), "r"(phase)
      : "memory");
  return yes;
}

// Waits until bulk copies of this thread may overwrite a slot. Ordinary loads and ldmatrix use another memory proxy
// than bulk copies: without the fence, a copy could overwrite a slot that warps still read, despite the barrier. Slots
// that only wgmma reads need no fence.
__device__ __forceinline__ void barrier_wait_to_refill(uint64_t* barrier, int phase) {
  barrier_wait(barrier, phase);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- bulk copies, clusters ----
// Issue copies from one elected lane, with addresses that are uniform in the warp: a few instructions per copy.
// Addresses that differ between lanes compile to a loop over lanes, which took half of a short kernel's time.

// True in exactly one lane. Called by a whole warp.
__device__ __forceinline__ bool elected() {
  uint32_t yes;
  asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one; }" : "=r"(yes));
  return yes;
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// For weights, which no kernel reads again in this step.
__device__ __forceinline__ void bulk_load_once(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(ONCE)
      : "memory");
}
// Multicast: as `tensor_load_to` (tensor_map.cuh).
__device__ __forceinline__ void bulk_load_to(void* shared, const void* global, int bytes, uint64_t* barrier, int mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(mask))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the sources of this thread's bulk stores may be overwritten.
__device__ __forceinline__ void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Called after ordinary writes to shared memory, before bulk copies or wgmma read them.
__device__ __forceinline__ void shared_writes_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ int cluster_size() {
  int size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// Maps `p` in this CTA's shared memory to the same place in CTA `rank` of the cluster; `store_in` stores there.
__device__ __forceinline__ uint32_t address_in(const float* p, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}
__device__ __forceinline__ void store_in(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
// A barrier of `threads` threads of the CTA. Barrier 0 is that of __syncthreads.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Called by all THREADS threads of a CTA once one warp (`made`) has initialised the mbarriers; that warp does not wait.
// One of its lanes initialises all of them: one per lane compiles to a loop over lanes, some 40 clocks per mbarrier.
template <int THREADS>
__device__ __forceinline__ void barriers_known(bool made) {
  if (made) {
    asm volatile("bar.arrive 0, %0;" ::"n"(THREADS) : "memory");
  } else {
    asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory");
  }
}

// Moves registers between the warpgroups of a CTA. count: registers per thread of the calling warpgroup afterwards.
template <int count>
__device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- products ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// wgmma's descriptor of k-major slabs. Adding 2 advances k by 16 values.
__device__ __forceinline__ uint64_t slab_descriptor(const void* shared) {
  const uint64_t address = shared_address(shared);
  return ((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// d[64 x N] += a[64 x 16] b[16 x N], fp32 sums. Warp w of the warpgroup holds rows 16 w .. 16 w + 15. a is in
// registers, laid out as in hopper.cuh's mma; d[4 j .. 4 j + 3] is laid out as mma's d, for columns 8 j .. 8 j + 7.
template <int N>
__device__ void wgmma(float (&d)[N / 2], const uint32_t* a, uint64_t b);

#define PERILUNE_D1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PERILUNE_D2 PERILUNE_D1 "," "%8,%9,%10,%11,%12,%13,%14,%15"
#define PERILUNE_D3 PERILUNE_D2 "," "%16,%17,%18,%19,%20,%21,%22,%23"
#define PERILUNE_D4 PERILUNE_D3 "," "%24,%25,%26,%27,%28,%29,%30,%31"
#define PERILUNE_D5 PERILUNE_D4 "," "%32,%33,%34,%35,%36,%37,%38,%39"
#define PERILUNE_D6 PERILUNE_D5 "," "%40,%41,%42,%43,%44,%45,%46,%47"
#define PERILUNE_D7 PERILUNE_D6 "," "%48,%49,%50,%51,%52,%53,%54,%55"
#define PERILUNE_D8 PERILUNE_D7 "," "%56,%57,%58,%59,%60,%61,%62,%63"
#define PERILUNE_D9 PERILUNE_D8 "," "%64,%65,%66,%67,%68,%69,%70,%71"
#define PERILUNE_D10 PERILUNE_D9 "," "%72,%73,%74,%75,%76,%77,%78,%79"
#define PERILUNE_D11 PERILUNE_D10 "," "%80,%81,%82,%83,%84,%85,%86,%87"
#define PERILUNE_D12 PERILUNE_D11 "," "%88,%89,%90,%91,%92,%93,%94,%95"
#define PERILUNE_D13 PERILUNE_D12 "," "%96,%97,%98,%99,%100,%101,%102,%103"
#define PERILUNE_D14 PERILUNE_D13 "," "%104,%105,%106,%107,%108,%109,%110,%111"
#define PERILUNE_D15 PERILUNE_D14 "," "%112,%113,%114,%115,%116,%117,%118,%119"
#define PERILUNE_D16 PERILUNE_D15 "," "%120,%121,%122,%123,%124,%125,%126,%127"
#define PERILUNE_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
                      "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PERILUNE_C1 PERILUNE_8(0)
#define PERILUNE_C2 PERILUNE_C1, PERILUNE_8(8)
#define PERILUNE_C3 PERILUNE_C2, PERILUNE_8(16)
#define PERILUNE_C4 PERILUNE_C3, PERILUNE_8(24)
#define PERILUNE_C5 PERILUNE_C4, PERILUNE_8(32)
#define PERILUNE_C6 PERILUNE_C5, PERILUNE_8(40)
#define PERILUNE_C7 PERILUNE_C6, PERILUNE_8(48)
#define PERILUNE_C8 PERILUNE_C7, PERILUNE_8(56)
#define PERILUNE_C9 PERILUNE_C8, PERILUNE_8(64)
#define PERILUNE_C10 PERILUNE_C9, PERILUNE_8(72)
#define PERILUNE_C11 PERILUNE_C10, PERILUNE_8(80)
#define PERILUNE_C12 PERILUNE_C11, PERILUNE_8(88)
#define PERILUNE_C13 PERILUNE_C12, PERILUNE_8(96)
#define PERILUNE_C14 PERILUNE_C13, PERILUNE_8(104)
#define PERILUNE_C15 PERILUNE_C14, PERILUNE_8(112)
#define PERILUNE_C16 PERILUNE_C15, PERILUNE_8(120)
#define PERILUNE_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PERILUNE_WGMMA(N, LIST, OUTPUTS, a0, a1, a2, a3, b0)                                                        \
  template <>                                                                                                       \
  __device__ __forceinline__ void wgmma<N>(float (&d)[N / 2], const uint32_t* a, uint64_t b) {                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST                                  \
                 "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b0 ", 1, 1, 1, 0;"                                  \
                 : PERILUNE_LIST OUTPUTS                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }
#define PERILUNE_LIST(...) __VA_ARGS__
// EVEN: UNITS of 16 columns. ODD: 8 columns more, in registers i0 to i3.
#define PERILUNE_EVEN(N, UNITS, a0, a1, a2, a3, b0) \
  PERILUNE_WGMMA(N, PERILUNE_D##UNITS, (PERILUNE_C##UNITS), a0, a1, a2, a3, b0)
#define PERILUNE_ODD(N, UNITS, i0, i1, i2, i3, a0, a1, a2, a3, b0)                                      \
  PERILUNE_WGMMA(N, PERILUNE_D##UNITS ",%" #i0 ",%" #i1 ",%" #i2 ",%" #i3,                              \
                 (PERILUNE_C##UNITS, PERILUNE_4(i0)), a0, a1, a2, a3, b0)
PERILUNE_WGMMA(8, "%0,%1,%2,%3", (PERILUNE_4(0)), 4, 5, 6, 7, 8)
PERILUNE_EVEN(16, 1, 8, 9, 10, 11, 12)
PERILUNE_ODD(24, 1, 8, 9, 10, 11, 12, 13, 14, 15, 16)
PERILUNE_EVEN(32, 2, 16, 17, 18, 19, 20)
PERILUNE_ODD(40, 2, 16, 17, 18, 19, 20, 21, 22, 23, 24)
PERILUNE_EVEN(48, 3, 24, 25, 26, 27, 28)
PERILUNE_ODD(56, 3, 24, 25, 26, 27, 28, 29, 30, 31, 32)
PERILUNE_EVEN(64, 4, 32, 33, 34, 35, 36)
PERILUNE_ODD(72, 4, 32, 33, 34, 35, 36, 37, 38, 39, 40)
PERILUNE_EVEN(80, 5, 40, 41, 42, 43, 44)
PERILUNE_ODD(88, 5, 40, 41, 42, 43, 44, 45, 46, 47, 48)
PERILUNE_EVEN(96, 6, 48, 49, 50, 51, 52)
PERILUNE_ODD(104, 6, 48, 49, 50, 51, 52, 53, 54, 55, 56)
PERILUNE_EVEN(112, 7, 56, 57, 58, 59, 60)
PERILUNE_ODD(120, 7, 56, 57, 58, 59, 60, 61, 62, 63, 64)
PERILUNE_EVEN(128, 8, 64, 65, 66, 67, 68)
PERILUNE_ODD(136, 8, 64, 65, 66, 67, 68, 69, 70, 71, 72)
PERILUNE_EVEN(144, 9, 72, 73, 74, 75, 76)
PERILUNE_ODD(152, 9, 72, 73, 74, 75, 76, 77, 78, 79, 80)
PERILUNE_EVEN(160, 10, 80, 81, 82, 83, 84)
PERILUNE_ODD(168, 10, 80, 81, 82, 83, 84, 85, 86, 87, 88)
PERILUNE_EVEN(176, 11, 88, 89, 90, 91, 92)
PERILUNE_ODD(184, 11, 88, 89, 90, 91, 92, 93, 94, 95, 96)
PERILUNE_EVEN(192, 12, 96, 97, 98, 99, 100)
PERILUNE_ODD(200, 12, 96, 97, 98, 99, 100, 101, 102, 103, 104)
PERILUNE_EVEN(208, 13, 104, 105, 106, 107, 108)
PERILUNE_ODD(216, 13, 104, 105, 106, 107, 108, 109, 110, 111, 112)
PERILUNE_EVEN(224, 14, 112, 113, 114, 115, 116)
PERILUNE_ODD(232, 14, 112, 113, 114, 115, 116, 117, 118, 119, 120)
PERILUNE_EVEN(240, 15, 120, 121, 122, 123, 124)
PERILUNE_ODD(248, 15, 120, 121, 122, 123, 124, 125, 126, 127, 128)
PERILUNE_EVEN(256, 16, 128, 129, 130, 131, 132)

// wgmma with N = 128 and b n-major: a slab has 64 values of n of 8 k; `apart`: bytes between the two halves of n.
// Adding 128 to the descriptor advances k by 16.
__device__ __forceinline__ uint64_t transposed_descriptor(const void* shared, int apart) {
  const uint64_t address = shared_address(shared);
  return ((address & 0x3ffff) >> 4) | (static_cast<uint64_t>(apart >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma_transposed(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PERILUNE_D8
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : PERILUNE_C8
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d[64 x 128] = a[64 x 16] b[16 x 128], or += if `add` is 1. a and b are k-major slabs.
template <int add>
__device__ __forceinline__ void wgmma_shared(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PERILUNE_D8 "}, %64, %65, %66, 1, 1, 0, 0;"
               : PERILUNE_C8
               : "l"(a), "l"(b), "n"(add));
}
// As wgmma_shared for e4m3: a[64 x 32] and b[32 x 128] of slabs with 128 values of k. Adding 2 advances k by 32 values.
template <int add>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PERILUNE_D8 "}, %64, %65, %66, 1, 1;"
               : PERILUNE_C8
               : "l"(a), "l"(b), "n"(add));
}
// d[64 x 128] += a[64 x 32] b[32 x 128], a in registers: k 4 t .. 4 t + 3 of rows g and g + 8, then k + 16 of both.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PERILUNE_D8
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1;"
               : PERILUNE_C8
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// As wgmma_e4m3 for int8, a and b slabs; exact int32 sums. Always adds to d.
#define PERILUNE_W8(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), \
                       "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
__device__ __forceinline__ void wgmma_s8(int (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" PERILUNE_D8 "}, %64, %65, 1;"
               : PERILUNE_W8(0), PERILUNE_W8(8), PERILUNE_W8(16), PERILUNE_W8(24), PERILUNE_W8(32), PERILUNE_W8(40),
                 PERILUNE_W8(48), PERILUNE_W8(56)
               : "l"(a), "l"(b));
}

}  // namespace hopper
