// y = x w^T for up to 128 rows of x: every weight is read once, x once per cluster. Contracts in linear.py and
// linear_fp8.py.
//
// A CTA has some rows of w, the A operand of wgmma; x is B, multicast to all CTAs of a cluster that multiply the same
// k. If w has few rows, CTAs of a cluster split k and add their sums through shared memory at the end. A producer warp
// keeps a ring of stages (128 bytes of each row of w, and the part of x with the same k) in flight, those of w starting
// before the wait; two or three consumer warpgroups take stages in turn. e4m3 is converted to bf16, exactly, between
// shared memory and registers.
#include "cuda/e4m3.cuh"
#include "cuda/tensor_map.cuh"

using namespace hopper;

namespace {

constexpr int MOST_STAGES = 24;
constexpr int SHARED = 226 * 1024, ROW = 128;  // bytes: shared memory; a row of w in a stage
constexpr int MOST_CLUSTER = 8;
constexpr int ALL = 8;  // the named barrier of all consumer warpgroups; each also has its own

struct Args {
  const float* scale;  // [o], for e4m3 weights
  void* y;
  int64_t y_stride;
  int T, o;
  int rows;    // rows of w per CTA in one pass
  int loads;   // stages of a pass
  int passes;
  int splits;  // parts of k, one per CTA of a cluster
  int stages;
  int wide, gated;
};

// d[64 x N] += a[64 x 16] b[16 x N], both k-major slabs.
template <int N>
__device__ void product(float (&d)[N / 2], uint64_t a, uint64_t b);
#define PERILUNE_PRODUCT(N, UNITS, i, j)                                                                        \
  template <>                                                                                                   \
  __device__ __forceinline__ void product<N>(float (&d)[N / 2], uint64_t a, uint64_t b) {                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PERILUNE_D##UNITS                 \
                 "}, %" #i ", %" #j ", 1, 1, 1, 0, 0;"                                                          \
                 : PERILUNE_C##UNITS                                                                            \
                 : "l"(a), "l"(b));                                                                             \
  }
PERILUNE_PRODUCT(16, 1, 8, 9)
PERILUNE_PRODUCT(32, 2, 16, 17)
PERILUNE_PRODUCT(64, 4, 32, 33)
PERILUNE_PRODUCT(128, 8, 64, 65)

