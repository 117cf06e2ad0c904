// y = x w^T for a few rows of x: bound by memory bandwidth, because every weight is read once. Contracts in linear.py,
// rmsnorm_linear.py and linear_fp8.py.
//
// A tile is 8 rows of w: the A operand of the tensor cores in memory order, with tokens as B (weight_stream.cuh). KS of
// a CTA's 16 warps split the k of a tile and add their sums in shared memory. Each warp has a ring of stages that bulk
// copies fill, across tiles, starting before the kernel that computes x has ended: half of the warps issue copies,
// while the others wait for x and prepare it. Plain loads need L1 lines while they are in flight: after a kernel that
// used nearly all of L1 as shared memory (attention, experts), this one took 1.5 times as long with them. Tensor maps,
// with rows of 128 bytes, reach 4.1 TB/s, bulk copies of 256 bytes 4.5.
//
// With 5 to 8 rows of x, or very wide ones, two CTAs of a cluster split k: the first sends its sums to the second,
// which adds its own in the same order. Then rows of x are copied in memory order, the first half of every warp's part
// first.
#include "cuda/weight_stream.cuh"

using namespace stream;

namespace {

struct Args {
  Rows in;
  const uint8_t* w;    // [o, i]
  const float* scale;  // [o], for e4m3 weights
  void* y;             // [T, o] bf16, or float if wide
  int o, wide;
  int stages;  // stages of each warp's ring
};

constexpr int LONG = 32;  // min tiles per group of warps for which larger copies of bf16 weights are faster

template <int ROW>
constexpr int MOST_STAGES = ROW > 256 ? 2 : ROW == 256 ? 5 : 8;

// Whether the norm's weights are loaded before the wait.
__host__ __device__ constexpr bool kept(const Rows& in) { return in.norm != nullptr && in.i <= 2048; }

// Sends a sum to address `to` of CTA `rank` of the cluster; `barrier` there counts its bytes.
__device__ __forceinline__ void hand_on(const float* to, const uint64_t* barrier, int rank, float v) {
  const uint32_t there = address_in(to, rank), remote = address_in(reinterpret_cast<const float*>(barrier), rank);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there), "f"(v),
               "r"(remote)
               : "memory");
}

