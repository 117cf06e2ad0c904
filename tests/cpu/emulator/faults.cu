// Kernels with one fault each, and the same without it, for test_faults.py: `right` chooses.
#include "cuda/tensor_map.cuh"

using namespace hopper;

namespace {

// out[n] = sum over the block of in: warps write their sums to shared memory, all read them.
__global__ void sum_kernel(const float* in, float* out, int right) {
  __shared__ float sums[4];
  const float sum = warp_sum(in[threadIdx.x]);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  if (right) __syncthreads();
  out[threadIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
}

// out = in through shared memory by cp.async; the fault: no wait.
__global__ void copy_kernel(const uint4* in, uint4* out, int right) {
  __shared__ uint4 held[32];
  copy16(&held[threadIdx.x], in + threadIdx.x);
  copies_commit();
  if (right) copies_wait<0>();
  __syncthreads();
  out[threadIdx.x] = held[31 - threadIdx.x];
}

// out = in through a ring of two stages; the fault: the copying warp does not wait until a stage is empty.
__global__ void ring_kernel(const uint4* in, uint4* out, int stages, int right) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 1);
    barriers_visible();
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
    for (int n = 0; n < stages && threadIdx.x == 32; n++) {
      if (right) barrier_wait_to_refill(&empty[n % 2], (n / 2 & 1) ^ 1);
      barrier_expect(&full[n % 2], 512);
      bulk_load(memory + n % 2 * 512, in + n * 32, 512, &full[n % 2]);
    }
    return;
  }
  for (int n = 0; n < stages; n++) {
    barrier_wait(&full[n % 2], n / 2 & 1);
    out[n * 32 + threadIdx.x] = reinterpret_cast<uint4*>(memory + n % 2 * 512)[threadIdx.x];
    __syncwarp();
    if (threadIdx.x == 0) barrier_arrive(&empty[n % 2]);
  }
}

// Waits for a barrier at which one arrival is missing.
__global__ void stuck_kernel(int right) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, right ? 1 : 2);
    barriers_visible();
    barrier_arrive(&barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
}

// CTA 0 waits for a word of the last CTA.
__global__ void polling_kernel(uint32_t* word, int right) {
  if (blockIdx.x == gridDim.x - 1 && right) *reinterpret_cast<volatile uint32_t*>(word) = 1;
  if (blockIdx.x == 0) {
    while (*reinterpret_cast<volatile uint32_t*>(word) == 0) {
    }
  }
}

__global__ void barrier_kernel(int right) {
  __shared__ uint64_t barrier;
  if (right && threadIdx.x == 0) barrier_init(&barrier, 32);
  __syncthreads();
  barrier_arrive(&barrier);
  barrier_wait(&barrier, 0);
}

__global__ void bounds_kernel(const uint4* in, int right) {
  extern __shared__ __align__(128) uint8_t memory[];
  copy16(memory + (right ? 0 : 1024) + threadIdx.x * 16, in);
  copies_commit();
  copies_wait<0>();
}

// Lanes of a warp take part in different instructions.
__global__ void lanes_kernel(float* out, int right) {
  float v = threadIdx.x;
  if (right || threadIdx.x < 16) v = __shfl_xor_sync(~0u, v, 1);
  else __syncwarp();
  out[threadIdx.x] = v;
}

// CTA 1 reads the other's shared memory; the fault: that one may have ended.
__global__ void cluster_kernel(float* out, int right) {
  __shared__ float value;
  value = static_cast<float>(cluster_rank());
  __syncthreads();
  cluster_sync();
  if (cluster_rank() == 1) store_in(address_in(&value, 0), 7);
  if (right) cluster_sync();
  if (cluster_rank() == 0) out[0] = value;
}

__global__ void first_kernel(float* y) {
  let_successor_start();
  wait_for_predecessor();
  __syncthreads();
  y[threadIdx.x] = 1;
}
__global__ void second_kernel(const float* y, float* z, int right) {
  if (right) wait_for_predecessor();
  z[threadIdx.x] = y[threadIdx.x];
  wait_for_predecessor();
}

}  // namespace

API int faults_sum(const void* in, void* out, int64_t right, void* stream) {
  return launch(sum_kernel, dim3(1), dim3(128), 0, stream, 1, static_cast<const float*>(in), static_cast<float*>(out),
                static_cast<int>(right));
}
API int faults_copy(const void* in, void* out, int64_t right, void* stream) {
  return launch(copy_kernel, dim3(1), dim3(32), 0, stream, 1, static_cast<const uint4*>(in), static_cast<uint4*>(out),
                static_cast<int>(right));
}
API int faults_ring(const void* in, void* out, int64_t stages, int64_t right, void* stream) {
  return launch(ring_kernel, dim3(1), dim3(64), 1024, stream, 1, static_cast<const uint4*>(in),
                static_cast<uint4*>(out), static_cast<int>(stages), static_cast<int>(right));
}
API int faults_stuck(int64_t right, void* stream) {
  return launch(stuck_kernel, dim3(2), dim3(64), 0, stream, 1, static_cast<int>(right));
}
API int faults_polling(void* word, int64_t right, void* stream) {
  return launch(polling_kernel, dim3(4), dim3(32), 0, stream, 1, static_cast<uint32_t*>(word), static_cast<int>(right));
}
API int faults_barrier(int64_t right, void* stream) {
  return launch(barrier_kernel, dim3(1), dim3(32), 0, stream, 1, static_cast<int>(right));
}
API int faults_bounds(const void* in, int64_t right, void* stream) {
  return launch(bounds_kernel, dim3(1), dim3(32), 1024, stream, 1, static_cast<const uint4*>(in),
                static_cast<int>(right));
}
API int faults_lanes(void* out, int64_t right, void* stream) {
  return launch(lanes_kernel, dim3(1), dim3(32), 0, stream, 1, static_cast<float*>(out), static_cast<int>(right));
}
API int faults_cluster(void* out, int64_t right, void* stream) {
  return launch(cluster_kernel, dim3(2), dim3(32), 0, stream, 2, static_cast<float*>(out), static_cast<int>(right));
}
API int faults_overlap(void* y, void* z, int64_t right, void* stream) {
  const int e = launch(first_kernel, dim3(1), dim3(64), 0, stream, 1, static_cast<float*>(y));
  return e ? e : launch(second_kernel, dim3(1), dim3(64), 0, stream, 1, static_cast<const float*>(y),
                        static_cast<float*>(z), static_cast<int>(right));
}
