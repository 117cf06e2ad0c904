// Single instructions: test_golden.py computes their results with torch.
#include "cuda/e4m3.cuh"
#include "cuda/int4_fixed.cuh"
#include "cuda/tensor_map.cuh"

using namespace hopper;

namespace {

// y [16, 8] = a [16, 16] b [8, 16]^T of 16-bit numbers, by lanes as PTX numbers them.
template <typename T>
__global__ void mma_kernel(const uint32_t* a, const uint32_t* b, float* y) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const uint32_t of_a[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
  float d[4] = {};
  mma(d, of_a, b[g * 8 + t], b[g * 8 + t + 4], T());
  y[g * 8 + 2 * t] = d[0], y[g * 8 + 2 * t + 1] = d[1];
  y[(g + 8) * 8 + 2 * t] = d[2], y[(g + 8) * 8 + 2 * t + 1] = d[3];
}

// y [16, 8] = 3 + a [16, 32] b [8, 32]^T of signed bytes.
__global__ void mma_bytes_kernel(const uint32_t* a, const uint32_t* b, int* y) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  int d[4] = {3, 3, 3, 3};
  fixed_point::mma_bytes(d, {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]}, b[g * 8 + t],
                 b[g * 8 + t + 4]);
  for (int i = 0; i < 4; i++) y[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// y [2, n]: bytes_of of the n words w << 4 and w.
__global__ void nibbles_kernel(const uint32_t* w, uint32_t* y) {
  const int n = threadIdx.x;
  y[n] = fixed_point::bytes_of(w[n] << 4), y[blockDim.x + n] = fixed_point::bytes_of(w[n]);
}

// Four 8 x 8 matrices of 16 bits: read by ldmatrix, written by stmatrix; y: what the lanes' registers held.
template <bool TRANSPOSED>
__global__ void matrices_kernel(const uint4* x, uint32_t* y, uint4* back) {
  __shared__ uint4 rows[32], written[32];
  const int lane = threadIdx.x;
  rows[lane] = x[lane];
  __syncwarp();
  uint32_t v[4];
  if (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(shared_address(&rows[lane])));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(shared_address(&written[lane])), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(shared_address(&rows[lane])));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(shared_address(&written[lane])), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  }
  __syncwarp();
  for (int i = 0; i < 4; i++) y[i * 32 + lane] = v[i];
  back[lane] = written[lane];
}

// y [64, 128] = a [64, 64] b: b [128, 64], or [64, 128] if TRANSPOSED; a and b by tensor maps. raw: a as it lies in
// shared memory.
template <bool TRANSPOSED>
__global__ void wgmma_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float* y,
                             uint4* raw, int wait) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t full;
  uint8_t* of_b = memory + 64 * 128;
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    barriers_visible();
    barrier_expect(&full, (64 + 128) * 128);
    tensor_load(memory, &a, 0, 0, 0, &full);
    tensor_load(of_b, &b, 0, 0, 0, &full);
    if (TRANSPOSED) tensor_load(of_b + 64 * 128, &b, 64, 0, 0, &full);
  }
  __syncthreads();
  barrier_wait(&full, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float d[64] = {};
  wgmma_fence();
  for (int k = 0; k < 4; k++) {
    if (TRANSPOSED) {
      uint32_t of_a[4];
      for (int i = 0; i < 4; i++) {
        const int row = 16 * warp + g + i % 2 * 8, at = row * 128 + k * 32 + i / 2 * 16 + t * 4;
        of_a[i] = *reinterpret_cast<uint32_t*>(memory + (at ^ (row % 8 * 16)));
      }
      wgmma_transposed(d, of_a, transposed_descriptor(of_b, 64 * 128) + 128 * k);
    } else {
      wgmma_shared<1>(d, slab_descriptor(memory) + 2 * k, slab_descriptor(of_b) + 2 * k);
    }
  }
  wgmma_commit();
  if (wait) wgmma_wait<0>();
  for (int i = 0; i < 64; i++) {
    y[(16 * warp + g + i / 2 % 2 * 8) * 128 + i / 4 * 8 + 2 * t + i % 2] = d[i];
  }
  for (int i = threadIdx.x; i < 64 * 8; i += 128) raw[i] = reinterpret_cast<uint4*>(memory)[i];
  wgmma_wait<0>();
}

