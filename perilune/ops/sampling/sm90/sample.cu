// A token per row of logits, sampled or the largest, in one launch. Contracts in sample.py and argmax.py.
//
// A cluster of CTAs shares a row and keeps it in shared memory, so that logits are read once. Top-k and top-p find
// their threshold by radix selection, without sorting: each logit's distance below the largest is an unsigned number
// (the bits of a positive float); each round makes a histogram (of counts, or of weights) over the next 11 bits and
// continues in the bucket that contains the threshold. Weights are integers: every sum is exact, and shared atomics
// give the same bits in any order.
#include <cooperative_groups.h>

#include "cuda/hopper.cuh"

using namespace hopper;
namespace cg = cooperative_groups;

namespace {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int MOST_CTAS = 16;  // max CTAs per row; clusters of more than 8 are not portable to every GPU
constexpr int FEW = 8192;      // a vocabulary up to this size needs one CTA
constexpr int FULL = 15 * 1024 / THREADS;  // max ids per thread with one histogram: 15 x 1,024 halves sum in 32 bits
constexpr int MOST_EACH = 2 * FULL;
constexpr int BATCH = 5;       // loads in flight per thread
constexpr int BITS = 11;
constexpr int BUCKETS = 1 << BITS;
constexpr int COPIES = 2;  // histograms per CTA above FULL ids per thread
constexpr int ONE = 36;   // the weight of the largest logit is 2^36
constexpr int HALF = 18;  // weights are handled as two halves of 18 bits
constexpr uint32_t NEAR = 0x32000000;  // bits of 2^-27: the first round's bucket 0 reaches from 0 to here
constexpr uint32_t FAR = 0x41e00000;   // bits of 28: e^-28 2^36 is below 1
constexpr uint32_t OUT = ~0u;
constexpr float INFINITE = __builtin_inff();

struct Args {
  const float* logits;  // [S, V]
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const double* u;
  int64_t* ids;
  int V, each;  // each: ids per thread
};

struct Word {
  uint64_t a, b;
};

struct Histogram {
  uint32_t high[COPIES][BUCKETS], low[COPIES][BUCKETS], count[COPIES][BUCKETS];
};

// The bucket that contains a round's threshold, the mass and count before it, how many numbers it has; none: not found.
struct Found {
  uint64_t mass;
  uint32_t count, bucket, inside, none;
};

struct Shared {
  Histogram histogram;
  uint64_t mass[BUCKETS];  // this CTA's share of the buckets, summed over all CTAs
  uint32_t count[BUCKETS];
  Word slots[2][MOST_CTAS];
  uint64_t warps[WARPS];
  uint32_t flags[WARPS];
  Found found;
};

// The result of a selection: keep numbers below `bound` and, of the `equal` ones that equal it, the first `ties`.
struct Cut {
  uint32_t bound, ties, equal;
};

// 2^36 e^-distance; its integer part is the weight. Has the same bits as sample.py's `weights`: every operation is
// rounded separately (no fused multiply-add).
__device__ __forceinline__ float weigh(uint32_t distance) {
  const float shifter = 12582912.0f, z = -__uint_as_float(distance);
  const float t = __fadd_rn(__fmul_rn(z, 1.44269502f), shifter), n = __fadd_rn(t, -shifter);
  const float r = __fadd_rn(__fsub_rn(z, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, 2.12194442e-4f));
  float p = 1.38888892e-3f;
  p = __fadd_rn(__fmul_rn(p, r), 8.33333377e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 4.16666679e-2f);
  p = __fadd_rn(__fmul_rn(p, r), 1.66666672e-1f);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23) + (ONE << 23));
}

// The integer part of w as x * 2^18 + y, both integers. Computed by adding 2^23 with rounding down: float-to-integer
// conversions and integer arithmetic are slow.
__device__ __forceinline__ float2 halves(float w) {
  const float whole = 8388608.0f, high = __fadd_rd(w * (1.0f / (1 << HALF)), whole) - whole;
  return make_float2(high, __fadd_rd(w - high * (1 << HALF), whole) - whole);
}
// The same as integers.
__device__ __forceinline__ uint2 split(float w) {
  const float2 h = halves(w);
  return make_uint2(__float_as_uint(h.x + 8388608.0f) & 0x7fffff, __float_as_uint(h.y + 8388608.0f) & 0x7fffff);
}

