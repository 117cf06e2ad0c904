// Routed experts for some hundred tokens: a stream of their weights at the rate of the memory. Contract in moe_int4.py.
//
// Two launches of one kernel: gate_up (+ SiLU) writes h, down writes rows of y. A tile is 16 rows of weights: the rows
// of the tensor core's A, whose columns of B are up to 8 tokens. (gate_up: 8 gate rows and their 8 up rows, so that one
// thread finds both.) A slot is 128 bytes of each of a tile's rows, 256 k; the last slot of a row may be half full. KS
// warps split the k of a tile and their sums meet in shared memory; RT tiles make a unit. Every warp keeps its own ring
// of slots filled by asynchronous copies, across units.
//
// INT4: ldmatrix hands lane (g, t) word t of a group's 16 bytes in row g, so the two products of a group see one scale
// per row, applied to their fp32 result: exact. A nibble needs no conversion: masked out of its word it is, read as
// bf16, the number q * 2^-133, and 16 q * 2^-133 if it sits four bits higher (all integers below 256 are evenly spaced
// there). The activations of the latter are held divided by 16, all of them times 2^80: exact for magnitudes from 2^-73
// to 2^47. The sums of a group start at -8 times the sum of its activations, which takes the offset of q out.
//
// Work: the routed pairs are grouped by expert into segments of a few pairs, and every CTA takes a contiguous range of
// (segment, unit). Each CTA counts the ids itself.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int COLUMNS = 8;  // of B: the most pairs of a segment
constexpr int LINE = 128;   // bytes of a row in a slot; half of it is a piece
constexpr int SLOT = 16 * LINE;
constexpr int CHUNK = 4;                     // slots whose scales are copied together: 64 bytes of a row
constexpr int SCALE_LINE = CHUNK * 16 + 16;  // padded: eight rows meet no bank twice
constexpr int SCALES = 16 * SCALE_LINE;
constexpr int MAX_EXPERTS = 1024;
constexpr int MAX_SEGMENTS = 24;  // that one CTA may touch
constexpr uint32_t LOW = 0x000f000f, HIGH = 0x00f000f0;
constexpr float RAISED = 0x1p80f;  // staged activations
constexpr float UNIT = 0x1p-133f;  // the nibble 1
constexpr float RESULT = 0x1p53f;  // 1 / (RAISED * UNIT)

struct Matrix {
  const uint8_t* data;
  const uint8_t* scale;  // bf16, 8 bytes for a piece
  int64_t expert;        // rows of an expert
  int64_t second;        // rows between a tile's row 0 and its row 8
  int pieces;            // of a row
  int tiles;             // of an expert
};

struct Args {
  Matrix routed;
  const bf16* in;        // gate_up: x [T, K]; down: h [T k, K]
  const int* ids;        // [T, k]
  const float* weights;  // [T, k]; down only
  void* out;             // gate_up: h [T k, 8 tiles] bf16; down: y [T, P, 16 tiles] float
  int T, k, E, K, P;
  int columns;        // pairs of a segment
  int scale_buffers;  // chunks of a warp, in turn
};

struct Segment {
  int expert, count;
  uint16_t pair[COLUMNS];
};

struct Range {
  int first, end;
};

__device__ __forceinline__ void copy8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

template <bool GATE_UP, int WARPS, int KS, int N>
struct Kernel {
  static constexpr int THREADS = WARPS * 32;
  static constexpr int RT = WARPS / KS;
  static constexpr int ROWS = GATE_UP ? 8 : 16;  // results of a tile

  // What a CTA knows of the routing.
  struct Plan {
    Segment segments[MAX_SEGMENTS];
    Range units;  // of all (segment, unit)
    int warp_total[WARPS];
  };

