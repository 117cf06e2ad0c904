// Rows that cross between ranks as lines, and are added up by clusters of CTAs: exchange_add_rmsnorm.cu, which describes
// where lines lie in the mailboxes, and add_norm_router_mma.cu, which uses the same places in the same way.
//
// 56 bf16 values travel as one line of 128 bytes: 112 bytes of data, 16 bytes of flag (LL128, as in NCCL). Eight
// threads of a warp write a line with one store instruction and read it with one load instruction. NVLink and the
// second-level cache move such a line whole, so a reader that sees the flag has the data, and no fence is needed: a
// flag of its own behind a fence takes 1.3 us more. The flag is the line's epoch, which counts the uses of the line's
// place, so nothing is ever cleared.
#pragma once
#include "cuda/peers.cuh"
#include "cuda/wgmma.cuh"

namespace lines {

using namespace hopper;

constexpr int PIECES = 7;                     // of 8 values, in a line; the eighth thread's is the flag
constexpr int LINES = 16, THREADS = LINES * 8, WARPS = THREADS / 32;  // of a CTA
static_assert(THREADS == LINE_THREADS);

// v to the shared memory of another CTA of the cluster, counted by that CTA's barrier.
__device__ __forceinline__ void send_in(const float* p, uint64_t* barrier, int cta, float v) {
  asm volatile(
      "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 bar, %1, %2;"
      " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [bar]; }" ::"r"(shared_address(p)),
      "r"(shared_address(barrier)), "r"(cta), "r"(__float_as_uint(v))
      : "memory");
}

__device__ __forceinline__ void send_in(const void* p, uint64_t* barrier, int cta, const uint4& v) {
  asm volatile(
      "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 bar, %1, %2;"
      " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [bar]; }" ::"r"(
          shared_address(p)),
      "r"(shared_address(barrier)), "r"(cta), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// By value: a choice between two variables would put both into local memory.
__device__ __forceinline__ uint4 either(bool first, uint4 a, uint4 b) {
  return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}
__device__ __forceinline__ void widened(float (&to)[8], const uint4& v) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    to[2 * j] = __uint_as_float(pairs[j] << 16), to[2 * j + 1] = __uint_as_float(pairs[j] & 0xffff0000u);
  }
}
__device__ __forceinline__ uint4 rounded(const float (&v)[8]) {
  return make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
}

// Waits, as a warp, until the lines of these epochs have come from the senders of `from`, for N places. True if all came.
template <int RANKS, int N>
__device__ __forceinline__ bool receive(uint4 (&got)[N][RANKS], const uint4* const (&place)[N], const uint32_t (&from)[N],
                                        const uint32_t (&epoch)[N], const Peers& peers, bool patient) {
  const bool flag = threadIdx.x % 8 == PIECES;
  uint64_t begin = 0;
  for (int polls = 1;; polls++) {
    uint32_t missing = 0;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int s = 0; s < RANKS; s++) {
        if (from[n] >> s & 1) got[n][s] = look(place[n] + s * HALF);
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int s = 0; s < RANKS; s++) {
        if ((from[n] >> s & 1) && flag && (got[n][s].x != epoch[n] || got[n][s].w != epoch[n])) missing |= 1 << s;
      }
    }
    if (!__any_sync(~0u, missing)) return true;
    if (polls % POLLS == 0 || !patient) {
      const uint64_t now = now_ns();
      if (!begin) begin = now;
      bool over = !patient || now - begin > static_cast<uint64_t>(peers.limit_ns);
      if (polls % HOST_POLLS == 0) over |= *reinterpret_cast<volatile uint32_t*>(peers.failed) != 0;
      if (__any_sync(~0u, over)) {
        if (missing && patient) report(peers, __ffs(missing) - 1);
        return false;
      }
    }
  }
}

// The sum of all ranks' 8 values, of which this one's are `mine`, in the order of ranks; then of those `before`; rounded.
template <int RANKS>
__device__ __forceinline__ uint4 added(const uint4 (&got)[RANKS], const float (&mine)[8], const float (&before)[8],
                                       uint32_t rank) {
  float sum[8] = {};
  if (RANKS == 2) {  // two are the same in either order
    widened(sum, either(rank == 0, got[RANKS - 1], got[0]));
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += mine[j];
  } else {
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
      float term[8];
      widened(term, got[s]);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += s == rank ? mine[j] : term[j];
    }
  }
#pragma unroll
  for (int j = 0; j < 8; j++) sum[j] += before[j];
  return rounded(sum);
}

}  // namespace lines
