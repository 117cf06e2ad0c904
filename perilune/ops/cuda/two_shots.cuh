// Many rows: residual += the sum of all ranks' partial outputs, then y = rmsnorm(residual). Contracts in
// exchange_add_rmsnorm.py, exchange_pairs_add_rmsnorm.py, scatter_pairs_add_rmsnorm.py and
// scatter_pairs_add_rmsnorm_quantize.py. Lines, flags, epochs, timeouts: exchange_add_rmsnorm.cu.
//
// Each of N ranks owns a block of ceil(T / N) rows. Only the owner reads a row's old residual.
//   1. Each other rank sends its partial row to the owner, which adds all parts (reduce-scatter; SCATTER ends here).
//   2. The owner sends the new row of the residual to each other rank (with step 1: two-shot all-reduce).
// In either step a rank sends N - 1 lines for every N lines of the T rows.
//
// A CTA processes whole rows, one of each owner in turn. Two CTAs per SM hide each other's waits: 264 rows are in
// flight, enough to saturate NVLink. Each CTA has a place in every mailbox (ROWS_AT); epoch e uses half e % 2. All
// ranks must run the same launches with the same T in the same order. Why rank A may reuse its place at rank B:
//   all-reduce  In epoch e, A overwrites a line of epoch e - 2 or before. A has received B's line of epoch e - 1, or a
//               sum that contains it. B sent that line after B had read the overwritten one.
//   SCATTER     A sends to owner B in every N-th epoch of a CTA. In between, A receives a line from B, which B sent
//               after B had read A's previous line. (Rows past T, for which no line is sent, come last.) All ranks must
//               end this launch before any starts the next one of this kernel: exchange_rows ensures it.
#pragma once
#include "cuda/peers.cuh"
#include "cuda/token_scale.cuh"

