// residual += the sum of all ranks' partial outputs, then y = rmsnorm(residual), through mailboxes that every rank's
// GPU can write to. Contract in exchange_add_rmsnorm.py. The last functions allocate mailboxes.
//
// Lines. 56 bf16 values travel as one line of 128 bytes: 112 bytes of data, 16 bytes of flag (LL128, as in NCCL). Eight
// threads of a warp write a line with one store instruction and read it with one load instruction. NVLink and L2 move
// such a line whole, so a reader that sees the flag has the data, and no fence is needed: a separate flag after a fence
// takes 1.3 us more. The flag is the line's epoch, which counts the uses of the line's place, so nothing is ever
// cleared.
//
// Places. A cluster of CTAs processes one token at a time, each CTA up to 16 lines of it. Every place in the mailbox
// belongs to one CTA. The epoch is the CTA's count of tokens; it is kept in `control`, in device memory, so that a
// replayed CUDA graph continues to count. All ranks must run the same launches with the same T in the same order.
//   1. In epoch e, each rank writes its line into half e % 2 of every peer's mailbox (one shot), then waits for theirs.
//   2. It adds all lines in the order of ranks, so all ranks get the same bits.
//   Reuse: epoch e overwrites the line of epoch e - 2. The writer has read the peer's line of epoch e - 1, which the
//   peer wrote after it had read that of epoch e - 2.
// For many tokens, cuda/two_shots.cuh sends fewer lines. If a line does not arrive within `limit_ns`, its sum is NaN,
// `control` and the host's `failed` are set, and no later launch waits. The host ends all waits by writing to `failed`.
#include "cuda/peers.cuh"
#include "cuda/two_shots.cuh"
#include "cuda/wgmma.cuh"

using namespace hopper;