  // Groups pairs by expert, cuts them into segments, and describes those that this CTA's units touch.
  static __device__ void plan(const Args& a, Plan& p, uint32_t* counts) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, pairs = a.T * a.k;
    for (int n = tid; n < pairs; n += THREADS) {
      const int e = a.ids[n];
      if (static_cast<unsigned>(e) < static_cast<unsigned>(a.E)) atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    // Segments before each expert.
    const int share = divide_up(a.E, THREADS), begin = min(tid * share, a.E), end = min(begin + share, a.E);
    int own = 0;
    for (int e = begin; e < end; e++) own += divide_up(counts[e], a.columns);
    int before = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int v = __shfl_up_sync(~0u, before, d);
      if (lane >= d) before += v;
    }
    if (lane == 31) p.warp_total[warp] = before;
    before -= own;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < WARPS; w++) {
      const int v = p.warp_total[w];
      if (w < warp) before += v;
      total += v;
    }

    const int per_expert = divide_up(a.routed.tiles, RT), all = total * per_expert;
    const Range units = own_units(all);
    const int first = units.first / per_expert;
    const int last = units.first < units.end ? (units.end - 1) / per_expert : first - 1;
    for (int e = begin; e < end; e++) {
      const int mine = divide_up(counts[e], a.columns);
      for (int s = max(before, first); s < min(before + mine, last + 1); s++) {
        // `count` holds the segment's number within the expert until its pairs are found.
        p.segments[s - first].expert = e;
        p.segments[s - first].count = s - before;
      }
      before += mine;
    }
    if (tid == 0) p.units = units;
    __syncthreads();
    for (int s = warp; s <= last - first; s += WARPS) {
      Segment& segment = p.segments[s];
      const int e = segment.expert, skip = segment.count * a.columns;
      int seen = 0;
      for (int n = 0; n < pairs; n += 32) {
        const bool hit = n + lane < pairs && a.ids[n + lane] == e;
        const unsigned found = __ballot_sync(~0u, hit);
        const int at = seen + __popc(found & ((1u << lane) - 1)) - skip;
        if (hit && at >= 0 && at < a.columns) segment.pair[at] = n + lane;
        seen += __popc(found);
      }
      __syncwarp();
      if (lane == 0) segment.count = min(seen - skip, a.columns);
    }
    __syncthreads();
  }

  // An equal part of all.
  static __device__ Range own_units(int all) {
    const int64_t G = gridDim.x, c = blockIdx.x;
    return {static_cast<int>(c * all / G), static_cast<int>((c + 1) * all / G)};
  }

  // The activations of a segment's columns, in the order in which the nibbles of a word come, and what the sums of
  // every group of 32 k start at.
  static __device__ void stage(const Args& a, const Segment& segment, uint8_t* xs, int pitch, float* starts) {
    const int pieces = a.K / 8;
    for (int c = 0; c < segment.count; c++) {
      const bf16* row = a.in + static_cast<int64_t>(source(a, segment.pair[c])) * a.K;
#pragma unroll 4
      for (int first = 0; first < pieces; first += THREADS) {
        const int n = first + threadIdx.x;
        float sum = 0;
        if (n < pieces) {
          uint4 v = *reinterpret_cast<const uint4*>(row + n * 8);
          float2 x01 = widen(v.x), x23 = widen(v.y), x45 = widen(v.z), x67 = widen(v.w);
          constexpr float high = RAISED / 16;
          v.x = narrow(x01.x * RAISED, x45.x * RAISED);
          v.y = narrow(x23.x * RAISED, x67.x * RAISED);
          v.z = narrow(x01.y * high, x45.y * high);
          v.w = narrow(x23.y * high, x67.y * high);
          *reinterpret_cast<uint4*>(xs + c * pitch + n * 16) = v;
          sum = ((x01.x + x01.y) + (x23.x + x23.y)) + ((x45.x + x45.y) + (x67.x + x67.y));
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (n < pieces && n % 4 == 0) starts[n / 4 * COLUMNS + c] = sum * (-8 * UNIT * RAISED);
      }
    }
    __syncthreads();
  }

  static __device__ __forceinline__ int source(const Args& a, int pair) { return GATE_UP ? pair / a.k : pair; }

  static __device__ bool same_rows(const Args& a, const Segment& p, const Segment& q) {
    if (p.count != q.count) return false;
    for (int c = 0; c < p.count; c++) {
      if (source(a, p.pair[c]) != source(a, q.pair[c])) return false;
    }
    return true;
  }

  static __device__ void run(const Args& a) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Plan p;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int ks = warp % KS, rt = warp / KS, pitch = a.K * 2 + 64;
    const int groups = a.K / 32, scale_ring = a.scale_buffers * SCALES;
    float* sums = reinterpret_cast<float*>(memory + WARPS * N * SLOT);
    float* starts = sums + WARPS * 128;
    uint8_t* scales = reinterpret_cast<uint8_t*>(starts + groups * COLUMNS) + warp * scale_ring;
    uint8_t* xs = reinterpret_cast<uint8_t*>(starts + groups * COLUMNS) + WARPS * scale_ring;
    uint32_t* counts = reinterpret_cast<uint32_t*>(xs);  // until the first activations are staged
    uint8_t* ring = memory + warp * N * SLOT;

    // Slots of a row are dealt to KS warps.
    auto share = [&](const Matrix& m, int n) { return n * divide_up(m.pieces, 2) / KS; };
    const int first_routed = share(a.routed, ks), slots_routed = share(a.routed, ks + 1) - first_routed;
    const int per_expert = divide_up(a.routed.tiles, RT);

    // The copying side of the ring.
    int units_left = 0, left = 0, segment_of = 0, unit_of = 0;
    int into = 0, scales_into = 0;  // bytes into the warp's rings
    int slot_of = 0, filled = 0;    // the next slot within the unit; pieces of a row before it
    // Lanes copy rows line, line + 4, + 8, + 12 of a tile, 16 bytes each. Chunks of a row change places so that neither
    // the eight rows of a matrix nor two rows of 64 bytes meet a bank twice.
    const int line = lane / 8, chunk = lane % 8;
    auto swizzle = [](int row) { return row % 2 * 4 + row % 8 / 2; };
    const int place = line * LINE, even = (chunk ^ swizzle(line)) * 16, odd = (chunk ^ swizzle(line + 4)) * 16;
    const uint8_t *upper = nullptr, *lower = nullptr, *scale_upper = nullptr;
    const int width = a.routed.pieces, four = width * (4 * LINE / 2);  // pieces of a row; bytes of four
    auto open = [&] {
      const Matrix& m = a.routed;
      const int tile = unit_of * RT + rt, expert = p.segments[segment_of].expert;
      units_left--;
      if (++unit_of == per_expert) {
        unit_of = 0;
        segment_of++;
      }
      if (tile >= m.tiles || slots_routed == 0) return;
      left = slots_routed;
      filled = first_routed * 2;
      const int64_t bytes = static_cast<int64_t>(width) * (LINE / 2), row = expert * m.expert + tile * ROWS;
      upper = m.data + (row + line) * bytes + first_routed * LINE + chunk * 16;
      lower = upper + m.second * bytes;
      slot_of = 0;
      scale_upper = m.scale + ((row + line) * width + first_routed * 2 + chunk) * 8;
    };
    // 8 bytes for every piece of a row.
    auto copy_scales = [&] {
      const uint8_t* scale_lower = scale_upper + a.routed.second * width * 8;
      uint8_t* to = scales + scales_into + line * SCALE_LINE + chunk * 8;
      if (chunk < min(left * 2, width - filled)) {
        copy8(to, scale_upper);
        copy8(to + 4 * SCALE_LINE, scale_upper + four / 8);
        copy8(to + 8 * SCALE_LINE, scale_lower);
        copy8(to + 12 * SCALE_LINE, scale_lower + four / 8);
      }
      scale_upper += CHUNK * 16;
      scales_into = scales_into + SCALES == scale_ring ? 0 : scales_into + SCALES;
    };
    auto ready = [&] {
      while (left == 0 && units_left > 0) open();
      return left > 0;
    };
    auto issue = [&] {
      if (ready()) {
        if (slot_of++ % CHUNK == 0) copy_scales();
        if (chunk < 4 || filled + 1 < width) {
          uint8_t* to = ring + place + into;
          copy16(to + even, upper);
          copy16(to + odd + 4 * LINE, upper + four);
          copy16(to + even + 8 * LINE, lower);
          copy16(to + odd + 12 * LINE, lower + four);
        }
        upper += LINE;
        lower += LINE;
        filled += 2;
        left--;
      }
      copies_commit();
      into = into + SLOT == N * SLOT ? 0 : into + SLOT;
    };

    for (int e = tid; e < a.E; e += THREADS) counts[e] = 0;
    let_successor_start();
    __syncthreads();
    wait_for_predecessor();
    plan(a, p, counts);
    const Range units = p.units;
    units_left = units.end - units.first;
    unit_of = units.first % per_expert;
    for (int n = 0; n < N - 1; n++) issue();

    // The consuming side.
    int from = 0;
    auto arrive = [&] {
      copies_wait<N - 2>();
      __syncwarp();
      issue();
      const int slot = from;
      from = from + SLOT == N * SLOT ? 0 : from + SLOT;
      return slot;
    };
    // Sums of a tile over its KS warps, which alone meet here; result(column, row, value or gate, up).
    auto meet = [&] {
      if constexpr (KS == 1) {
        __syncwarp();
      } else {
        asm volatile("bar.sync %0, %1;" ::"r"(rt + 1), "n"(KS * 32) : "memory");
      }
    };
    auto finish = [&](const float (&acc)[4], int columns, auto result) {
      meet();
      float* mine = sums + warp * 128;
      *reinterpret_cast<float2*>(mine + g * 8 + 2 * t) = make_float2(acc[0], acc[1]);
      *reinterpret_cast<float2*>(mine + (g + 8) * 8 + 2 * t) = make_float2(acc[2], acc[3]);
      meet();
      for (int n = ks * 32 + lane; n < columns * ROWS; n += KS * 32) {
        const int row = n % ROWS, column = n / ROWS;
        const float* at = sums + rt * KS * 128 + row * 8 + column;
        float v = 0, up = 0;
#pragma unroll
        for (int s = 0; s < KS; s++) {
          v += at[s * 128];
          if (GATE_UP) up += at[s * 128 + 64];
        }
        result(column, row, v, up);
      }
    };

    const uint32_t matrices =
        shared_address(ring) + (lane % 8 + lane / 8 % 2 * 8) * LINE + (lane / 16 ^ swizzle(lane)) * 16;
    int scales_from = 0, staged = -1, s = 0, unit = units.first % per_expert;
    for (int u = units.first; u < units.end; u++, unit++) {
      if (unit == per_expert) {
        unit = 0;
        s++;
      }
      const Segment& segment = p.segments[s];
      if (staged != s) {
        if (staged < 0 || !same_rows(a, segment, p.segments[staged])) {
          __syncthreads();  // every warp is done with the activations before
          stage(a, segment, xs, pitch, starts);
        }
        staged = s;
      }
      float acc[4] = {};
      const int count = unit * RT + rt < a.routed.tiles ? slots_routed : 0;
      const int last = a.routed.pieces - first_routed * 2;
      const uint8_t* x = xs + min(g, segment.count - 1) * pitch + first_routed * 512 + t * 16;
      const float* start = starts + first_routed * 8 * COLUMNS + 2 * t;
      const uint8_t* scale = nullptr;
      for (int n = 0; n < count; n++) {
        const uint32_t slot = matrices + arrive();
        if (n % CHUNK == 0) {
          scale = scales + scales_from + g * SCALE_LINE;
          scales_from = scales_from + SCALES == scale_ring ? 0 : scales_from + SCALES;
        }
        const uint4 above = *reinterpret_cast<const uint4*>(scale);
        const uint4 below = *reinterpret_cast<const uint4*>(scale + 8 * SCALE_LINE);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (h == 1 && n * 2 + 1 >= last) break;
#pragma unroll
          for (int pair = 0; pair < 2; pair++) {
            uint32_t w[4];
            load_matrices(w, slot ^ (h * 64 + pair * 32));
            const uint32_t upper_scales = (&above.x)[h * 2 + pair], lower_scales = (&below.x)[h * 2 + pair];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int group = h * 4 + pair * 2 + half;
              const uint4 b = *reinterpret_cast<const uint4*>(x + group * 64);
              const float2 c = *reinterpret_cast<const float2*>(start + group * COLUMNS);
              const uint32_t v = w[half * 2], z = w[half * 2 + 1], v8 = v >> 8, z8 = z >> 8;
              const uint32_t low[4] = {v & LOW, z & LOW, v8 & LOW, z8 & LOW};
              const uint32_t high[4] = {v & HIGH, z & HIGH, v8 & HIGH, z8 & HIGH};
              float d[4] = {c.x, c.y, c.x, c.y};
              mma(d, low, b.x, b.y, bf16());
              mma(d, high, b.z, b.w, bf16());
              const float f = half ? high_half(upper_scales) : low_half(upper_scales);
              const float k = half ? high_half(lower_scales) : low_half(lower_scales);
              acc[0] += f * d[0];
              acc[1] += f * d[1];
              acc[2] += k * d[2];
              acc[3] += k * d[3];
            }
          }
        }
        scale += 16;
        x += 512;
        start += 8 * COLUMNS;
      }
      finish(acc, segment.count, [&](int column, int row, float v, float up) {
        const int pair = segment.pair[column], at = unit * RT + rt;
        if (at >= a.routed.tiles) return;
        v *= RESULT;
        if (GATE_UP) {
          static_cast<bf16*>(a.out)[static_cast<int64_t>(pair) * a.routed.tiles * ROWS + at * ROWS + row] =
              __float2bfloat16(v / (1 + __expf(-v)) * (up * RESULT));
        } else {
          const int64_t line = static_cast<int64_t>(pair / a.k) * a.P + pair % a.k;
          static_cast<float*>(a.out)[line * a.routed.tiles * ROWS + at * ROWS + row] = v * a.weights[pair];
        }
      });
    }
  }
};