// The same of 8-bit numbers, b [128, 128]: whole ones with a [64, 128] as a tensor map brings it, sums on top of `first`;
// or e4m3 with a of registers.
template <bool WHOLE>
__global__ void wgmma_bytes_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                                   uint32_t* y, int first) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t full;
  uint8_t* of_b = memory + 64 * 128;
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    barriers_visible();
    barrier_expect(&full, (64 + 128) * 128);
    tensor_load(memory, &a, 0, 0, 0, &full);
    tensor_load(of_b, &b, 0, 0, 0, &full);
  }
  __syncthreads();
  barrier_wait(&full, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float d[64] = {};
  int n[64];
  for (int i = 0; i < 64; i++) n[i] = first;
  wgmma_fence();
  for (int k = 0; k < 4; k++) {
    if (WHOLE) {
      wgmma_s8(n, slab_descriptor(memory) + 2 * k, slab_descriptor(of_b) + 2 * k);
    } else {
      uint32_t of_a[4];
      for (int i = 0; i < 4; i++) {
        const int row = 16 * warp + g + i % 2 * 8, at = row * 128 + k * 32 + i / 2 * 16 + t * 4;
        of_a[i] = *reinterpret_cast<uint32_t*>(memory + (at ^ (row % 8 * 16)));
      }
      wgmma_e4m3(d, of_a, slab_descriptor(of_b) + 2 * k);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 64; i++) {
    y[(16 * warp + g + i / 2 % 2 * 8) * 128 + i / 4 * 8 + 2 * t + i % 2] = WHOLE ? n[i] : __float_as_uint(d[i]);
  }
}

// A box of 16 rows as a tensor map brings it to CTA 0 or to both of a cluster: raw [2 CTAs][box].
__global__ void tensor_kernel(const __grid_constant__ CUtensorMap map, uint8_t* raw, int x, int y, int bytes) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    barriers_visible();
    barrier_expect(&full, bytes);
  }
  cluster_sync();
  if (cluster_rank() == 0 && threadIdx.x == 0) tensor_load_to(memory, &map, x, y, 0, &full, 3);
  barrier_wait(&full, 0);
  for (int i = threadIdx.x; i < bytes; i += 32) raw[cluster_rank() * bytes + i] = memory[i];
  cluster_sync();
}

__global__ void numbers_kernel(const float* x, uint16_t* bf, uint16_t* half, uint16_t* e4m3, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  *reinterpret_cast<uint32_t*>(bf + i) = narrow(x[i], x[i + 1]);
  const __half2 h = __floats2half2_rn(x[i], x[i + 1]);
  *reinterpret_cast<__half2*>(half + i) = h;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(e4m3[i / 2]) : "f"(x[i + 1]), "f"(x[i]));
}

// Two fp16 of each pair of bytes; and bf16 products and sums of pairs, rounded once.
__global__ void pairs_kernel(const uint32_t* bytes, uint2* halves, const uint32_t* a, uint32_t* product, uint32_t* sum) {
  const int i = threadIdx.x;
  halves[i] = e4m3::halves(bytes[i]);
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product[i]) : "r"(a[i]), "r"(a[i + 64]));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum[i]) : "r"(a[i]), "r"(a[i + 64]), "r"(a[i + 128]));
}

}  // namespace

