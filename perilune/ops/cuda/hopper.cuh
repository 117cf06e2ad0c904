// Shared by all CUDA kernels: launching with programmatic dependent launch, asynchronous copies, tensor-core products.
//
// The rule of programmatic dependent launch (PDL) in this package. A kernel may start while its predecessor in the
// stream still runs.
//   1. Before `wait_for_predecessor()`, a kernel reads only memory that no kernel of the stream writes: weights.
//   2. Every CTA, with or without work, calls it before its first read of an activation and before its first write.
//   3. After it, all earlier kernels of the stream, not only the last, have ended and their writes are visible: every
//      kernel waits in this way and ends only when all of its CTAs have ended.
//   4. `let_successor_start()` may be called anywhere; early is best. If a kernel calls it only after its own wait, a
//      comment there says so: the next kernel may then read before its wait what was written before that kernel.
//   5. No pointer to activations is __restrict__: the compiler may move a load through such a pointer above the wait.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#define API extern "C" __attribute__((visibility("default")))

namespace hopper {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Launches with PDL, in clusters of `cluster` CTAs along x. Returns 0 or CUDA's error number. Safe under graph capture.
template <typename... P, typename... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, void* stream, int cluster, A... args) {
  if (shared > 48 * 1024) {
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (e != cudaSuccess) return static_cast<int>(e);
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  cudaError_t e = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
  return static_cast<int>(e);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, bypassing L1; prefetches the rest of their 128-byte line into L2.
__device__ __forceinline__ void copy16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// L2 cache policies. ONCE, evicted first: weights, which a step reads once. KEPT, evicted last: data that this layer
// and the next read again (activations, tables).
constexpr uint64_t ONCE = 0x12f0000000000000, KEPT = 0x14f0000000000000;
__device__ __forceinline__ void copy16_once(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "l"(ONCE)
               : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// 16 bytes to registers, bypassing L1.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// d[16 x 8] += a[16 x 16] b[16 x 8], fp32 sums. Lane l, g = l / 4, t = l % 4:
// a[0] = row g, k 2t..2t+1; a[1] = row g + 8, same k; a[2] = row g, k 2t+8..2t+9; a[3] = row g + 8, same k;
// b[0] = column g, k 2t..2t+1; b[1] = k 2t+8..2t+9; d[0..1] = row g, columns 2t..2t+1; d[2..3] = row g + 8.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float2 widen(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
__device__ __forceinline__ uint32_t narrow(float low, float high) {
  __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int lane = 16; lane; lane >>= 1) v += __shfl_xor_sync(~0u, v, lane);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int lane = 16; lane; lane >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, lane));
  return v;
}

}  // namespace hopper