__device__ __forceinline__ float4 load_from(const float* p, int rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address_in(p, rank)));
  return v;
}
// A barrier of the cluster without release semantics: writes before it need not be visible (making them so is slow).
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
template <int n>
__device__ __forceinline__ void settle(float (&d)[n]) {  // keeps the compiler from using d before the wait
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// BYTES: of a weight; N: tokens, rounded up; TILES: tiles of 64 rows of w.
template <int BYTES, int N, int TILES>
struct Sizes {
  static constexpr int K = ROW / BYTES;      // k of a stage
  static constexpr int X = K / 64 * N * ROW;  // bytes of x in a stage
  static constexpr int GROUPS = BYTES == 1 && N * TILES <= 64 ? 3 : 2;  // warpgroups that multiply
  static constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 32;
  static constexpr int PITCH = TILES * 64 + 4;
  static constexpr int SUMS = N * PITCH * 4;
  __host__ __device__ static constexpr int stage(int rows) { return rows * ROW + X; }
};

// Writes y for tokens begin .. end - 1 and rows row0 .. of w: sums over `parts` CTAs of the cluster, from `rank` on,
// `apart` ranks apart.
template <typename S, int BYTES>
__device__ __forceinline__ void write(const Args& a, const float* sums, int row0, int begin, int end, int parts,
                                      int rank, int apart) {
  const int outs = a.gated ? a.rows / 2 : a.rows, out0 = a.gated ? row0 / 2 : row0, all = a.gated ? a.o / 2 : a.o;
  auto sum_of = [&](int token, int row) {
    const float* at = sums + token * S::PITCH + row;
    float4 v = parts > 1 ? load_from(at, rank) : *reinterpret_cast<const float4*>(at);
    for (int p = 1; p < parts; p++) {
      const float4 u = load_from(at, rank + p * apart);
      v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
    }
    return v;
  };
  auto scaled = [&](float4& v, int row) {
    if (BYTES == 2) return;
    const float4 s = *reinterpret_cast<const float4*>(a.scale + row);
    v.x *= s.x, v.y *= s.y, v.z *= s.z, v.w *= s.w;
  };
  for (int i = threadIdx.x; i < (end - begin) * (outs / 4); i += S::CONSUMERS) {
    const int token = begin + i / (outs / 4), column = i % (outs / 4) * 4, out = out0 + column;
    if (out >= all) continue;
    float4 v = sum_of(token, a.gated ? column / 8 * 16 + column % 8 : column);
    scaled(v, out);
    if (a.gated) {
      float4 u = sum_of(token, column / 8 * 16 + column % 8 + 8);
      scaled(u, all + out);
      auto weighed = [](float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; };
      v = make_float4(weighed(v.x, u.x), weighed(v.y, u.y), weighed(v.z, u.z), weighed(v.w, u.w));
    }
    const int64_t at = token * a.y_stride + out;
    if (a.wide) *reinterpret_cast<float4*>(static_cast<float*>(a.y) + at) = v;
    else *reinterpret_cast<uint2*>(static_cast<bf16*>(a.y) + at) = make_uint2(narrow(v.x, v.y), narrow(v.z, v.w));
  }
}

template <int BYTES, int N, int TILES>
__global__ void __launch_bounds__(Sizes<BYTES, N, TILES>::THREADS, 1)
    skinny_gemm_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, const Args a) {
  using S = Sizes<BYTES, N, TILES>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ uint64_t full[MOST_STAGES], empty[MOST_STAGES];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = cluster_rank(), size = cluster_size(), sharing = size / a.splits;  // CTAs that have the same k
  const int slice = rank / sharing, member = rank % sharing;
  const int stage_bytes = S::stage(a.rows), step = gridDim.x / size * sharing;
  const int first_tile = blockIdx.x / size * sharing + member, total = a.passes * a.loads;
  float* sums = reinterpret_cast<float*>(memory + (a.passes > 1 ? a.stages * stage_bytes + TILES * 64 * ROW : 0));
  let_successor_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, sharing);
    }
    barriers_visible();
    prefetch_map(&w);
    prefetch_map(&x);
  }
  __syncthreads();
  if (size > 1) cluster_meet();

  if (warp == S::CONSUMERS / 32) {
    if (lane == 0) {
      const int mask = ((1 << sharing) - 1) << slice * sharing;
      const int box = max(8, N / sharing);  // rows of x that this CTA multicasts to all CTAs with the same k
      struct Place {  // a position in the ring and in w
        int stage, load, k, row;
      };
      const int k0 = slice * a.loads * S::K;
      auto advance = [&](Place& p) {
        if (++p.stage == a.stages) p.stage = 0;
        p.k += S::K;
        if (++p.load == a.loads) p.load = 0, p.k = k0, p.row += step * a.rows;
      };
      auto bring_w = [&](const Place& p) {
        uint8_t* to = memory + p.stage * stage_bytes;
        uint64_t* barrier = full + p.stage;
        barrier_expect(barrier, stage_bytes);
        if (a.gated) {
          for (int i = 0; i < a.rows / 16; i++) {
            tensor_load_once(to + i * 16 * ROW, &w, p.k, p.row / 2 + i * 8, 0, barrier);
          }
        } else {
          tensor_load_once(to, &w, p.k, p.row, 0, barrier);
        }
      };
      const bool brings = member * box < N;
      auto bring_x = [&](const Place& p) {
        if (!brings) return;
        uint8_t* to = memory + p.stage * stage_bytes + a.rows * ROW + member * box * ROW;
#pragma unroll
        for (int i = 0; i < S::K / 64; i++) {
          if (sharing > 1) tensor_load_to(to + i * N * ROW, &x, p.k + i * 64, member * box, 0, full + p.stage, mask);
          else tensor_load(to + i * N * ROW, &x, p.k + i * 64, 0, 0, full + p.stage);
        }
      };
      const int ahead = min(a.stages, total);
      Place next = {0, 0, k0, first_tile * a.rows}, begun = next;
#pragma unroll 1
      for (int n = 0; n < ahead; n++, advance(next)) bring_w(next);
      wait_for_predecessor();
#pragma unroll 1
      for (int n = 0; n < ahead; n++, advance(begun)) bring_x(begun);
      int phase = 0;
#pragma unroll 1
      for (int n = ahead; n < total; n++) {
        if (BYTES == 1) barrier_wait_to_refill(empty + next.stage, phase);
        else barrier_wait(empty + next.stage, phase);
        bring_w(next);
        bring_x(next);
        advance(next);
        if (next.stage == 0) phase ^= 1;
      }
    } else {
      wait_for_predecessor();
    }
    __syncwarp();
  } else {
    wait_for_predecessor();
    const int group = warp / 4, g = lane / 4, t = lane % 4;
    int stage = group, phase = 0, n = group, last = -1;
    // Frees the stage that the warpgroup read before n: it is refilled once all CTAs that share its x have freed it.
    // Only if it will be refilled: an arrive for which no copy waits might reach a CTA that has ended.
    auto release = [&] {
      if (last < 0 || n - S::GROUPS + a.stages >= total) return;
      named_sync(1 + group, 128);
      if (warp % 4 == 0 && lane < sharing) barrier_arrive_at(empty + last, slice * sharing + lane);
      __syncwarp();
      last = -1;
    };
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
      float d[TILES][N / 2] = {};
      const int end = (pass + 1) * a.loads;
      uint32_t widened[2][TILES * 16];  // e4m3 weights converted to bf16
#pragma unroll 1
      for (; n < end; n += S::GROUPS) {
        const uint8_t* ws = memory + stage * stage_bytes;
        const uint8_t* xs = ws + a.rows * ROW;
        barrier_wait(full + stage, phase);
        if constexpr (BYTES == 2) {
          wgmma_fence();
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
              product<N>(d[tile], slab_descriptor(ws + tile * 64 * ROW + k * 32), slab_descriptor(xs + k * 32));
            }
          }
          wgmma_commit();
          wgmma_wait<1>();
          release();
        } else {
          const int r = warp % 4 * 16 + g;
#pragma unroll
          for (int half = 0; half < 2; half++) {  // while one half is multiplied, the other is converted
            uint32_t(&v)[TILES * 16] = widened[half];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
              for (int i = 0; i < 16; i++) {
                const uint8_t* from = ws + (tile * 64 + r + i % 2 * 8) * ROW;
                const int at = ((half * 4 + i / 4) ^ g) * 16 + i % 4 / 2 * 8 + t * 2;
                v[tile * 16 + i] = e4m3::pair<0>(*reinterpret_cast<const uint16_t*>(from + at));
              }
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < TILES * 4; i++) {
              wgmma<N>(d[i / 4], v + i * 4, slab_descriptor(xs + half * N * ROW + i % 4 * 32));
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (half == 0) release();
          }
        }
        last = stage;
        stage += S::GROUPS;
        if (stage >= a.stages) stage -= a.stages, phase ^= 1;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) settle(d[tile]);
      release();
      // The sums of all warpgroups to [token][row]. With one pass this memory is the ring's, which is not filled again.
      named_sync(ALL, S::CONSUMERS);