API int golden_mma_bytes(const void* a, const void* b, void* y, void* stream) {
  return launch(mma_bytes_kernel, dim3(1), dim3(32), 0, stream, 1, static_cast<const uint32_t*>(a),
                static_cast<const uint32_t*>(b), static_cast<int*>(y));
}
API int golden_nibbles(const void* w, void* y, int64_t n, void* stream) {
  return launch(nibbles_kernel, dim3(1), dim3(static_cast<unsigned>(n)), 0, stream, 1, static_cast<const uint32_t*>(w),
                static_cast<uint32_t*>(y));
}
API int golden_mma(const void* a, const void* b, void* y, int64_t half, void* stream) {
  return launch(half ? mma_kernel<__half> : mma_kernel<bf16>, dim3(1), dim3(32), 0, stream, 1,
                static_cast<const uint32_t*>(a), static_cast<const uint32_t*>(b), static_cast<float*>(y));
}
API int golden_matrices(const void* x, void* y, void* back, int64_t transposed, void* stream) {
  return launch(transposed ? matrices_kernel<true> : matrices_kernel<false>, dim3(1), dim3(32), 0, stream, 1,
                static_cast<const uint4*>(x), static_cast<uint32_t*>(y), static_cast<uint4*>(back));
}
API int golden_wgmma(const void* a, const void* b, void* y, void* raw, int64_t transposed, int64_t wait, void* stream) {
  CUtensorMap of_a, of_b;
  if (!maps::describe(&of_a, a, maps::SWIZZLED, {64, 64, 1}, {128, 8192}, {64, 64, 1})) return -1;
  if (transposed ? !maps::describe(&of_b, b, maps::SWIZZLED, {128, 64, 1}, {256, 16384}, {64, 64, 1})
                 : !maps::describe(&of_b, b, maps::SWIZZLED, {64, 128, 1}, {128, 16384}, {64, 128, 1})) {
    return -1;
  }
  return launch(transposed ? wgmma_kernel<true> : wgmma_kernel<false>, dim3(1), dim3(128), (64 + 128) * 128, stream, 1,
                of_a, of_b, static_cast<float*>(y), static_cast<uint4*>(raw), static_cast<int>(wait));
}
// a [64, 128] and b [128, 128] of bytes; whole: s8, sums begin at `first`; else e4m3.
API int golden_wgmma_bytes(const void* a, const void* b, void* y, int64_t whole, int64_t first, void* stream) {
  CUtensorMap of_a, of_b;
  if (!maps::describe(&of_a, a, maps::SWIZZLED_BYTES, {128, 64, 1}, {128, 8192}, {128, 64, 1}) ||
      !maps::describe(&of_b, b, maps::SWIZZLED_BYTES, {128, 128, 1}, {128, 16384}, {128, 128, 1})) {
    return -1;
  }
  return launch(whole ? wgmma_bytes_kernel<true> : wgmma_bytes_kernel<false>, dim3(1), dim3(128), (64 + 128) * 128,
                stream, 1, of_a, of_b, static_cast<uint32_t*>(y), static_cast<int>(first));
}
// x [24, 96] of bytes; a box of 16 rows of `width` bytes from (at_x, at_y); half: with the 64-byte swizzle.
API int golden_tensor(const void* x, void* raw, int64_t at_x, int64_t at_y, int64_t width, int64_t half, void* stream) {
  CUtensorMap map;
  if (!maps::describe(&map, x, half ? maps::SWIZZLED_HALF : maps::BYTES, {96, 24, 1}, {96, 96 * 24},
                      {static_cast<int>(width), 16, 1})) {
    return -1;
  }
  return launch(tensor_kernel, dim3(2), dim3(32), 16 * width, stream, 2, map, static_cast<uint8_t*>(raw),
                static_cast<int>(at_x), static_cast<int>(at_y), static_cast<int>(16 * width));
}
API int golden_numbers(const void* x, void* bf, void* half, void* e4m3, int64_t n, void* stream) {
  return launch(numbers_kernel, dim3((n / 2 + 127) / 128), dim3(128), 0, stream, 1, static_cast<const float*>(x),
                static_cast<uint16_t*>(bf), static_cast<uint16_t*>(half), static_cast<uint16_t*>(e4m3),
                static_cast<int>(n));
}
API int golden_pairs(const void* bytes, void* halves, const void* a, void* product, void* sum, void* stream) {
  return launch(pairs_kernel, dim3(1), dim3(64), 0, stream, 1, static_cast<const uint32_t*>(bytes),
                static_cast<uint2*>(halves), static_cast<const uint32_t*>(a), static_cast<uint32_t*>(product),
                static_cast<uint32_t*>(sum));
}