// CTAS: CTAs of a cluster that split the k of a tile.
template <typename W, int ROW, int KS, int TOKENS, int CTAS>
__global__ __launch_bounds__(WARPS * 32, 1) void linear_kernel(const __grid_constant__ Args a) {
  using S = Stage<ROW>;
  using X = Sums<TOKENS>;
  using Value = typename W::Value;
  constexpr int SHARING = KS / CTAS, GROUPS = WARPS / SHARING;  // warps of a CTA that share a tile; tiles at once
  constexpr bool SPLIT = CTAS > 1;
  // Warps FIRST .. prepare x. For e4m3 weights that takes longer than issuing loads, so all warps do it.
  constexpr int FIRST = W::BYTES == 1 ? 0 : ASKING, PREPARING = WARPS - FIRST;
  extern __shared__ __align__(128) uint8_t memory[];
  Value* xs = reinterpret_cast<Value*>(memory + WARPS * a.stages * S::BYTES);
  const int rank = SPLIT ? cluster_rank() : 0, clusters = gridDim.x / CTAS;
  Rows in = a.in;
  in.i /= CTAS, in.x += rank * in.i;
  const int pitch = SPLIT ? in.i + RAW_PAD : pitch_of(in.i);
  bf16* norm = kept(a.in) ? reinterpret_cast<bf16*>(xs + a.in.T * pitch) : nullptr;
  __shared__ float sums[2][WARPS][TOKENS * TILE], lowered[TOKENS];
  __shared__ uint64_t barriers[WARPS][MOST_STAGES<ROW>];
  __shared__ float handed[SPLIT ? 2 : 1][GROUPS][SPLIT ? TOKENS * TILE : 1];  // sums of the first CTA
  __shared__ uint64_t handed_full[2][GROUPS], handed_free[2][GROUPS], x_full[2];

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % SHARING, group = warp / SHARING;
  const int chunks = a.in.i / W::CHUNK / KS, loads = chunks / S::CHUNKS, tiles = a.o / TILE, step = clusters * GROUPS;
  const int64_t row_bytes = static_cast<int64_t>(a.in.i) * W::BYTES;
  const int k0 = part * chunks * W::CHUNK;  // in this CTA's part
  int tile = blockIdx.x / CTAS + group * clusters;  // evenly over SMs

  // The next load into a warp's ring: piece `ahead` of a tile.
  struct Next {
    const uint8_t* from;
    int tile, ahead, stage;
  };
  const auto first = [&](int warp) {
    const int tile = blockIdx.x / CTAS + warp / SHARING * clusters;
    const int k = rank * in.i + warp % SHARING * chunks * W::CHUNK;
    return Next{a.w + static_cast<int64_t>(tile) * TILE * row_bytes + k * W::BYTES, tile, 0, 0};
  };
  const auto load = [&](Next& next, int warp, bool ask = true) {
    if (next.tile >= tiles) return;
    if (ask && elected()) {
      uint8_t* to = memory + (warp * a.stages + next.stage) * S::BYTES;
      uint64_t* barrier = &barriers[warp][next.stage];
      barrier_expect(barrier, TILE * ROW);
#pragma unroll
      for (int row = 0; row < TILE; row++) {
        bulk_load_once(to + S::place(row), next.from + row * row_bytes, ROW, barrier);
      }
    }
    next.from += ROW;
    next.stage = next.stage + 1 == a.stages ? 0 : next.stage + 1;
    if (++next.ahead == loads) {
      next.ahead = 0, next.tile += step;
      next.from += step * TILE * row_bytes - loads * ROW;
    }
  };
  Next next = first(warp);
  if (lane < a.stages) barrier_init(&barriers[warp][lane], 1);
  if (SPLIT && threadIdx.x < 2 * GROUPS) {
    barrier_init(&handed_full[0][0] + threadIdx.x, 1);
    barrier_init(&handed_free[0][0] + threadIdx.x, SHARING);
    if (threadIdx.x < 2) barrier_init(&x_full[threadIdx.x], WARPS);
  }
  barriers_visible();
  __syncthreads();  // the barriers are initialised
  if (SPLIT) cluster_arrive();
  // The scale of this lane's output row, loaded with the tile: after the sum it would cost a memory latency.
  float scale = 1;
  auto load_scale = [&]() {
    if (W::BYTES == 1 && tile < tiles) scale = a.scale[tile * TILE + lane % TILE];
  };
  load_scale();
  // Load the norm before the weights: loads return in order of issue, so it would arrive microseconds later.
  if (warp >= FIRST && norm != nullptr) {
#pragma unroll 1
    for (int k = (threadIdx.x - FIRST * 32) * 8; k < a.in.i; k += PREPARING * 256) copy16(norm + k, a.in.norm + k);
    copies_commit();
  }
  // Issuing the copies that fill a ring takes about a memory latency, so warps that prepare x leave it to the others.
  Next other = first(warp + ASKING);
#pragma unroll 1
  for (int s = 0; s < a.stages; s++) {
    load(next, warp, warp < ASKING || FIRST == 0);
    if (warp < ASKING && FIRST > 0) load(other, warp + ASKING);
  }
  wait_for_predecessor();
  let_successor_start();
  constexpr int READS = SPLIT ? TOKENS / 8 : X::KINDS;
  const Value* x[READS];
  const int soon = (loads + 1) / 2;  // pieces of every warp's part of x that are copied first
  if constexpr (SPLIT) {
    const int row = (warp + ASKING) % WARPS;
    if (elected()) {  // a warp copies a row
      for (int half = 0; half < 2; half++) {
        const int begin = half ? soon : 0, bytes = (half ? loads - soon : soon) * ROW;
        barrier_expect(&x_full[half], row < in.T ? SHARING * bytes : 0);
        for (int p = 0; p < SHARING && row < in.T && bytes > 0; p++) {
          const int k = p * chunks * W::CHUNK + begin * (ROW / W::BYTES);
          bulk_load(xs + row * pitch + k, in.x + row * in.x_stride + k, bytes, &x_full[half]);
        }
      }
    }
    cluster_wait();  // the other CTA has started, so its shared memory may be written
#pragma unroll
    for (int n = 0; n < READS; n++) x[n] = xs + min(n * 8 + g, in.T - 1) * pitch + t * 8;
  } else {
    if (warp >= FIRST) {
      if (norm != nullptr) {
        copies_wait<0>();
        prepared<FIRST>();  // a warp reads norm weights that other warps have copied
      }
      stage<W, FIRST>(in, xs, norm != nullptr ? norm : a.in.norm, lowered);
    }
    hand_over<FIRST>(warp);
#pragma unroll
    for (int n = 0; n < READS; n++) x[n] = X::from(xs, pitch, a.in.T, n);
  }
  const uint8_t* mine = memory + warp * a.stages * S::BYTES + S::place(g) + 16 * t;
  const int passes = (tiles + step - 1) / step;
  int stage_out = 0, phase = 0;
  for (int pass = 0; pass < passes; pass++) {
    X acc;
    if (tile < tiles) {
      for (int n = 0; n < loads; n++) {
        barrier_wait(&barriers[warp][stage_out], phase);
        const uint8_t* w = mine + stage_out * S::BYTES;
        const int k = k0 + n * S::CHUNKS * W::CHUNK;
        if constexpr (SPLIT) {
          if (n == 0 || n == soon) barrier_wait(&x_full[n > 0], 0);
          multiply_raw<S::CHUNKS>(acc, w, x, k);
        } else {
          multiply<W, S::CHUNKS>(acc, w, x, k);
        }
        if (++stage_out == a.stages) stage_out = 0, phase ^= 1;
        __syncwarp();  // all lanes have read the stage that the next load overwrites
        load(next, warp);
      }
    }
    // Two buffers: a warp can be one pass ahead of the slowest reader, never two.
    acc.store(sums[pass & 1][warp]);
    if (SHARING > 1) {
      named_sync(1 + group, SHARING * 32);
    } else {
      __syncwarp();
    }
    const int turn = pass & 1;
    if (SPLIT && tile < tiles) {
      if (rank == 0) {
        if (pass >= 2) barrier_wait(&handed_free[turn][group], (pass / 2 - 1) & 1);
      } else {
        if (part == 0 && elected()) barrier_expect(&handed_full[turn][group], a.in.T * TILE * 4);
        barrier_wait(&handed_full[turn][group], pass / 2 & 1);
      }
    }
    for (int n = part * 32 + lane; n < a.in.T * TILE && tile < tiles; n += SHARING * 32) {
      float v = SPLIT && rank > 0 ? handed[turn][group][n] : 0;
#pragma unroll
      for (int s = 0; s < SHARING; s++) v += sums[turn][group * SHARING + s][n];
      if (SPLIT && rank == 0) {
        hand_on(&handed[turn][group][n], &handed_full[turn][group], 1, v);
        continue;
      }
      const int token = n / TILE;
      if (W::BYTES == 1) v = v * scale * lowered[token];
      const int64_t at = static_cast<int64_t>(token) * a.o + tile * TILE + n % TILE;
      if (a.wide) {
        static_cast<float*>(a.y)[at] = v;
      } else {
        static_cast<bf16*>(a.y)[at] = __float2bfloat16(v);
      }
    }
    if (SPLIT && rank > 0 && tile < tiles) {
      __syncwarp();
      if (elected()) barrier_arrive_at(&handed_free[turn][group], 0);
    }
    tile += step;
    load_scale();
  }
  if (SPLIT) cluster_sync();  // neither CTA may end while the other writes to its shared memory
}