#pragma unroll
      for (int turn = 0; turn < S::GROUPS; turn++) {
        if (group == turn) {
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
              const int token = i / 4 * 8 + t * 2 + i % 2, row = tile * 64 + warp % 4 * 16 + i % 4 / 2 * 8 + g;
              float& sum = sums[token * S::PITCH + row];
              sum = turn ? sum + d[tile][i] : d[tile][i];
            }
          }
        }
        if (turn < S::GROUPS - 1) named_sync(ALL, S::CONSUMERS);
      }
      if (a.splits > 1) break;
      named_sync(ALL, S::CONSUMERS);
      write<S, BYTES>(a, sums, (first_tile + pass * step) * a.rows, 0, a.T, 1, rank, 0);
    }
  }
  if (a.splits > 1) {  // each CTA adds the sums of all of them for its part of the tokens
    cluster_sync();
    const int share = (a.T + a.splits - 1) / a.splits, begin = slice * share;
    if (warp < S::CONSUMERS / 32) {
      write<S, BYTES>(a, sums, first_tile * a.rows, begin, min(a.T, begin + share), a.splits, member, sharing);
    }
  }
  if (size > 1) cluster_meet();  // do not end while other CTAs may still write or read this CTA's shared memory
}

// How many clusters of `size` the GPU holds at once.
template <int BYTES, int N, int TILES>
int clusters_at_once(int size) {
  static int known[MOST_CLUSTER + 1] = {};
  if (known[size] == 0) {
    auto kernel = skinny_gemm_kernel<BYTES, N, TILES>;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size);
    config.blockDim = dim3(Sizes<BYTES, N, TILES>::THREADS);
    config.dynamicSmemBytes = SHARED;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int count = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED) != cudaSuccess) return 0;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) return 0;
    known[size] = count;
  }
  return known[size];
}

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