__device__ __forceinline__ uint64_t join(uint32_t high, uint32_t low) {
  return (static_cast<uint64_t>(high) << HALF) + low;
}

__device__ __forceinline__ uint64_t scan(uint64_t v, int lane) {
#pragma unroll
  for (int n = 1; n < 32; n *= 2) {
    uint64_t other = __shfl_up_sync(~0u, v, n);
    if (lane >= n) v += other;
  }
  return v;
}

__device__ __forceinline__ uint64_t sum(uint64_t v) {
#pragma unroll
  for (int lane = 16; lane; lane >>= 1) v += __shfl_xor_sync(~0u, v, lane);
  return v;
}

// Maps floats to unsigned integers of the same order; -0 becomes 0.
__device__ __forceinline__ uint32_t ordered(float v) {
  uint32_t bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t v) {
  return __uint_as_float(v & 0x80000000u ? v & 0x7fffffffu : ~v);
}

struct Row {
  Shared& s;
  uint32_t* distances;  // this warp's, [each][32]
  cg::cluster_group cluster;
  int each, copies, warp, lane, rank, ctas;
  int turn;

  // Sends warp 0's `mine` to all CTAs; returns CTA n's word in lane n of every warp. Two sets of slots: a CTA that is
  // one exchange ahead overwrites no word that another CTA still reads.
  __device__ Word exchange(Word mine) {
    turn ^= 1;
    if (warp == 0 && lane < ctas) *cluster.map_shared_rank(&s.slots[turn][rank], lane) = mine;
    cluster.sync();
    return lane < ctas ? s.slots[turn][lane] : Word{0, 0};
  }

  __device__ void clear() {
    uint4* at = reinterpret_cast<uint4*>(&s.histogram);
    for (int n = threadIdx.x; n < sizeof(Histogram) / 16; n += THREADS) at[n] = make_uint4(0, 0, 0, 0);
  }

  template <bool MASS>
  __device__ void tally(uint32_t low, uint32_t high, int shift, bool first) {
    Histogram& h = s.histogram;
    const int copy = warp % copies;
#pragma unroll 2
    for (int i = 0; i < each; i++) {
      const uint32_t d = distances[i * 32 + lane];
      const bool inside = d <= high && (first || d >= low);
      if (!__any_sync(~0u, inside)) continue;
      const int bucket = !inside ? -1 : d < low ? 0 : static_cast<int>((d - low) >> shift);
      // In a row of few distinct logits 32 atomics would be serialised at one address.
      if (__all_sync(~0u, bucket == __shfl_sync(~0u, bucket, 0))) {
        if (MASS) {
          const uint2 w = split(weigh(d));
          const uint32_t most = __reduce_add_sync(~0u, w.x), rest = __reduce_add_sync(~0u, w.y);
          if (lane == 0) atomicAdd(&h.high[copy][bucket], most), atomicAdd(&h.low[copy][bucket], rest);
        }
        if (lane == 0) atomicAdd(&h.count[copy][bucket], 32);
      } else if (inside) {
        if (MASS) {
          const uint2 w = split(weigh(d));
          atomicAdd(&h.high[copy][bucket], w.x);
          atomicAdd(&h.low[copy][bucket], w.y);
        }
        atomicAdd(&h.count[copy][bucket], 1);
      }
    }
  }