template <typename W, int ROW, int KS, int TOKENS, int CTAS = 1>
int start(Args a, int sms, void* stream) {
  constexpr int ROUND = WARPS * Stage<ROW>::BYTES, GROUPS = WARPS * CTAS / KS;
  const int pitch = CTAS > 1 ? a.in.i / CTAS + RAW_PAD : pitch_of(a.in.i);
  const int rows = (a.in.T * pitch + (kept(a.in) ? a.in.i : 0)) * static_cast<int>(sizeof(bf16));
  const int units = (a.o / TILE + GROUPS - 1) / GROUPS;
  // With one tile per warp, use the largest ring: all loads are issued before x is ready. Otherwise leave shared memory
  // to the next kernel's CTAs (the router's), which then start early beside this kernel's.
  const int most = ROW == 256 && units * CTAS > sms ? 4 : MOST_STAGES<ROW>;
  a.stages = min(most, ((CTAS > 1 ? 203 : 206) * 1024 - rows) / ROUND);
  // Claim so much shared memory that an SM holds one CTA only. Otherwise, after a predecessor that ends unevenly, the
  // hardware may place two CTAs on one SM and none on another, and evenly divided work takes twice as long.
  const int claimed = max(rows + a.stages * ROUND, 116 * 1024);
  return launch(linear_kernel<W, ROW, KS, TOKENS, CTAS>, dim3(min(units, sms / CTAS) * CTAS), dim3(WARPS * 32), claimed,
                stream, CTAS, a);
}