namespace {

constexpr int PIECES = 7;                     // pieces of 8 values in a line; the eighth thread holds the flag
constexpr int LINES = 16, THREADS = LINES * 8, WARPS = THREADS / 32;  // per CTA
static_assert(THREADS == LINE_THREADS);
// Whether a kernel needs twice the registers per thread, so that only half as many clusters are resident on a GPU.
constexpr bool large(int ranks, bool wide) { return wide || ranks > 2; }

// Stores v in the shared memory of CTA `cta` of the cluster; the mbarrier there counts its bytes.
__device__ __forceinline__ void send_in(const float* p, uint64_t* barrier, int cta, float v) {
  asm volatile(
      "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 bar, %1, %2;"
      " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [bar]; }" ::"r"(shared_address(p)),
      "r"(shared_address(barrier)), "r"(cta), "r"(__float_as_uint(v))
      : "memory");
}

// By value: see two_shots.cuh.
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

// This rank's 8 values as bf16: the rounded sum of `parts` partial sums that are `stride` float4 apart (WIDE), or x's.
template <bool WIDE>
__device__ __forceinline__ uint4 partial(const bf16* x, const float4* part, int parts, int stride) {
  if (!WIDE) return *reinterpret_cast<const uint4*>(x);
  float sum[8] = {};
#pragma unroll 9
  for (int p = 0; p < parts; p++) {
    const float4 a = part[p * stride], b = part[p * stride + 1];
    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
  }
  return rounded(sum);
}

// A warp waits for this epoch's lines from the ranks with a set bit in `from`. True if all lines arrived.
template <int RANKS>
__device__ __forceinline__ bool receive(uint4 (&got)[RANKS], const uint4* place, uint32_t from, uint32_t epoch,
                                        const Peers& peers, bool patient) {
  const bool flag = threadIdx.x % 8 == PIECES;
  uint64_t begin = 0;
  for (int polls = 1;; polls++) {
    uint32_t missing = 0;
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
      if (from >> s & 1) got[s] = look(place + s * HALF);
    }
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
      if ((from >> s & 1) && flag && (got[s].x != epoch || got[s].w != epoch)) missing |= 1 << s;
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

template <int RANKS, bool WIDE>
__global__ __launch_bounds__(THREADS, large(RANKS, WIDE) ? 4 : 8) void exchange_kernel(
    const __grid_constant__ Peers peers, bf16* residual, const void* x, int parts, const bf16* w, bf16* y, int T, int D,
    float inverse, float eps) {
  const int ctas = cluster_size(), cta = cluster_rank(), cluster = blockIdx.x / ctas, clusters = gridDim.x / ctas;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = threadIdx.x % 8;
  const int line = cta * LINES + threadIdx.x / 8, piece = line * PIECES + slot;
  const bool used = line * PIECES * 8 < D, data = slot < PIECES && piece * 8 < D;
  const uint32_t rank = peers.rank;
  __shared__ float sums[2][CLUSTER * WARPS];
  __shared__ uint64_t barriers[2];

  if (threadIdx.x == 0) {
    barrier_init(barriers, 1);
    barrier_init(barriers + 1, 1);
    barriers_visible();
  }
  cluster_arrive();
  const uint4 weight = data ? load16(w + piece * 8) : uint4{};
  let_successor_start();
  cluster_wait();  // all CTAs have initialised their barriers

  uint32_t* const count = peers.control + 1 + cluster * CLUSTER + cta;
  const int step = clusters * D;
  const int64_t first = static_cast<int64_t>(cluster) * D + piece * 8;
  bf16 *at_h = residual + first, *at_y = y + first;
  const bf16* at_x = static_cast<const bf16*>(x) + first;
  const float4* at_part = static_cast<const float4*>(x) + (static_cast<int64_t>(cluster) * parts * D + piece * 8) / 4;
  const int64_t place = static_cast<int64_t>(cluster * CLUSTER + cta) * THREADS + threadIdx.x;
  const uint4* const inbox = peers.mailbox[rank] + place;
  uint4* outbox[RANKS];  // outbox[s]: this word's place at rank (rank + s) % RANKS
#pragma unroll
  for (int s = 1; s < RANKS; s++) {
    outbox[s] = peers.mailbox[(rank + s) % RANKS] + rank * HALF + place;
  }
  wait_for_predecessor();

  // First the loads that everything else depends on.
  uint4 old = data ? *reinterpret_cast<const uint4*>(at_h) : uint4{};
  uint4 own = data ? partial<WIDE>(at_x, at_part, parts, D / 4) : uint4{};
  uint32_t epoch = *count;
  bool patient = *peers.control == 0;  // after a failure, each line is polled only once
  int turn = 0;
  for (int t = cluster; t < T; t += clusters, turn++) {
    epoch++;
    const int64_t half = epoch & 1 ? RANKS * HALF : 0;
    const uint4 flag = make_uint4(epoch, epoch, epoch, epoch);
    if (used) {
      const uint4 out = either(slot == PIECES, flag, own);
#pragma unroll
      for (int s = 1; s < RANKS; s++) send(outbox[s] + half, out);
    }

    float mine[8], before[8];
    widened(mine, own);
    widened(before, old);
    uint4 got[RANKS];
    const uint32_t others = ((1 << RANKS) - 1) & ~(1 << rank);
    const bool whole = RANKS == 1 || receive<RANKS>(got, inbox + half, used ? others : 0, epoch, peers, patient);
    float sum[8] = {};
    if (RANKS == 2) {  // a sum of two terms has the same bits in either order
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
    uint4 fresh = rounded(sum);
    if (!whole) fresh = make_uint4(~0u, ~0u, ~0u, ~0u), patient = false;  // NaN

    float value[8], squares = 0;
    widened(value, fresh);
#pragma unroll
    for (int j = 0; j < 8; j++) squares += value[j] * value[j];
    squares = warp_sum(data ? squares : 0.f);
    uint64_t* barrier = barriers + turn % 2;
    float* received = sums[turn % 2];
    if (ctas == 1) {  // asynchronous stores are illegal instructions outside of clusters
      if (lane == 0) received[warp] = squares;
      __syncthreads();
    } else {
      if (threadIdx.x == 0) barrier_expect(barrier, ctas * WARPS * 4);
      if (lane < ctas) send_in(received + cta * WARPS + warp, barrier, lane, squares);
    }
    float factor[8];
    widened(factor, weight);
    if (data) *reinterpret_cast<uint4*>(at_h) = fresh;
    if (ctas > 1) barrier_wait(barrier, turn / 2 % 2);
    const float scale = rsqrtf(warp_sum(lane < ctas * WARPS ? received[lane] : 0.f) * inverse + eps);
    if (data) {
#pragma unroll
      for (int j = 0; j < 8; j++) value[j] = value[j] * scale * factor[j];
      *reinterpret_cast<uint4*>(at_y) = rounded(value);
    }
    at_h += step, at_y += step, at_x += step, at_part += step / 4 * parts;
    if (t + clusters < T && data) {
      old = *reinterpret_cast<const uint4*>(at_h);
      own = partial<WIDE>(at_x, at_part, parts, D / 4);
    }
  }
  if (threadIdx.x == 0) *count = epoch;  // every warp has read *count: its squares have arrived
}

template <bool WIDE>
auto kernel_for(int64_t ranks) {
  return ranks == 1   ? exchange_kernel<1, WIDE>
         : ranks == 2 ? exchange_kernel<2, WIDE>
         : ranks == 4 ? exchange_kernel<4, WIDE>
                      : exchange_kernel<8, WIDE>;
}

}  // namespace

// peers: in host memory. wide: x holds floats [T, parts, D], else bf16 [T, D].
API int exchange_add_rmsnorm(const Peers* peers, void* residual, const void* x, int64_t parts, int64_t wide,
                             const void* w, void* y, int64_t T, int64_t D, float eps, void* stream) {
  auto kernel = wide ? kernel_for<true>(peers->ranks) : kernel_for<false>(peers->ranks);
  const int lines = (D / 8 + PIECES - 1) / PIECES, cluster = (lines + LINES - 1) / LINES;
  const int64_t clusters = min(T, static_cast<int64_t>(large(peers->ranks, wide) ? REGIONS / 2 : REGIONS));
  return launch(kernel, dim3(clusters * cluster), dim3(THREADS), 0, stream, cluster, *peers,
                static_cast<bf16*>(residual), x, static_cast<int>(parts), static_cast<const bf16*>(w),
                static_cast<bf16*>(y), static_cast<int>(T), static_cast<int>(D), 1.f / D, eps);
}

// As exchange_add_rmsnorm, with the kernel of two_shots.cuh.
API int exchange_two_shots(const Peers* peers, void* residual, const void* x, int64_t parts, int64_t wide, const void* w,
                           void* y, int64_t T, int64_t D, float eps, void* stream) {
  using two_shots::FEW, two_shots::MANY, two_shots::NARROW, two_shots::PARTS, two_shots::start;
  const two_shots::Args a = {static_cast<bf16*>(residual), x, static_cast<int>(parts), nullptr, nullptr, nullptr,
                             static_cast<const bf16*>(w), y, nullptr, 0, static_cast<int>(T), static_cast<int>(D),
                             1.0f / D, eps};
  if (T <= two_shots::FEW_ROWS) {
    return wide ? start<PARTS, false, false, FEW>(*peers, a, stream) : start<NARROW, false, false, FEW>(*peers, a, stream);
  }
  return wide ? start<PARTS, false, false, MANY>(*peers, a, stream) : start<NARROW, false, false, MANY>(*peers, a, stream);
}

// ---- all-to-all and all-gather of one row per rank: contract in exchange_rows.py ----

namespace {

// Per turn (one epoch), a CTA sends LINES lines of each row to the row's rank and waits for the peers' lines at the
// same place. It sends all LINES lines, even past the row's end, because every epoch must use every line of the place.
template <int RANKS>
__global__ __launch_bounds__(THREADS, RANKS > 4 ? 4 : 8) void rows_kernel(const __grid_constant__ Peers peers,
                                                                          const uint4* x, int x_step, uint4* y,
                                                                          int words) {
  constexpr int EACH = LINES * PIECES;  // words per turn
  const int slot = threadIdx.x % 8, first = threadIdx.x / 8 * PIECES + slot, rank = static_cast<int>(peers.rank);
  const int64_t place = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const uint4* const inbox = peers.mailbox[rank] + place;
  wait_for_predecessor();
  let_successor_start();  // after the wait: the next kernel may read cache rows before its own wait
  uint32_t* const count = peers.control + 1 + blockIdx.x;
  uint32_t epoch = *count;
  bool patient = *peers.control == 0;
  for (int turn = blockIdx.x; turn * EACH < words; turn += gridDim.x) {
    const int word = turn * EACH + first;
    const bool data = slot < PIECES && word < words;
    epoch++;
    const int64_t half = epoch & 1 ? RANKS * HALF : 0;
    const uint4 flag = make_uint4(epoch, epoch, epoch, epoch);
#pragma unroll
    for (int s = 1; s < RANKS; s++) {
      const int to = (rank + s) % RANKS;
      const uint4 v = data ? x[static_cast<int64_t>(to) * x_step + word] : flag;
      send(peers.mailbox[to] + rank * HALF + place + half, v);
    }
    const uint4 own = data ? x[static_cast<int64_t>(rank) * x_step + word] : flag;
    uint4 got[RANKS];
    const uint32_t others = ((1 << RANKS) - 1) & ~(1 << rank);
    const bool whole = RANKS == 1 || receive<RANKS>(got, inbox + half, others, epoch, peers, patient);
    if (!whole) patient = false;
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
      uint4 v = either(s == rank, own, got[s]);
      if (!whole) v = make_uint4(~0u, ~0u, ~0u, ~0u);  // NaN
      if (data) y[static_cast<int64_t>(s) * words + word] = v;
    }
  }
  __syncthreads();  // every thread has read *count
  if (threadIdx.x == 0) *count = epoch;
}

}  // namespace

// x: a row of `words` 16-byte words for each rank, `x_step` words apart (0: all ranks get the same row). y [ranks,
// words]: the rows that the ranks send to this one. peers: in host memory.
API int exchange_rows(const Peers* peers, const void* x, int64_t x_step, void* y, int64_t words, void* stream) {
  auto kernel = peers->ranks == 1   ? rows_kernel<1>
                : peers->ranks == 2 ? rows_kernel<2>
                : peers->ranks == 4 ? rows_kernel<4>
                                    : rows_kernel<8>;
  constexpr int64_t EACH = LINES * PIECES;
  const int64_t ctas = min((words + EACH - 1) / EACH, static_cast<int64_t>(REGIONS * CLUSTER / (peers->ranks > 4 ? 2 : 1)));
  return launch(kernel, dim3(ctas), dim3(THREADS), 0, stream, 1, *peers, static_cast<const uint4*>(x),
                static_cast<int>(x_step), static_cast<uint4*>(y), static_cast<int>(words));
}

// ---- memory ----

// Bytes of a mailbox, of control, and of Peers.
API int exchange_sizes(int64_t ranks, int64_t* sizes) {
  sizes[0] = 2 * ranks * HALF * 16;
  sizes[1] = CONTROL * 4;
  sizes[2] = sizeof(Peers);
  return 0;
}

// Allocates a mailbox on the current device, zeroed. handle: 64 bytes, a CUDA IPC handle for `exchange_open` in another
// process; device: the GPU's UUID, 16 bytes.
API int exchange_create(int64_t bytes, void** mailbox, void* handle, void* device) {
  static_assert(sizeof(cudaIpcMemHandle_t) == 64, "the size of a handle");
  int index = 0;
  cudaDeviceProp properties;
  cudaError_t e = cudaGetDevice(&index);
  if (!e) e = cudaGetDeviceProperties(&properties, index);
  if (e) return static_cast<int>(e);
  for (int i = 0; i < 16; i++) static_cast<char*>(device)[i] = properties.uuid.bytes[i];
  e = cudaMalloc(mailbox, bytes);
  if (!e) e = cudaMemset(*mailbox, 0, bytes);
  if (!e) e = cudaDeviceSynchronize();
  if (!e) e = cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), *mailbox);
  return static_cast<int>(e);
}
API int exchange_open(const void* handle, void** mailbox) {
  return static_cast<int>(cudaIpcOpenMemHandle(mailbox, *static_cast<const cudaIpcMemHandle_t*>(handle),
                                               cudaIpcMemLazyEnablePeerAccess));
}
API int exchange_close(void* mailbox) { return static_cast<int>(cudaIpcCloseMemHandle(mailbox)); }
API int exchange_free(void* mailbox) { return static_cast<int>(cudaFree(mailbox)); }