  // Sums this CTA's share of the buckets over all CTAs, into s.mass and s.count. Lane n of warp 0 returns the sums of
  // the n-th of 32 equal parts of the share. Eight lanes read 128 bytes of one CTA, and each CTA starts with a
  // different CTA: reading single words, or all CTAs in the same order, is 3 to 10 us slower.
  template <bool MASS>
  __device__ Word merge() {
    const int share = BUCKETS / ctas, groups = min(ctas, 4), parts = ctas / groups;
    if (threadIdx.x < BUCKETS / 4) {
      const int group = threadIdx.x / 8 % groups, rest = threadIdx.x / (8 * groups), part = rest % parts;
      const int quad = rest / parts * 8 + threadIdx.x % 8, from = rank * share + quad * 4;
      const Histogram* h = cluster.map_shared_rank(&s.histogram, (part * groups + group + rank) % ctas);
      uint64_t mass[4] = {};
      uint32_t count[4] = {};
      for (int c = 0; c < copies; c++) {
        if (MASS) {
          const uint4 high = *reinterpret_cast<const uint4*>(&h->high[c][from]);
          const uint4 low = *reinterpret_cast<const uint4*>(&h->low[c][from]);
          mass[0] += join(high.x, low.x), mass[1] += join(high.y, low.y);
          mass[2] += join(high.z, low.z), mass[3] += join(high.w, low.w);
        }
        const uint4 number = *reinterpret_cast<const uint4*>(&h->count[c][from]);
        count[0] += number.x, count[1] += number.y, count[2] += number.z, count[3] += number.w;
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        for (int o = 8; o < 8 * groups; o *= 2) {
          if (MASS) mass[n] += __shfl_xor_sync(~0u, mass[n], o);
          count[n] += __shfl_xor_sync(~0u, count[n], o);
        }
        if (group == 0) {
          s.mass[part * share + quad * 4 + n] = mass[n];
          s.count[part * share + quad * 4 + n] = count[n];
        }
      }
    }
    __syncthreads();
    for (int n = threadIdx.x; parts > 1 && n < share; n += THREADS) {
      uint64_t mass = s.mass[n];
      uint32_t count = s.count[n];
#pragma unroll 3
      for (int part = 1; part < parts; part++) mass += s.mass[part * share + n], count += s.count[part * share + n];
      s.mass[n] = mass, s.count[n] = count;
    }
    __syncthreads();
    Word sums{0, 0};
    if (warp == 0) {
      const int own = share / 32;
#pragma unroll 4
      for (int n = lane * own; n < (lane + 1) * own; n++) sums.a += s.mass[n], sums.b += s.count[n];
    }
    return sums;
  }

  // Finds the first bucket for which enough(mass, count) holds. Called by warp 0; the CTA with that bucket in its share
  // sends it to all CTAs. shares: the CTAs' sums, one per lane; own: the result of `merge`.
  template <class Enough>
  __device__ void find(Word shares, Word own, uint64_t mass, uint32_t count, Enough enough) {
    const uint64_t masses = scan(shares.a, lane), counts = scan(shares.b, lane);
    const uint32_t reached = __ballot_sync(~0u, lane < ctas && enough(mass + masses, count + counts));
    const int owner = reached ? __ffs(reached) - 1 : 0;
    if (rank != owner) return;
    Found found{mass, count, 0, 0, reached == 0};
    if (reached) {
      mass += __shfl_sync(~0u, masses - shares.a, owner);
      count += __shfl_sync(~0u, counts - shares.b, owner);
      const uint64_t upto = scan(own.a, lane), number = scan(own.b, lane);
      const int holder = __ffs(__ballot_sync(~0u, enough(mass + upto, count + number))) - 1;
      if (lane == holder) {
        mass += upto - own.a, count += number - own.b;
        const int each = BUCKETS / ctas / 32, end = (lane + 1) * each - 1;
        int n = lane * each;
        for (; n < end && !enough(mass + s.mass[n], count + s.count[n]); n++) mass += s.mass[n], count += s.count[n];
        found = Found{mass, count, static_cast<uint32_t>(rank * (BUCKETS / ctas) + n), s.count[n], 0};
      }
      found.mass = __shfl_sync(~0u, found.mass, holder);
      found.count = __shfl_sync(~0u, found.count, holder);
      found.bucket = __shfl_sync(~0u, found.bucket, holder);
      found.inside = __shfl_sync(~0u, found.inside, holder);
    }
    if (lane < ctas) *cluster.map_shared_rank(&s.found, lane) = found;
  }