struct Call {
  const void *x, *w;
  int64_t x_stride;
  int i, cluster;
  void* stream;
};

template <int BYTES, int N, int TILES>
int start(const Call& c, Args a, int clusters) {
  using S = Sizes<BYTES, N, TILES>;
  const int sharing = c.cluster / a.splits, stage = S::stage(a.rows);
  const int spare = TILES * 64 * ROW + (a.passes > 1 ? S::SUMS : 0);
  a.loads = c.i / S::K / a.splits;
  a.stages = (SHARED - spare) / stage;
  // The number of stages is a multiple of GROUPS, so that a stage always belongs to the same warpgroup: a barrier's
  // parity distinguishes only two phases, and with another warpgroup in between there would be more.
  a.stages = min(a.stages, MOST_STAGES) / S::GROUPS * S::GROUPS;
  if (a.stages <= S::GROUPS || (a.passes == 1 && a.stages * stage < S::SUMS)) return -2;
  CUtensorMap w, x;
  const int64_t row = static_cast<int64_t>(c.i) * BYTES, o = a.gated ? a.o / 2 : a.o;
  const int box = N / sharing < 8 ? 8 : N / sharing;
  if (!maps::describe(&w, c.w, BYTES == 2 ? maps::SWIZZLED : maps::SWIZZLED_BYTES, {c.i, o, a.gated ? 2 : 1},
                      {row, o * row}, {S::K, a.gated ? 8 : a.rows, a.gated ? 2 : 1}) ||
      !maps::describe(&x, c.x, maps::SWIZZLED, {c.i, a.T, 1}, {c.x_stride * 2, a.T * c.x_stride * 2}, {64, box, 1})) {
    return -1;
  }
  return launch(skinny_gemm_kernel<BYTES, N, TILES>, dim3(clusters * c.cluster), dim3(S::THREADS),
                a.stages * stage + spare, c.stream, c.cluster, w, x, a);
}

template <int BYTES, int N>
int choose(Call c, Args a) {
  const int clusters = clusters_at_once<BYTES, N, 1>(c.cluster), unit = a.gated ? 16 : 8;
  if (clusters == 0) return -3;
  const int groups = clusters * (c.cluster / a.splits);  // groups of CTAs with different rows of w
  // 128 rows of e4m3 weights for 128 tokens need too many registers: two passes of 64 are faster, unless k is split.
  const int most = BYTES == 1 && N == 128 && a.splits == 1 ? 64 : 128;
  a.passes = divide_up(a.o, groups * most);
  if (a.passes > 1 && a.splits > 1) {  // only on a GPU with fewer SMs
    a.splits = c.cluster = 1;
    return choose<BYTES, N>(c, a);
  }
  a.rows = divide_up(divide_up(a.o, groups * a.passes), unit) * unit;
  return a.rows <= 64 ? start<BYTES, N, 1>(c, a, clusters) : start<BYTES, N, 2>(c, a, clusters);
}

template <int BYTES>
int sized(const Call& c, const Args& a) {
  if (a.T <= 16) return choose<BYTES, 16>(c, a);
  if (a.T <= 32) return choose<BYTES, 32>(c, a);
  return a.T <= 64 ? choose<BYTES, 64>(c, a) : choose<BYTES, 128>(c, a);
}

}  // namespace

// scale: null for bf16 weights, else the scales of the rows of e4m3 weights. T at most 128; o a multiple of 8; i a
// multiple of 64 (e4m3: 128) times `splits`, which divides `cluster`, at most 8; addresses and strides are multiples of
// 16 bytes. gated: the halves of w are gate and up, y has o / 2 columns, and o is a multiple of 16. Returns -1 without
// tensor maps, -2 if it does not fit.
API int skinny_gemm(const void* x, int64_t x_stride, const void* w, const void* scale, void* y, int64_t y_stride,
                    int64_t T, int64_t i, int64_t o, int64_t wide, int64_t gated, int64_t splits, int64_t cluster,
                    void* stream) {
  const Call c = {x, w, x_stride, static_cast<int>(i), static_cast<int>(cluster), stream};
  Args a = {};
  a.scale = static_cast<const float*>(scale);
  a.y = y, a.y_stride = y_stride, a.T = static_cast<int>(T), a.o = static_cast<int>(o);
  a.wide = static_cast<int>(wide), a.gated = static_cast<int>(gated), a.splits = static_cast<int>(splits);
  return scale == nullptr ? sized<2>(c, a) : sized<1>(c, a);
}