template <bool GATE_UP, int WARPS, int KS, int N>
__global__ __launch_bounds__(WARPS * 32, WARPS == 8 ? 2 : 1) void moe_int4_mma_cpasync_kernel(
    const __grid_constant__ Args a) {
  Kernel<GATE_UP, WARPS, KS, N>::run(a);
}

template <bool GATE_UP, int WARPS, int KS, int N>
int start(Args a, int sms, void* stream) {
  constexpr int FIXED = 2048;  // more than the kernel's own shared memory and what the driver takes
  constexpr int MOST = WARPS == 8 ? 114 * 1024 - FIXED : 227 * 1024 - FIXED;
  const int ctas = WARPS == 8 ? 2 * sms : sms, pairs = a.T * a.k, slots = (a.routed.pieces + 1) / 2;
  // The ring runs N - 1 slots ahead: over how many chunks, the shortest counts.
  auto shortest = [](int n) { return n <= CHUNK ? max(n, 1) : n % CHUNK == 0 ? CHUNK : n % CHUNK; };
  const int least = min(shortest(slots / KS), shortest((slots + KS - 1) / KS));
  a.scale_buffers = (N - 1 + least - 1) / least + 1;
  int shared = 0;
  auto fits = [&] {
    const int staged = max(a.columns * (a.K * 2 + 64), a.E * 4);
    shared = WARPS * (N * SLOT + 512 + a.scale_buffers * SCALES) + a.K / 32 * COLUMNS * 4 + staged;
    return shared <= MOST;
  };
  if constexpr (N > 2) {
    if (!fits()) return start<GATE_UP, WARPS, KS, N - 1>(a, sms, stream);
  }
  while (!fits() && a.columns > 1) a.columns--;
  const int segments = min(pairs, a.E + pairs / a.columns);
  if (!fits() || a.E > MAX_EXPERTS || 2 * segments / ctas + 3 > MAX_SEGMENTS) return -1;
  return launch(moe_int4_mma_cpasync_kernel<GATE_UP, WARPS, KS, N>, dim3(ctas), dim3(WARPS * 32), shared, stream, 1, a);
}

