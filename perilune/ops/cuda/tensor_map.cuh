// Tensor maps (TMA): copies of boxes of a tensor to shared memory, swizzled as wgmma needs them.
#pragma once
#include <cuda.h>

#include "cuda/wgmma.cuh"

namespace hopper {

// One thread loads the box at element (x, y, z).
__device__ __forceinline__ void tensor_load(void* shared, const CUtensorMap* map, int x, int y, int z,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}
// Multicast: to the same address in every CTA of `mask`; the mbarrier at the same address there counts the bytes.
__device__ __forceinline__ void tensor_load_to(void* shared, const CUtensorMap* map, int x, int y, int z,
                                               uint64_t* barrier, int mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(mask))
      : "memory");
}
// Loads weights, which no kernel reads again in this step: evicted first from L2.
__device__ __forceinline__ void tensor_load_once(void* shared, const CUtensorMap* map, int x, int y, int z,
                                                 uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(ONCE)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

namespace maps {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encode function; null if the driver has no tensor maps.
inline Encode encoder() {
  static const Encode found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &status);
    return e == cudaSuccess && status == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(f) : nullptr;
  }();
  return found;
}

// 128-byte swizzle of bf16 or of bytes; 64-byte swizzle of bytes; bytes without a swizzle.
enum Kind { SWIZZLED, SWIZZLED_BYTES, SWIZZLED_HALF, BYTES };

// Describes a tensor [sizes[2]][sizes[1]][sizes[0]]: x is contiguous, y and z have strides of strides[0] and strides[1]
// bytes. Elements outside read as 0. False if the driver refuses.
inline bool describe(CUtensorMap* map, const void* base, Kind kind, const int64_t (&sizes)[3],
                     const int64_t (&strides)[2], const int (&box)[3]) {
  if (!encoder()) return false;
  cuuint64_t extent[3], apart[2];
  cuuint32_t part[3];
  for (int i = 0; i < 3; i++) extent[i] = static_cast<cuuint64_t>(sizes[i]), part[i] = static_cast<cuuint32_t>(box[i]);
  for (int i = 0; i < 2; i++) apart[i] = static_cast<cuuint64_t>(strides[i]);
  const cuuint32_t steps[3] = {1, 1, 1};
  return encoder()(map, kind == SWIZZLED ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
                   const_cast<void*>(base), extent, apart, part, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   kind == BYTES           ? CU_TENSOR_MAP_SWIZZLE_NONE
                   : kind == SWIZZLED_HALF ? CU_TENSOR_MAP_SWIZZLE_64B
                                           : CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace maps
}  // namespace hopper