template <typename W, int ROW, int KS>
int rows(const Args& a, int sms, void* stream) {
  if (a.in.T <= 4) return start<W, ROW, KS, 4>(a, sms, stream);
  return a.in.T <= 8 ? start<W, ROW, KS, 8>(a, sms, stream) : start<W, ROW, KS, 16>(a, sms, stream);
}

template <typename W, int KS>
int choose(const Args& a, int ctas, int sms, void* stream) {
  const int chunks = a.in.i / W::CHUNK / KS;
  const bool room = a.in.T <= 4 && a.in.T * pitch_of(a.in.i) <= 32 * 1024;
  if constexpr (W::BYTES == 1) {  // larger copies gain more than a deeper ring of smaller ones
    if (room && chunks % 8 == 0) return start<W, 512, KS, 4>(a, sms, stream);
    if (room && chunks % 7 == 0) return start<W, 448, KS, 4>(a, sms, stream);
  }
  if constexpr (W::BYTES == 2 && KS == 8) {
    if (ctas == 2) return start<W, 256, KS, 8, 2>(a, sms, stream);
    // The lm_head over a whole vocabulary reads at 4.0 to 4.6 TB/s with copies of 256 bytes, always at 4.6 with larger
    // ones. Kernels of about 0.1 ms are as fast with either, shorter ones faster with small copies.
    const bool long_way = a.o / TILE >= LONG * sms * (WARPS / KS);
    if (room && long_way && chunks % 7 == 0) return start<W, 448, KS, 4>(a, sms, stream);
  }
  if (chunks % 4 == 0) return rows<W, 256, KS>(a, sms, stream);
  if (chunks % 2 == 0) return rows<W, 128, KS>(a, sms, stream);
  return rows<W, 64, KS>(a, sms, stream);
}

template <typename W>
int split(const Args& a, int k_split, int ctas, int sms, void* stream) {
  switch (k_split) {
    case 1: return choose<W, 1>(a, ctas, sms, stream);
    case 2: return choose<W, 2>(a, ctas, sms, stream);
    case 4: return choose<W, 4>(a, ctas, sms, stream);
    default: return choose<W, 8>(a, ctas, sms, stream);
  }
}

}  // namespace

// scale: null for bf16 weights, else the scales of the rows of e4m3 weights. k_split: warps per tile, 1, 2, 4 or 8.
// i / 32 (e4m3: i / 64) must be a multiple of it, o of 8, T at most 16. ctas: 1, or 2 that share k, for bf16 weights
// without a norm, T up to 8, k_split 8 and i a multiple of 1,024.
API int linear(const void* x, int64_t x_stride, const void* w, const void* scale, const void* norm, float eps, void* y,
               int64_t T, int64_t i, int64_t o, int64_t wide, int64_t k_split, int64_t ctas, int64_t sms,
               void* stream) {
  const Args a{{static_cast<const bf16*>(x), x_stride, static_cast<const bf16*>(norm), static_cast<int>(T),
                static_cast<int>(i), eps},
               static_cast<const uint8_t*>(w),
               static_cast<const float*>(scale),
               y,
               static_cast<int>(o),
               static_cast<int>(wide),
               0};
  return scale == nullptr ? split<Bf16>(a, k_split, ctas, sms, stream) : split<E4m3>(a, k_split, ctas, sms, stream);
}