Matrix matrix(const void* data, const void* scale, int64_t expert, int64_t second, int64_t pieces, int64_t tiles) {
  return {static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(scale), expert, second,
          static_cast<int>(pieces), static_cast<int>(tiles)};
}

}  // namespace

// h [T k, I] from x [T, D]. Returns -1 for sizes it cannot take.
API int moe_int4_mma_cpasync_gate_up(const void* x, const void* ids, const void* packed, const void* scale, void* h, int64_t T,
                              int64_t k, int64_t E, int64_t D, int64_t I, int64_t sms, void* stream) {
  Args a = {};
  a.routed = matrix(packed, scale, 2 * I, I, D / 128, I / 8);
  a.in = static_cast<const bf16*>(x);
  a.ids = static_cast<const int*>(ids);
  a.out = h;
  a.T = static_cast<int>(T), a.k = static_cast<int>(k), a.E = static_cast<int>(E), a.K = static_cast<int>(D);
  a.columns = static_cast<int>(T < COLUMNS ? T : COLUMNS);
  return start<true, 16, 4, 3>(a, sms, stream);
}

// y [T, P, D] from h; rows of y beyond k are left alone.
API int moe_int4_mma_cpasync_down(const void* h, const void* ids, const void* weights, const void* packed, const void* scale,
                           void* y, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I, int64_t P, int64_t sms,
                           void* stream) {
  Args a = {};
  a.routed = matrix(packed, scale, D, 8, I / 128, D / 16);
  a.in = static_cast<const bf16*>(h);
  a.ids = static_cast<const int*>(ids);
  a.weights = static_cast<const float*>(weights);
  a.out = y;
  a.T = static_cast<int>(T), a.k = static_cast<int>(k), a.E = static_cast<int>(E), a.K = static_cast<int>(I);
  a.P = static_cast<int>(P);
  a.columns = static_cast<int>(T < COLUMNS ? T : COLUMNS);
  return start<false, 8, 2, 4>(a, sms, stream);
}