  // The smallest cut of the distances up to `last` with `k` of them, or (MASS) with `share` of their weight.
  template <bool MASS>
  __device__ Cut select(uint32_t last, uint32_t k, double share) {
    uint32_t low = NEAR, high = last, count = 0;
    uint64_t mass = 0;
    double goal = 0;
    for (bool first = true;; first = false) {
      const int shift = high > low ? max(0, 32 - BITS - __clz(high - low)) : 0;
      tally<MASS>(low, high, shift, first);
      cluster.sync();
      const Word own = merge<MASS>(), shares = exchange(Word{sum(own.a), sum(own.b)});
      clear();
      if (first) goal = share * static_cast<double>(sum(shares.a));
      if (warp == 0) {
        find(shares, own, mass, count,
             [=](uint64_t m, uint64_t c) { return MASS ? static_cast<double>(m) >= goal : c >= k; });
      }
      cluster.sync();
      const Found found = s.found;
      if (found.none) return Cut{last, 1, 1};  // fewer than k have a weight above 0
      mass = found.mass, count = found.count;
      const uint32_t end = low + ((found.bucket + 1) << shift) - 1;
      low = first && found.bucket == 0 ? 0 : low + (found.bucket << shift);
      high = min(high, end);
      if (found.inside == 1) return Cut{high, 1, 1};
      if (shift > 0 || low < high) continue;
      uint32_t ties = k - count;
      if (MASS) {
        const uint2 w = split(weigh(low));
        const uint64_t weight = join(w.x, w.y);
        uint32_t most = found.inside;
        for (ties = 1; ties < most;) {
          const uint32_t middle = (ties + most) / 2;
          if (static_cast<double>(mass + middle * weight) >= goal) {
            most = middle;
          } else {
            ties = middle + 1;
          }
        }
      }
      return Cut{high, ties, found.inside};
    }
  }

  // Removes numbers that equal the bound, except the first `ties`.
  __device__ void keep_ties(const Cut& cut) {
    uint32_t here = 0;
    for (int i = 0; i < each; i++) here += __popc(__ballot_sync(~0u, distances[i * 32 + lane] == cut.bound));
    if (lane == 0) s.flags[warp] = here;
    __syncthreads();
    const Word counts = exchange(Word{__reduce_add_sync(~0u, lane < WARPS ? s.flags[lane] : 0), 0});
    uint32_t before = __reduce_add_sync(~0u, lane < rank ? static_cast<uint32_t>(counts.a) : 0) +
                      __reduce_add_sync(~0u, lane < warp ? s.flags[lane] : 0);
    for (int i = 0; i < each; i++) {
      const bool equal = distances[i * 32 + lane] == cut.bound;
      const uint32_t group = __ballot_sync(~0u, equal);
      if (equal && before + __popc(group & ((1u << lane) - 1)) >= cut.ties) distances[i * 32 + lane] = OUT;
      before += __popc(group);
    }
    __syncthreads();  // `flags` may be written again
  }

  // The distance's weight if its token is kept, else 0.
  __device__ __forceinline__ float kept(int i, uint32_t last, float least) const {
    const uint32_t d = distances[i * 32 + lane];
    if (!__any_sync(~0u, d <= last)) return 0;
    const float w = weigh(d);
    return d <= last && w >= least ? w : 0;
  }