namespace two_shots {

using namespace hopper;

constexpr int PIECES = 7;  // pieces of 8 values in a line; the eighth thread holds the flag
// EACH: words per thread; a CTA has ROW_WORDS / EACH threads. MANY: two CTAs per SM. FEW, up to FEW_ROWS rows: shorter
// steps, because with few rows no other row hides a step's latency.
constexpr int MANY = 4, FEW = 1, FEW_ROWS = 128;
static_assert(ROWS % MAX_RANKS == 0);
constexpr int BATCH = 2;  // rows of pairs loaded together; with more, the registers allow only one CTA per SM

// Format of this rank's partial output x. NARROW: rows of bf16. PARTS: `parts` rows of floats per token, to be added.
// PAIRS: rows of (token, expert) pairs (operands.py). CLUSTER_PAIRS: with columns in moe_int4_cluster.cuh's order.
enum Input { NARROW, PARTS, PAIRS, CLUSTER_PAIRS };

struct Args {
  bf16* residual;  // [T, D]
  const void* x;   // NARROW [T, D] bf16; PARTS [T, parts, D] float; PAIRS [M, D] bf16
  int parts;       // PAIRS: experts per token
  const int* position;   // [T, parts]: row in x of each pair; below 0: no such row
  const float* weights;  // [T, parts]
  const bf16* shared;    // [T, D], added last, or null
  const bf16* w;
  void* y;        // [T, D] bf16, or e4m3 if QUANTIZED
  float* scales;  // QUANTIZED: [ceil(D / 128), scale_rows]
  int scale_rows, T, D;
  float inverse, eps;  // inverse: 1 / D
};

__device__ __forceinline__ void add(float (&sum)[8], const uint4& v, float factor, bool mixed) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const float2 f = widen(words[n]);
    sum[mixed ? n : 2 * n] += factor * f.x;
    sum[mixed ? n + 4 : 2 * n + 1] += factor * f.y;
  }
}
__device__ __forceinline__ uint4 rounded(const float (&v)[8]) {
  return make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
}
// By value: a choice between two variables would put both into local memory.
__device__ __forceinline__ uint4 either(bool first, uint4 a, uint4 b) {
  return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// own[i] = this rank's partial sum of piece[i] of a row, rounded to bf16; 0 if bit i of `data` is not set.
template <Input INPUT, int EACH>
__device__ __forceinline__ void partial(uint4 (&own)[EACH], const Args& a, int row, const int (&piece)[EACH],
                                        uint32_t data) {
  if constexpr (INPUT == NARROW) {
    const bf16* x = static_cast<const bf16*>(a.x) + static_cast<int64_t>(row) * a.D;
#pragma unroll
    for (int i = 0; i < EACH; i++) own[i] = data >> i & 1 ? load16(x + 8 * piece[i]) : uint4{};
    return;
  }
  float sum[EACH][8] = {};
  if constexpr (INPUT == PARTS) {
    for (int p = 0; p < a.parts; p++) {
      const float4* from = static_cast<const float4*>(a.x) + (static_cast<int64_t>(row) * a.parts + p) * (a.D / 4);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (!(data >> i & 1)) continue;
        const float4 low = from[2 * piece[i]], high = from[2 * piece[i] + 1];
        sum[i][0] += low.x, sum[i][1] += low.y, sum[i][2] += low.z, sum[i][3] += low.w;
        sum[i][4] += high.x, sum[i][5] += high.y, sum[i][6] += high.z, sum[i][7] += high.w;
      }
    }
  } else {  // in the order of combine_kernel (moe/sm90/token_permute.cuh)
    const int lane = threadIdx.x % 32;
    const int64_t pair = static_cast<int64_t>(row) * a.parts + lane;
    const int my_row = lane < a.parts ? a.position[pair] : -1;
    const float my_weight = lane < a.parts ? a.weights[pair] : 0.0f;
#pragma unroll 1
    for (int first = 0; first < a.parts; first += BATCH) {
      uint4 v[BATCH][EACH];
      float weight_of[BATCH];
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
        const int from = first + n < a.parts ? __shfl_sync(~0u, my_row, first + n) : -1;
        weight_of[n] = __shfl_sync(~0u, my_weight, first + n);
        const bf16* part = static_cast<const bf16*>(a.x) + static_cast<int64_t>(from) * a.D;
#pragma unroll
        for (int i = 0; i < EACH; i++) v[n][i] = from >= 0 && (data >> i & 1) ? load16(part + 8 * piece[i]) : uint4{};
      }
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
#pragma unroll
        for (int i = 0; i < EACH; i++) add(sum[i], v[n][i], weight_of[n], INPUT == CLUSTER_PAIRS);
      }
    }
    if (a.shared) {
      const bf16* shared = a.shared + static_cast<int64_t>(row) * a.D;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (data >> i & 1) add(sum[i], load16(shared + 8 * piece[i]), 1.0f, false);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) own[i] = rounded(sum[i]);
}

// A warp waits for this epoch's lines of COUNT ranks from rank `first` on, except `skipped`. Bit i of `used`: the
// thread's i-th line exists. True if all lines arrived.
template <int COUNT, int LINES, int THREADS>
__device__ __forceinline__ bool receive(uint4 (&got)[COUNT][LINES], const uint4* place, int first, int skipped,
                                        uint32_t used, uint32_t epoch, const Peers& peers, bool patient) {
  const bool flag = threadIdx.x % 8 == PIECES;
  uint64_t begin = 0;
  for (int polls = 1;; polls++) {
    int missing = -1;  // index of a rank that has not sent its line
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
#pragma unroll
      for (int i = 0; i < LINES; i++) {
        if (s != skipped && (used >> i & 1)) got[s][i] = look(place + s * HALF + i * THREADS);
      }
    }
#pragma unroll
    for (int s = COUNT - 1; s >= 0; s--) {
#pragma unroll
      for (int i = 0; i < LINES; i++) {
        if (s != skipped && (used >> i & 1) && flag && (got[s][i].x != epoch || got[s][i].w != epoch)) missing = s;
      }
    }
    if (!__any_sync(~0u, missing >= 0)) return true;
    const bool over = too_long(peers, polls, begin, patient);
    if (__any_sync(~0u, over)) {
      if (missing >= 0 && patient) report(peers, first + missing);
      return false;
    }
  }
}