  // The id that is sampled, in one lane; -1 in all others.
  __device__ int draw(uint32_t last, float least, double u) {
    float highs = 0, lows = 0;  // exact: below 2^24
#pragma unroll 2
    for (int i = 0; i < each; i++) {
      const float2 w = halves(kept(i, last, least));
      highs += w.x, lows += w.y;
    }
    const uint32_t high = __reduce_add_sync(~0u, static_cast<uint32_t>(highs));
    const uint32_t low = __reduce_add_sync(~0u, static_cast<uint32_t>(lows));
    if (lane == 0) s.warps[warp] = join(high, low);
    __syncthreads();
    const uint64_t own = lane < WARPS ? s.warps[lane] : 0, upto = scan(own, lane);
    const Word masses = exchange(Word{__shfl_sync(~0u, upto, 31), 0});
    const uint64_t until = scan(masses.a, lane), total = __shfl_sync(~0u, until, 31);
    const uint64_t goal = min(static_cast<uint64_t>(__dmul_rn(u, static_cast<double>(total))), total - 1);
    uint64_t reached = __shfl_sync(~0u, until - masses.a, rank) + __shfl_sync(~0u, upto - own, warp);
    if (goal < reached || goal >= reached + __shfl_sync(~0u, own, warp)) return -1;
    for (int i = 0; i < each; i++) {
      const uint2 w = split(kept(i, last, least));
      const uint64_t sum = join(__reduce_add_sync(~0u, w.x), __reduce_add_sync(~0u, w.y));
      if (goal < reached + sum) {
        const uint64_t mine = join(w.x, w.y), after = reached + scan(mine, lane);
        return goal < after && goal >= after - mine ? ((rank * WARPS + warp) * each + i) * 32 + lane : -1;
      }
      reached += sum;
    }
    return -1;
  }
};

template <bool GREEDY>
__global__ __launch_bounds__(THREADS) void sample_kernel(Args a) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  cg::cluster_group cluster = cg::this_cluster();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ctas = cluster.num_blocks(), rank = cluster.block_rank(), row = blockIdx.x / ctas;
  uint32_t* distances = reinterpret_cast<uint32_t*>(memory + sizeof(Shared)) + warp * a.each * 32;
  Row work{s, distances, cluster, a.each, a.each > FULL ? COPIES : 1, warp, lane, rank, ctas, 0};
  if (!GREEDY) work.clear();
  cluster.barrier_arrive();
  let_successor_start();
  wait_for_predecessor();

  const float* from = a.logits + static_cast<int64_t>(row) * a.V;
  const int begin = (rank * WARPS + warp) * a.each * 32 + lane;
  float best = -INFINITE;
  int at = a.V;
  bool broken = false;
  for (int i = 0; i < a.each; i += BATCH) {
    float x[BATCH];
#pragma unroll
    for (int n = 0; n < BATCH; n++) {
      const int id = begin + (i + n) * 32;
      x[n] = i + n < a.each && id < a.V ? __ldcg(from + id) : -INFINITE;
    }
#pragma unroll
    for (int n = 0; n < BATCH; n++) {
      broken |= !(x[n] < INFINITE);
      if (x[n] > best) best = x[n], at = begin + (i + n) * 32;
      if (!GREEDY && i + n < a.each) distances[(i + n) * 32 + lane] = __float_as_uint(x[n]);
    }
  }
  uint32_t height = __reduce_max_sync(~0u, ordered(best));
  uint32_t first = __reduce_min_sync(~0u, ordered(best) == height ? at : a.V);
  broken = __any_sync(~0u, broken);
  if (lane == 0) s.warps[warp] = static_cast<uint64_t>(height) << 32 | first, s.flags[warp] = broken;
  __syncthreads();
  cluster.barrier_wait();  // every CTA of the row has started, so its shared memory may be written
  uint64_t mine = s.warps[lane % WARPS];
  height = __reduce_max_sync(~0u, static_cast<uint32_t>(mine >> 32));
  first = __reduce_min_sync(~0u, mine >> 32 == height ? static_cast<uint32_t>(mine) : a.V);
  broken = __any_sync(~0u, s.flags[lane % WARPS]);
  const Word word = work.exchange(Word{static_cast<uint64_t>(height) << 32 | first, broken});
  height = __reduce_max_sync(~0u, static_cast<uint32_t>(word.a >> 32));
  first = __reduce_min_sync(~0u, lane < ctas && word.a >> 32 == height ? static_cast<uint32_t>(word.a) : a.V);
  broken = __any_sync(~0u, word.b) || first == a.V;

  const float temperature = GREEDY ? 0.0f : a.temperature[row];
  if (GREEDY || broken || temperature == 0) {
    if (rank == 0 && threadIdx.x == 0) a.ids[row] = broken ? -1 : static_cast<int>(first);
    return;
  }
  const float largest = unordered(height), inverse = fminf(__fdiv_rn(1.0f, temperature), 3.40282347e38f);