template <int RANKS, Input INPUT, bool QUANTIZED, bool SCATTER, int EACH>
__global__ __launch_bounds__(ROW_WORDS / EACH, EACH == MANY ? 2 : 1) void two_shots_kernel(
    const __grid_constant__ Peers peers, const __grid_constant__ Args a) {
  constexpr int THREADS = ROW_WORDS / EACH, WARPS = THREADS / 32;
  // As owner, a thread polls this many of its lines together, of all ranks. More lines would spill registers.
  constexpr int TOGETHER = RANKS > 4 ? 1 : RANKS > 2 && EACH > 2 ? 2 : EACH;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = threadIdx.x % 8;
  const uint32_t rank = peers.rank;
  __shared__ float sums[2][WARPS];
  extern __shared__ uint4 norms[];  // QUANTIZED: [D / 8], a row of y in bf16
  int piece[EACH];
  uint32_t used = 0, data = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int line = threadIdx.x / 8 + i * (THREADS / 8);
    piece[i] = line * PIECES + slot;
    if (line * PIECES * 8 < a.D) used |= 1 << i;
    if (slot < PIECES && piece[i] * 8 < a.D) data |= 1 << i;
  }
  const int64_t place = ROWS_AT + static_cast<int64_t>(blockIdx.x) * ROW_WORDS + threadIdx.x;
  uint32_t* const count = peers.control + ROW_COUNTS + blockIdx.x;
  if (EACH == FEW && data) asm volatile("prefetch.global.L1 [%0];" ::"l"(a.w + 8 * piece[0]));
  let_successor_start();
  wait_for_predecessor();

  uint32_t epoch = *count;
  bool patient = *peers.control == 0;  // after a failure, each line is polled only once
  const int block = (a.T + RANKS - 1) / RANKS, all = RANKS * block;  // rows per owner
  // Each RANKS consecutive values of n have RANKS different owners.
  auto row_of = [&](int n, int turn) { return (n + turn) % RANKS * block + n / RANKS; };
  uint4 next[EACH];  // this rank's part of the next row, computed while this row's lines travel
  if (const int row = row_of(blockIdx.x, 0); row < a.T) partial<INPUT, EACH>(next, a, row, piece, data);
  int sum_turn = 0;
  for (int n = blockIdx.x, turn = 0; n < all; n += gridDim.x, turn++) {
    const uint32_t owner = (n + turn) % RANKS;
    const int row = row_of(n, turn), after = row_of(n + gridDim.x, turn + 1);
    const bool there = row < a.T;
    if (there) epoch++;
    const int64_t half = epoch & 1 ? RANKS * HALF : 0;
    const uint4 flag = make_uint4(epoch, epoch, epoch, epoch);
    const uint4* const inbox = peers.mailbox[rank] + half + place;
    bf16* const h = a.residual + static_cast<int64_t>(row) * a.D;
    uint4 own[EACH], fresh[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) own[i] = next[i];
    if (there && owner != rank) {
      uint4* const outbox = peers.mailbox[owner] + rank * HALF + half + place;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (used >> i & 1) send(outbox + i * THREADS, either(slot == PIECES, flag, own[i]));
      }
    }
    if (n + gridDim.x < all && after < a.T) partial<INPUT, EACH>(next, a, after, piece, data);
    if (!there || (SCATTER && owner != rank)) continue;
    bool whole;
    if (owner == rank) {
      uint4 old[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) old[i] = data >> i & 1 ? *reinterpret_cast<const uint4*>(h + 8 * piece[i]) : uint4{};
      whole = true;
#pragma unroll
      for (int first = 0; first < EACH; first += TOGETHER) {
        uint4 got[RANKS][TOGETHER];
        whole &= RANKS == 1 || receive<RANKS, TOGETHER, THREADS>(got, inbox + first * THREADS, 0, rank, used >> first,
                                                                 epoch, peers, patient && whole);
#pragma unroll
        for (int line = 0; line < TOGETHER; line++) {
          const int i = first + line;
          float sum[8] = {};
#pragma unroll
          for (int s = 0; s < RANKS; s++) add(sum, either(s == rank, own[i], got[s][line]), 1.0f, false);
          add(sum, old[i], 1.0f, false);
          fresh[i] = rounded(sum);
        }
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (!whole) fresh[i] = make_uint4(~0u, ~0u, ~0u, ~0u);  // NaN
        if (SCATTER || !(used >> i & 1)) continue;
        const uint4 out = either(slot == PIECES, flag, fresh[i]);
#pragma unroll
        for (int s = 1; s < RANKS; s++) {
          send(peers.mailbox[(rank + s) % RANKS] + rank * HALF + half + place + i * THREADS, out);
        }
      }
    } else {
      uint4 got[1][EACH];
      whole = receive<1, EACH, THREADS>(got, inbox + owner * HALF, owner, -1, used, epoch, peers, patient);
#pragma unroll
      for (int i = 0; i < EACH; i++) fresh[i] = whole ? got[0][i] : make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    patient &= whole;

    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!(data >> i & 1)) continue;
      *reinterpret_cast<uint4*>(h + 8 * piece[i]) = fresh[i];
      for (uint32_t word : {fresh[i].x, fresh[i].y, fresh[i].z, fresh[i].w}) {
        const float2 v = widen(word);
        squares += v.x * v.x + v.y * v.y;
      }
    }
    squares = warp_sum(squares);
    if (lane == 0) sums[sum_turn % 2][warp] = squares;
    __syncthreads();
    squares = warp_sum(lane < WARPS ? sums[sum_turn % 2][lane] : 0.0f);
    sum_turn++;
    const float scale = rsqrtf(squares * a.inverse + a.eps);
    const int to_row = SCATTER ? row - static_cast<int>(rank) * block : row;
    auto scaled = [scale](uint32_t pair, uint32_t weight) {
      const float2 v = widen(pair), w = widen(weight);
      return narrow(v.x * scale * w.x, v.y * scale * w.y);
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!(data >> i & 1)) continue;
      const uint4 w = *reinterpret_cast<const uint4*>(a.w + 8 * piece[i]);
      const uint4 y = make_uint4(scaled(fresh[i].x, w.x), scaled(fresh[i].y, w.y), scaled(fresh[i].z, w.z),
                                 scaled(fresh[i].w, w.w));
      if (QUANTIZED) norms[piece[i]] = y;
      else *reinterpret_cast<uint4*>(static_cast<bf16*>(a.y) + static_cast<int64_t>(to_row) * a.D + 8 * piece[i]) = y;
    }
    if constexpr (QUANTIZED) {
      __syncthreads();  // the next row's norms are written after the barrier for its squares
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int p = threadIdx.x + i * THREADS;
        const bool there = p < a.D / 8;
        const uint4 y = there ? norms[p] : uint4{};
        const float top = token_scale::top(token_scale::largest(y));
        if (!there) continue;
        uint8_t* const to = static_cast<uint8_t*>(a.y) + static_cast<int64_t>(to_row) * a.D + 8 * p;
        *reinterpret_cast<uint2*>(to) = token_scale::rounded(y, top);
        if (p % 16 == 0) a.scales[static_cast<int64_t>(p / 16) * a.scale_rows + to_row] = token_scale::scale(top);
      }
    }
  }
  if (QUANTIZED && blockIdx.x == 0) {  // scales of rows past y's last row become 0
    const int last = SCATTER ? max(min(a.T - static_cast<int>(rank) * block, block), 0) : a.T;
    const int past = a.scale_rows - last, groups = (a.D + 127) / 128;
    for (int n = threadIdx.x; n < past * groups; n += THREADS) {
      a.scales[static_cast<int64_t>(n / past) * a.scale_rows + last + n % past] = 0.0f;
    }
  }
  __syncthreads();  // every thread has read *count
  if (threadIdx.x == 0) *count = epoch;
}

template <Input INPUT, bool QUANTIZED, bool SCATTER, int EACH>
int start(const Peers& peers, const Args& a, void* stream) {
  auto kernel = peers.ranks == 1   ? two_shots_kernel<1, INPUT, QUANTIZED, SCATTER, EACH>
                : peers.ranks == 2 ? two_shots_kernel<2, INPUT, QUANTIZED, SCATTER, EACH>
                : peers.ranks == 4 ? two_shots_kernel<4, INPUT, QUANTIZED, SCATTER, EACH>
                                   : two_shots_kernel<8, INPUT, QUANTIZED, SCATTER, EACH>;
  const int ranks = static_cast<int>(peers.ranks), all = (a.T + ranks - 1) / ranks * ranks;
  return launch(kernel, dim3(min(all, ROWS)), dim3(ROW_WORDS / EACH), QUANTIZED ? 2 * a.D : 0, stream, 1, peers, a);
}

}  // namespace two_shots