#pragma unroll 2
  for (int i = 0; i < a.each; i++) {
    const float z = __fmul_rn(__fsub_rn(__uint_as_float(distances[i * 32 + lane]), largest), inverse);
    const uint32_t d = __float_as_uint(fabsf(z));
    distances[i * 32 + lane] = d <= FAR ? d : OUT;
  }
  uint32_t last = FAR;
  const int k = a.top_k[row];
  if (k > 0 && k < a.V) {
    const Cut cut = work.select<false>(last, k, 0);
    if (cut.ties < cut.equal) work.keep_ties(cut);
    last = cut.bound;
  }
  if (a.top_p[row] < 1) {
    const Cut cut = work.select<true>(last, 0, a.top_p[row]);
    if (cut.ties < cut.equal) work.keep_ties(cut);
    last = cut.bound;
  }
  const float least = ceilf(a.min_p[row] * (1ll << ONE));  // exact: floats with a fraction are below 2^24
  const int id = work.draw(last, least, a.u[row]);
  if (id >= 0) a.ids[row] = id;
  // The last exchange was a barrier of the cluster: no CTA reads another's shared memory after it, so CTAs may end.
}

int start(void (*kernel)(Args), Args a, int64_t S, bool greedy, int most, void* stream) {
  int ctas = 1;
  while (ctas < most && a.V > ctas * FEW) ctas *= 2;
  a.each = (a.V + ctas * THREADS - 1) / (ctas * THREADS);
  if (a.each > MOST_EACH) return cudaErrorInvalidValue;
  if (ctas > 8) {
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (e != cudaSuccess) return e;
  }
  const size_t shared = sizeof(Shared) + (greedy ? 0 : sizeof(uint32_t) * a.each * THREADS);
  return launch(kernel, dim3(S * ctas), dim3(THREADS), shared, stream, ctas, a);
}

}  // namespace

// most: CTAs per row, at most: 1, 2, 4, 8, or 16, which not every Hopper GPU can place. V is at most most * 30,720.
API int sample(const void* logits, const void* temperature, const void* top_k, const void* top_p, const void* min_p,
               const void* u, void* ids, int64_t S, int64_t V, int64_t most, void* stream) {
  Args a{static_cast<const float*>(logits), static_cast<const float*>(temperature), static_cast<const int*>(top_k),
         static_cast<const float*>(top_p),  static_cast<const float*>(min_p),       static_cast<const double*>(u),
         static_cast<int64_t*>(ids),        static_cast<int>(V),                    0};
  return start(sample_kernel<false>, a, S, false, static_cast<int>(most), stream);
}

API int argmax(const void* logits, void* ids, int64_t S, int64_t V, int64_t most, void* stream) {
  Args a{static_cast<const float*>(logits), nullptr, nullptr, nullptr, nullptr, nullptr, static_cast<int64_t*>(ids),
         static_cast<int>(V), 0};
  return start(sample_kernel<true>, a, S, true, static_cast<int>(most), stream);
}

// How many CTAs a row may have here: 16 if this GPU can place them, else 8.
API int widest_row() {
  cudaFuncSetAttribute(sample_kernel<false>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  const size_t shared = sizeof(Shared) + sizeof(uint32_t) * MOST_EACH * THREADS;
  cudaFuncSetAttribute(sample_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = MOST_CTAS;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(MOST_CTAS);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t e = cudaOccupancyMaxActiveClusters(&clusters, sample_kernel<false>, &config);
  return e == cudaSuccess && clusters > 0 ? MOST_CTAS : 8;
}
