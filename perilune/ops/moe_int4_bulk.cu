// The MoE block for one token, and for a few with compact scales or a shared expert in e4m3. Contract in moe_int4.py.
//
// Two launches of one kernel: gate_up (+ SiLU) writes h, down writes rows of y. A tile is 16 rows of weights: the rows
// of the tensor core's A, whose columns of B are up to 8 tokens. (gate_up: 8 gate rows and their 8 up rows, so that one
// thread finds both.) RT tiles make a unit. A slot of the CTA's ring is KS chunks of 128 bytes of each of a unit's
// rows: one box of a tensor map, or two. One warp does nothing but ask for slots; KS warps share the k of a tile, a
// chunk of the slot each, and their sums meet in shared memory. (Asking row by row kept the copying warp busier than
// the memory.)
//
// INT4: ldmatrix hands lane (g, t) word t of a group's 16 bytes in row g, so the two products of a group see one scale
// per row, applied to their fp32 result: exact. A nibble needs no conversion: masked out of its word it is, read as
// bf16, the number q * 2^-133, and 16 q * 2^-133 if it sits four bits higher (all integers below 256 are evenly spaced
// there). The activations of the latter are held divided by 16, all of them times 2^80: exact for magnitudes from 2^-73
// to 2^47. The sums of a group start at -8 times the sum of its activations, which takes the offset of q out. The
// shared expert's weights, bf16 or e4m3, meet activations in the same order.
//
// Work: the routed pairs are grouped by expert into segments of a few pairs, every CTA takes a contiguous range of
// (segment, unit), and units of the shared expert. The copying warp finds the segments. gate_up multiplies the shared
// expert while the router still chooses; down finds its segments before h is there.
#include "e4m3.cuh"
#include "tensor_map.cuh"

using namespace hopper;

namespace {

constexpr int COLUMNS = 8;  // of B: the most pairs of a segment
constexpr int MAX_SLOTS = 12;
constexpr int MAX_EXPERTS = 1024;
constexpr int MAX_SHARED = 16;  // tokens whose shared expert rides along
constexpr int MAX_SEGMENTS = 24;  // that one CTA may touch
constexpr uint32_t LOW = 0x000f000f, HIGH = 0x00f000f0;
constexpr float RAISED = 0x1p80f;  // staged activations
constexpr float UNIT = 0x1p-133f;  // the nibble 1
constexpr float RESULT = 0x1p53f;  // 1 / (RAISED * UNIT)

struct Matrix {
  const uint8_t* data;
  const uint8_t* scale;   // INT4: one for 32 k
  const uint8_t* factor;  // one for a row: bf16 of compact scales, float of e4m3 weights; else null
  int64_t expert;         // rows of an expert
  int64_t second;         // rows between a tile's row 0 and its row 8
  int row;                // bytes
  int tiles;              // of an expert; 0 if there is no such matrix
};

struct Args {
  Matrix routed, shared;
  const bf16* in;         // gate_up: x [T, K]; down: h [T k, K]
  const bf16* in_shared;  // [T, shared.row / 2]
  const int* ids;         // [T, k]
  const float* weights;   // [T, k]; down only
  void* out;              // gate_up: h [T k, 8 tiles] bf16; down: y [T, P, 16 tiles] float
  bf16* out_shared;       // gate_up: [T, 8 tiles]; down writes row P - 1 of y
  int T, k, E, K, P;
  int64_t routed_rows, shared_rows;
  int columns;        // pairs of a segment
  int chunk;          // bytes of a row that lie together in a slot: 128, or 64 if rows are no multiple of that
  int slots;          // of the ring
  int scale_buffers;  // units whose scales and factors are held
  int scale_row, scales, block;  // bytes: scales of a row, of a unit; scales and factors of a unit
  int pitch, stride;             // of staged columns: bytes; of the starts of their sums: floats
  int xs_bytes;                  // of staged activations
  int sums, starts, xs, held, counts;  // where they lie in shared memory, behind the ring
};

// The matrices as copied: chunks of 64 or 128 bytes of a row, rows, chunks of a row.
struct Maps {
  CUtensorMap routed, shared;
};

struct Segment {
  int expert, count;
  uint16_t pair[COLUMNS], row[COLUMNS];  // the row of the activations
  float weight[COLUMNS];  // down only
};

struct Range {
  int first, end;
};

struct Plan {
  Segment segments[MAX_SEGMENTS];
  Range units;  // of all (segment, unit)
};

__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__host__ __device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

template <bool GATE_UP, bool COMPACT, bool MANY, int KS, int RT, int CTAS>
struct Kernel {
  static constexpr int WARPS = KS * RT, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
  static constexpr int SHARE = 128, PIECE = KS * SHARE;  // bytes of a row in a slot: of a warp, of all
  static constexpr int UNIT_ROWS = 16 * RT, SLOT = UNIT_ROWS * PIECE;
  static constexpr int BOX_ROWS = GATE_UP ? UNIT_ROWS / 2 : UNIT_ROWS;  // rows that follow each other
  static constexpr int HALVES_OF_TOKENS = MANY ? 2 : 1;  // of the shared expert
  static constexpr int ROWS = GATE_UP ? 8 : 16;  // results of a tile

  // What a CTA has in shared memory.
  static __device__ __forceinline__ uint8_t* memory(int at) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    return bytes + at;
  }
  static __device__ __forceinline__ Plan& plan_of() {
    __shared__ Plan p;
    return p;
  }
  struct Barriers {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS], planned;
  };
  static __device__ __forceinline__ Barriers& barriers() {
    __shared__ Barriers b;
    return b;
  }

  // ---- which pairs this CTA works on: by one warp ----

  // Those that bring this CTA's bytes, its shared units counted, to an equal part of all bytes.
  static __device__ Range routed_units(const Args& a, int all) {
    // gate_up: who has no shared unit waits while the others multiply theirs, for the choice of experts.
    const int64_t G = gridDim.x, c = blockIdx.x, shared = a.shared.tiles / RT;
    const int64_t wide = a.shared.row, narrow = a.routed.row + a.scale_row;
    const int64_t bytes = shared * wide + all * narrow;
    // The equal part must hold a CTA's shared units, and may not be mostly theirs: MAX_SEGMENTS counts on it.
    if (bytes / G <= wide * ((shared + G - 1) / G) + 1 || shared * wide > bytes / 2 || (GATE_UP && shared <= G)) {
      return {static_cast<int>(c * all / G), static_cast<int>((c + 1) * all / G)};
    }
    auto bound = [&](int64_t n) {
      int64_t left = n * bytes / G - wide * (n * shared / G);
      return static_cast<int>(min(max((left + narrow / 2) / narrow, int64_t(0)), int64_t(all)));
    };
    return {bound(c), bound(c + 1)};
  }

  static __device__ void plan(const Args& a) {
    Plan& p = plan_of();
    uint32_t* counts = reinterpret_cast<uint32_t*>(memory(a.counts));
    const int lane = threadIdx.x % 32, pairs = a.T * a.k, per_expert = a.routed.tiles / RT;
    const unsigned below = (1u << lane) - 1;
    auto id_of = [&](int n) {
      const int e = n < pairs ? __ldcg(a.ids + n) : -1;
      return static_cast<unsigned>(e) < static_cast<unsigned>(a.E) ? e : -1;
    };
    if (a.T == 1 && pairs <= 32) {
      const int e = id_of(lane);
      const unsigned valid = __ballot_sync(~0u, e >= 0);
      const Range units = routed_units(a, __popc(valid) * per_expert);
      const int first = units.first / per_expert;
      const int last = units.first < units.end ? (units.end - 1) / per_expert : first - 1;
      const int s = __popc(valid & below);
      if (e >= 0 && s >= first && s <= last) {
        p.segments[s - first].expert = e;
        p.segments[s - first].count = 1;
        p.segments[s - first].pair[0] = lane;
        p.segments[s - first].row[0] = GATE_UP ? 0 : lane;
        if (!GATE_UP) p.segments[s - first].weight[0] = __ldcg(a.weights + lane);
      }
      if (lane == 0) p.units = units;
      __syncwarp();
      return;
    }
    for (int e = lane; e < a.E; e += 32) counts[e] = 0;
    __syncwarp();
    for (int n = lane; n < pairs; n += 32) {
      const int e = id_of(n);
      if (e >= 0) atomicAdd(&counts[e], 1);
    }
    __syncwarp();
    const int share = divide_up(a.E, 32), begin = min(lane * share, a.E), end = min(begin + share, a.E);
    int own = 0;
    for (int e = begin; e < end; e++) own += divide_up(counts[e], a.columns);
    int before = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int v = __shfl_up_sync(~0u, before, d);
      if (lane >= d) before += v;
    }
    const int total = __shfl_sync(~0u, before, 31);
    before -= own;
    const Range units = routed_units(a, total * per_expert);
    const int first = units.first / per_expert;
    const int last = units.first < units.end ? (units.end - 1) / per_expert : first - 1;
    // counts[e] becomes the column, counted over this CTA's segments, of the expert's next pair; far off if none is
    // ours.
    constexpr int NONE = -(1 << 20);
    for (int e = begin; e < end; e++) {
      const int count = counts[e], mine = divide_up(count, a.columns);
      for (int s = max(before, first); s < min(before + mine, last + 1); s++) {
        p.segments[s - first].expert = e;
        p.segments[s - first].count = min(a.columns, count - (s - before) * a.columns);
      }
      const bool ours = mine > 0 && before <= last && before + mine > first;
      counts[e] = ours ? (before - first) * a.columns : NONE;
      before += mine;
    }
    if (lane == 0) p.units = units;
    __syncwarp();
    const int held = (last - first + 1) * a.columns;
    for (int n = 0; n < pairs; n += 32) {
      const int e = id_of(n + lane);
      const int start = e >= 0 ? static_cast<int>(counts[e]) : NONE;
      const bool ours = start > NONE / 2;
      if (__any_sync(~0u, ours)) {
        const unsigned same = __match_any_sync(~0u, ours ? e : -1);
        if (ours) {
          const int at = start + __popc(same & below);
          if (at >= 0 && at < held) {
            Segment& segment = p.segments[at / a.columns];
            segment.pair[at % a.columns] = n + lane;
            segment.row[at % a.columns] = GATE_UP ? (n + lane) / a.k : n + lane;
            if (!GATE_UP) segment.weight[at % a.columns] = __ldcg(a.weights + n + lane);
          }
        }
        __syncwarp();
        if (ours && (same & below) == 0) counts[e] = start + __popc(same);
        __syncwarp();
      }
    }
  }

  // ---- the copying warp ----

  static __device__ void produce(const Args& a, const Maps& maps, Range shared_units) {
    const int lane = threadIdx.x % 32;
    int into = 0, phase = 1, buffer = 0;
    if (lane == 0 && a.shared.tiles > 0) prefetch_map(&maps.shared);
    if (lane == 1) prefetch_map(&maps.routed);
    auto copy = [&](const Matrix& w, const CUtensorMap& map, int expert, int unit) {
      const int slots = divide_up(w.row, PIECE);
      const int64_t first = expert * w.expert + static_cast<int64_t>(unit) * RT * ROWS;
      const int64_t second = GATE_UP ? w.second : UNIT_ROWS / 2;  // half of the unit's rows follow `first`, half that
      for (int n = 0; n < slots; n++) {
        uint64_t* barrier = &barriers().full[into];
        barrier_wait(&barriers().empty[into], phase);
        if (lane == 0) {
          const int scales = n == 0 && w.scale != nullptr ? a.scales : 0;
          const int factors = n == 0 && w.factor != nullptr ? UNIT_ROWS * (w.scale == nullptr ? 4 : 2) : 0;
          barrier_expect(barrier, SLOT + scales + factors);
          uint8_t* slot = memory(into * SLOT);
          const int row = static_cast<int>(first), chunk = n * (PIECE / a.chunk);
          tensor_load(slot, &map, 0, row, chunk, barrier);
          if (GATE_UP) tensor_load(slot + SLOT / 2, &map, 0, row + static_cast<int>(w.second), chunk, barrier);
          uint8_t* to = memory(a.held) + buffer * a.block;
          if (scales) {
            bulk_load(to, w.scale + first * a.scale_row, scales / 2, barrier);
            bulk_load(to + scales / 2, w.scale + (first + second) * a.scale_row, scales / 2, barrier);
          }
          if (factors) {
            const int each = factors / UNIT_ROWS;
            bulk_load(to + a.scales, w.factor + first * each, factors / 2, barrier);
            bulk_load(to + a.scales + factors / 2, w.factor + (first + second) * each, factors / 2, barrier);
          }
        }
        __syncwarp();
        if (++into == a.slots) into = 0, phase ^= 1;
      }
      if (++buffer == a.scale_buffers) buffer = 0;
    };
    auto decide = [&] {
      if (GATE_UP) {
        wait_for_predecessor();
        let_successor_start();  // not before: whoever starts after this kernel may take the ids as written
      }
      plan(a);
      if (lane == 0) barrier_arrive(&barriers().planned);
    };
    // down has its ids before its activations, gate_up those of the shared expert before its ids.
    if (!GATE_UP) {
      let_successor_start();
      decide();
    }
    for (int u = shared_units.first; u < shared_units.end; u++) copy(a.shared, maps.shared, 0, u);
    if (GATE_UP) decide();
    const Plan& p = plan_of();
    const int per_expert = a.routed.tiles / RT;
    int s = 0, unit = p.units.first % per_expert;
    for (int u = p.units.first; u < p.units.end; u++) {
      copy(a.routed, maps.routed, p.segments[s].expert, unit);
      if (++unit == per_expert) unit = 0, s++;
    }
  }

  // ---- the multiplying warps ----

  static __device__ __forceinline__ void meet_all() { named_sync(1, CONSUMERS); }

  static __device__ bool same_rows(const Segment& p, const Segment& q) {
    if (p.count != q.count) return false;
    for (int c = 0; c < p.count; c++) {
      if (p.row[c] != q.row[c]) return false;
    }
    return true;
  }

  // Activations of `count` columns, `pieces` of 8 values each, in the order in which the nibbles of a word come; and
  // what the sums of every group of 32 k start at. Column c is the row row_of(c) of `from`, `apart` values from the next.
  template <typename RowOf>
  static __device__ __forceinline__ void stage(const Args& a, const bf16* from, int apart, int count, int pieces,
                                               int pitch, RowOf row_of) {
    constexpr int TOGETHER = GATE_UP ? 4 : 1;
    const unsigned quad = 0xfu << (threadIdx.x & 28);
    int c = 0, piece = threadIdx.x;
    while (piece >= pieces) piece -= pieces, c++;
    while (c < count) {
      uint4 held[TOGETHER];
      int c_of[TOGETHER], piece_of[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        c_of[i] = c, piece_of[i] = piece;
        if (c < count) {
          held[i] = __ldcg(reinterpret_cast<const uint4*>(from + static_cast<int64_t>(row_of(c)) * apart + piece * 8));
        }
        piece += CONSUMERS;
        while (piece >= pieces) piece -= pieces, c++;
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        if (c_of[i] >= count) break;
        uint4 v = held[i];
        const float2 x01 = widen(v.x), x23 = widen(v.y), x45 = widen(v.z), x67 = widen(v.w);
        constexpr float high = RAISED / 16;
        v.x = narrow(x01.x * RAISED, x45.x * RAISED);
        v.y = narrow(x23.x * RAISED, x67.x * RAISED);
        v.z = narrow(x01.y * high, x45.y * high);
        v.w = narrow(x23.y * high, x67.y * high);
        *reinterpret_cast<uint4*>(memory(a.xs) + c_of[i] * pitch + piece_of[i] * 16) = v;
        float sum = ((x01.x + x01.y) + (x23.x + x23.y)) + ((x45.x + x45.y) + (x67.x + x67.y));
        sum += __shfl_xor_sync(quad, sum, 1);
        sum += __shfl_xor_sync(quad, sum, 2);
        if (piece_of[i] % 4 == 0 && c_of[i] < a.stride && piece_of[i] < a.K / 8) {
          reinterpret_cast<float*>(memory(a.starts))[piece_of[i] / 4 * a.stride + c_of[i]] = sum * (-8 * UNIT * RAISED);
        }
      }
    }
    meet_all();
  }

  // Which pieces of 8 values of every token's x are staged for bf16 or e4m3 weights, `pitch` bytes apart.
  struct Window {
    int first, end, pitch;
  };

  // Where 16 bytes of this warp's share of a slot are: number `column` < 4 of row `row` < 16 of tile rt; and the same of
  // the row's other 64 bytes.
  static __device__ __forceinline__ int place(const Args& a, int ks, int rt, int row, int column) {
    const int line = GATE_UP ? rt * 8 + row % 8 : rt * 16 + row, half = GATE_UP ? row / 8 * (SLOT / 2) : 0;
    const int turned = column ^ (a.chunk == 128 ? row % 8 : row % 8 / 2);
    return half + ks * SHARE * BOX_ROWS + line * a.chunk + turned * 16;
  }
  static __device__ __forceinline__ int other_half(const Args& a, int at) {
    return a.chunk == 128 ? at ^ 64 : at + 64 * BOX_ROWS;
  }

  static __device__ __forceinline__ void release(const Args& a, int& from, int& phase) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers().empty[from]);
    if (++from == a.slots) from = 0, phase ^= 1;
  }

  // Scales of a warp's groups of 32 k in a slot: bf16, or bytes.
  struct Scales {
    uint32_t words[COMPACT ? 2 : 4];
  };
  static __device__ __forceinline__ Scales scales_of(const uint8_t* at, int scale_row) {
    constexpr int BYTES = sizeof(Scales);
    Scales v;
    if (BYTES % 16 == 0 && scale_row % 16 == 0) {
#pragma unroll
      for (int n = 0; n < BYTES / 16; n++) {
        reinterpret_cast<uint4*>(v.words)[n] = reinterpret_cast<const uint4*>(at)[n];
      }
    } else if (BYTES >= 8 && scale_row % 8 == 0) {
#pragma unroll
      for (int n = 0; n < BYTES / 8; n++) {
        reinterpret_cast<uint2*>(v.words)[n] = reinterpret_cast<const uint2*>(at)[n];
      }
    } else {
#pragma unroll
      for (int n = 0; n < BYTES / 4; n++) v.words[n] = reinterpret_cast<const uint32_t*>(at)[n];
    }
    return v;
  }
  static __device__ __forceinline__ float scale_at(const Scales& v, int group) {
    if (!COMPACT) {
      const uint32_t pair = v.words[group / 2];
      return group % 2 ? high_half(pair) : low_half(pair);
    }
    constexpr uint32_t BASE = 0x4b000000;  // 2^23
    return __uint_as_float(__byte_perm(v.words[group / 4], BASE, 0x7440 + group % 4)) - __uint_as_float(BASE);
  }
  static __device__ __forceinline__ float bf16_at(const uint8_t* at) {
    return __bfloat162float(*reinterpret_cast<const bf16*>(at));
  }

  // acc[tokens 0-7, 8-15] = slots begin to end of a tile of the shared expert, or of the gate, times x.
  template <bool FP8>
  static __device__ __forceinline__ void dense_tile(const Args& a, int row_bytes, int begin, int end,
                                                    int buffer, Window& window, int& from, int& phase,
                                                    float (&total)[HALVES_OF_TOKENS][4]) {
    constexpr int EACH = FP8 ? 2 : 1;                       // 16 bytes of x that meet 16 bytes of weights
    constexpr int PIECES = FP8 ? 8 : 4;                     // of x that meet 64 bytes of weights
    constexpr int SLOT_PIECES = PIECE / 64 * PIECES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int ks = warp % KS, rt = warp / KS, own = ks * SHARE;
    const int width = row_bytes / 64 * PIECES * 8, all = width / 8;
    float acc[HALVES_OF_TOKENS][2][4] = {};
    const int near = place(a, ks, rt, g, t), far = other_half(a, near), below = place(a, ks, rt, g + 8, t) - near;
    float upper = FP8 ? 1 : 1 / RAISED, lower = upper;
    for (int n = begin; n < end; n++) {
      const int piece = n * SLOT_PIECES;
      if (piece < window.first || min(piece + SLOT_PIECES, all) > window.end) {
        if (window.end > 0) meet_all();  // every warp is done with the activations before
        int held = all, pitch = a.pitch;
        window.first = 0;
        if (a.T > a.columns || all * 16 + 64 > pitch) {
          const int most = (a.xs_bytes / a.T - 64) / 16;
          held = most >= all ? all : most / SLOT_PIECES * SLOT_PIECES;
          pitch = held * 16 + 64;
          window.first = most >= all ? 0 : piece;
        }
        window.end = min(window.first + held, all);
        window.pitch = pitch;
        stage(a, a.in_shared + window.first * 8, width, a.T, window.end - window.first, pitch, [](int c) { return c; });
      }
      barrier_wait(&barriers().full[from], phase);
      const uint8_t* slot = memory(from * SLOT);
      const uint8_t* x[HALVES_OF_TOKENS];
#pragma unroll
      for (int c = 0; c < HALVES_OF_TOKENS; c++) {
        x[c] = memory(a.xs) + (piece - window.first + own / 64 * PIECES + t * EACH) * 16 +
               min(g + 8 * c, a.T - 1) * window.pitch;
      }
      if (FP8 && n == 0) {
        const float* factor = reinterpret_cast<const float*>(memory(a.held) + buffer * a.block + a.scales);
        upper = factor[GATE_UP ? rt * 8 + g : rt * 16 + g] * (0x1p120f / RAISED);
        lower = factor[GATE_UP ? RT * 8 + rt * 8 + g : rt * 16 + g + 8] * (0x1p120f / RAISED);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (n * PIECE + own + h * 64 >= row_bytes) break;
        uint4 v[HALVES_OF_TOKENS][EACH];
#pragma unroll
        for (int c = 0; c < HALVES_OF_TOKENS; c++) {
#pragma unroll
          for (int e = 0; e < EACH; e++) {
            v[c][e] = *reinterpret_cast<const uint4*>(x[c] + (h * PIECES + e) * 16);
          }
        }
        const uint4 top = *reinterpret_cast<const uint4*>(slot + (h ? far : near));
        const uint4 bottom = *reinterpret_cast<const uint4*>(slot + (h ? far : near) + below);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          uint32_t low[4], high[4];  // of 8 values: 0 and 4, 2 and 6; 1 and 5, 3 and 7
          if constexpr (FP8) {
            const uint32_t p = e ? top.z : top.x, q = e ? top.w : top.y;
            const uint32_t r = e ? bottom.z : bottom.x, s = e ? bottom.w : bottom.y;
            const uint32_t up_low = __byte_perm(p, q, 0x6420), up_high = __byte_perm(p, q, 0x7531);
            const uint32_t down_low = __byte_perm(r, s, 0x6420), down_high = __byte_perm(r, s, 0x7531);
            low[0] = e4m3::even(up_low), low[1] = e4m3::even(down_low);
            low[2] = e4m3::odd(up_low), low[3] = e4m3::odd(down_low);
            high[0] = e4m3::even(up_high), high[1] = e4m3::even(down_high);
            high[2] = e4m3::odd(up_high), high[3] = e4m3::odd(down_high);
          } else {
            low[0] = __byte_perm(top.x, top.z, 0x5410), low[1] = __byte_perm(bottom.x, bottom.z, 0x5410);
            low[2] = __byte_perm(top.y, top.w, 0x5410), low[3] = __byte_perm(bottom.y, bottom.w, 0x5410);
            high[0] = __byte_perm(top.x, top.z, 0x7632), high[1] = __byte_perm(bottom.x, bottom.z, 0x7632);
            high[2] = __byte_perm(top.y, top.w, 0x7632), high[3] = __byte_perm(bottom.y, bottom.w, 0x7632);
          }
#pragma unroll
          for (int c = 0; c < HALVES_OF_TOKENS; c++) {
            mma(acc[c][0], low, v[c][e].x, v[c][e].y, bf16());
            mma(acc[c][1], high, v[c][e].z, v[c][e].w, bf16());
          }
        }
      }
      release(a, from, phase);
    }
#pragma unroll
    for (int c = 0; c < HALVES_OF_TOKENS; c++) {
#pragma unroll
      for (int n = 0; n < 4; n++) total[c][n] = (acc[c][0][n] + 16 * acc[c][1][n]) * (n < 2 ? upper : lower);
    }
  }

  static __device__ void consume(const Args& a, Range shared_units) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int ks = warp % KS, rt = warp / KS, own = ks * SHARE;
    int from = 0, phase = 0, buffer = 0, turn = 0;
    // Sums of a tile over its KS warps, which alone meet here, once: the buffers of sums alternate.
    auto finish = [&](const float (&acc)[4], int columns, auto result) {
      float* sums = reinterpret_cast<float*>(memory(a.sums)) + turn % 2 * WARPS * 128;
      float* mine = sums + warp * 128;
      *reinterpret_cast<float2*>(mine + g * 8 + 2 * t) = make_float2(acc[0], acc[1]);
      *reinterpret_cast<float2*>(mine + (g + 8) * 8 + 2 * t) = make_float2(acc[2], acc[3]);
      named_sync(2 + rt, KS * 32);
      for (int n = (ks + turn) % KS * 32 + lane; n < columns * ROWS; n += KS * 32) {
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
      turn++;
    };

    bool waited = false;
    auto wait = [&] {
      if (!waited) wait_for_predecessor();
      waited = true;
    };
    if (!GATE_UP) wait();
    Window window{0, 0, 0};
    for (int u = shared_units.first; u < shared_units.end; u++) {
      float total[HALVES_OF_TOKENS][4];
      const int slots = divide_up(a.shared.row, PIECE);
      if (a.shared.factor == nullptr) {
        dense_tile<false>(a, a.shared.row, 0, slots, buffer, window, from, phase, total);
      } else {
        dense_tile<true>(a, a.shared.row, 0, slots, buffer, window, from, phase, total);
      }
      if (++buffer == a.scale_buffers) buffer = 0;
      wait();
#pragma unroll
      for (int half = 0; half < HALVES_OF_TOKENS; half++) {
        finish(total[half], min(a.T - half * COLUMNS, COLUMNS), [&](int column, int row, float v, float up) {
          const int token = half * COLUMNS + column, at = u * RT + rt;
          if (GATE_UP) {
            a.out_shared[static_cast<int64_t>(token) * a.shared.tiles * ROWS + at * ROWS + row] =
                __float2bfloat16(v / (1 + __expf(-v)) * up);
          } else {
            static_cast<float*>(a.out)[(static_cast<int64_t>(token) * a.P + a.P - 1) * a.shared.tiles * ROWS +
                                       at * ROWS + row] = v;
          }
        });
      }
    }
    wait();
    barrier_wait(&barriers().planned, 0);

    const Plan& p = plan_of();
    const Range units = p.units;
    const int per_expert = a.routed.tiles / RT, slots = divide_up(a.routed.row, PIECE);
    const int row_upper = GATE_UP ? rt * 8 + g : rt * 16 + g, rows_between = GATE_UP ? RT * 8 : 8;
    const int near = place(a, ks, rt, lane % 16, lane / 16), far = other_half(a, near);
    const uint8_t* scale_upper = memory(a.held) + row_upper * a.scale_row + own / (COMPACT ? 16 : 8);
    int staged = -1, s = 0, unit = units.first % per_expert;
    for (int u = units.first; u < units.end; u++, unit++) {
      if (unit == per_expert) {
        unit = 0;
        s++;
      }
      const Segment& segment = p.segments[s];
      if (staged != s) {
        // A lone token's x is there since the shared expert.
        const bool there = GATE_UP && a.T == 1 && window.end == a.K / 8;
        if (!there && (staged < 0 || !same_rows(segment, p.segments[staged]))) {
          if (staged >= 0 || window.end > 0) meet_all();  // every warp is done with the activations before
          stage(a, a.in, a.K, segment.count, a.K / 8, a.pitch, [&](int c) { return segment.row[c]; });
        }
        staged = s;
      }
      float acc[4] = {};
      const uint8_t* x = memory(a.xs) + min(g, segment.count - 1) * a.pitch + own * 4 + t * 16;
      const float* start =
          reinterpret_cast<float*>(memory(a.starts)) + own / 16 * a.stride + 2 * min(t, a.stride / 2 - 1);
      const uint8_t* scale = scale_upper + buffer * a.block;
      const uint8_t* factor = memory(a.held) + buffer * a.block + a.scales + row_upper * 2;
      float factor_upper = RESULT, factor_lower = RESULT;
      if (++buffer == a.scale_buffers) buffer = 0;
      int left = a.routed.row - own;
      for (int n = 0; n < slots; n++) {
        barrier_wait(&barriers().full[from], phase);
        const uint32_t slot = shared_address(memory(from * SLOT));
        // Of a warp without a share of the slot they are anything, within shared memory.
        const Scales above = scales_of(scale, a.scale_row);
        const Scales below = scales_of(scale + rows_between * a.scale_row, a.scale_row);
        if (COMPACT && n == 0) {
          factor_upper = bf16_at(factor) * (RESULT / 255);
          factor_lower = bf16_at(factor + rows_between * 2) * (RESULT / 255);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (left <= h * 64) break;
#pragma unroll
          for (int pair = 0; pair < 2; pair++) {
            uint32_t w[4];
            load_matrices(w, slot + ((h ? far : near) ^ pair * 32));
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int group = h * 4 + pair * 2 + half;
              const uint4 b = *reinterpret_cast<const uint4*>(x + group * 64);
              const float2 c = *reinterpret_cast<const float2*>(start + group * a.stride);
              const uint32_t v = w[half * 2], z = w[half * 2 + 1], v8 = v >> 8, z8 = z >> 8;
              const uint32_t low[4] = {v & LOW, z & LOW, v8 & LOW, z8 & LOW};
              const uint32_t high[4] = {v & HIGH, z & HIGH, v8 & HIGH, z8 & HIGH};
              float d[4] = {c.x, c.y, c.x, c.y};
              mma(d, low, b.x, b.y, bf16());
              mma(d, high, b.z, b.w, bf16());
              const float f = scale_at(above, group), k = scale_at(below, group);
              acc[0] += f * d[0];
              acc[1] += f * d[1];
              acc[2] += k * d[2];
              acc[3] += k * d[3];
            }
          }
        }
        release(a, from, phase);
        left -= PIECE;
        scale += PIECE / (COMPACT ? 16 : 8);
        x += PIECE * 4;
        start += PIECE / 16 * a.stride;
      }
      acc[0] *= factor_upper;
      acc[1] *= factor_upper;
      acc[2] *= factor_lower;
      acc[3] *= factor_lower;
      finish(acc, segment.count, [&](int column, int row, float v, float up) {
        const int pair = segment.pair[column], at = unit * RT + rt;
        if (GATE_UP) {
          static_cast<bf16*>(a.out)[static_cast<int64_t>(pair) * a.routed.tiles * ROWS + at * ROWS + row] =
              __float2bfloat16(v / (1 + __expf(-v)) * up);
        } else {
          const int64_t line = static_cast<int64_t>(pair / a.k) * a.P + pair % a.k;
          static_cast<float*>(a.out)[line * a.routed.tiles * ROWS + at * ROWS + row] = v * segment.weight[column];
        }
      });
    }
  }

  // Lays out shared memory; its bytes.
  static int arrange(Args& a) {
    a.scale_row = a.K / (COMPACT ? 32 : 16);
    a.scales = UNIT_ROWS * a.scale_row;
    a.block = a.scales + UNIT_ROWS * (a.shared.factor != nullptr ? 4 : COMPACT ? 2 : 0);
    a.pitch = a.K * 2 + 64;
    a.stride = (a.columns + 1) / 2 * 2;
    a.sums = a.slots * SLOT;
    a.starts = a.sums + 2 * WARPS * 512;
    a.xs = a.starts + a.K / 32 * a.stride * 4;
    a.xs_bytes = a.columns * a.pitch;
    if (a.shared.tiles) {  // at least one slot of every token
      const int wide = a.shared.factor == nullptr ? 1 : 2;
      a.xs_bytes = max(a.xs_bytes, a.T * (min(PIECE, a.shared.row) * wide + 64));
    }
    a.held = a.xs + a.xs_bytes;
    a.counts = a.held + a.scale_buffers * a.block;
    return a.counts + max(a.E * 4, 1024);
  }

  static __device__ void run(const Args& a, const Maps& maps) {
    const int shared_all = a.shared.tiles / RT;
    const int64_t G = gridDim.x, c = blockIdx.x;
    const Range shared_units{static_cast<int>(c * shared_all / G), static_cast<int>((c + 1) * shared_all / G)};
    if (threadIdx.x < a.slots) {
      barrier_init(&barriers().full[threadIdx.x], 1);
      barrier_init(&barriers().empty[threadIdx.x], WARPS);
    }
    if (threadIdx.x == 31) barrier_init(&barriers().planned, 1);
    barriers_visible();
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
      produce(a, maps, shared_units);
    } else {
      consume(a, shared_units);
    }
  }
};

template <bool GATE_UP, bool COMPACT, bool MANY, int KS, int RT, int CTAS>
__global__ __launch_bounds__((KS * RT + 1) * 32, CTAS) void moe_int4_bulk_kernel(const __grid_constant__ Args a,
                                                                             const __grid_constant__ Maps maps) {
  Kernel<GATE_UP, COMPACT, MANY, KS, RT, CTAS>::run(a, maps);
}

template <typename K>
bool describe(CUtensorMap* map, const Matrix& m, int64_t rows, int chunk) {
  return maps::describe(map, m.data, chunk == 128 ? maps::SWIZZLED_BYTES : maps::SWIZZLED_HALF,
                        {chunk, rows, m.row / chunk}, {m.row, chunk}, {chunk, K::BOX_ROWS, K::PIECE / chunk});
}

template <bool GATE_UP, bool COMPACT, bool MANY, int KS, int RT, int CTAS>
int start(Args a, int sms, void* stream) {
  using K = Kernel<GATE_UP, COMPACT, MANY, KS, RT, CTAS>;
  constexpr int FIXED = 3072;  // more than the kernel's own shared memory and what the driver takes
  constexpr int MOST = 228 * 1024 / CTAS - FIXED;
  // Without a shared expert its map is never used.
  const bool shares = a.shared.tiles > 0;
  if (!shares) a.shared.row = a.routed.row;
  a.chunk = a.routed.row % 128 || a.shared.row % 128 ? 64 : 128;
  const int ctas = CTAS * sms, pairs = a.T * a.k, per_unit = divide_up(min(a.routed.row, a.shared.row), K::PIECE);
  auto fits = [&](int slots) {
    a.slots = slots;
    // A unit's scales may be overwritten when the slot that the new ones come with was the old unit's last, or later.
    a.scale_buffers = divide_up(slots - 1, per_unit) + 1;
    return K::arrange(a) <= MOST;
  };
  while (!fits(3) && a.columns > 1) a.columns--;
  int slots = MAX_SLOTS;
  while (slots > 2 && !fits(slots)) slots--;
  const int segments = min(pairs, a.E + pairs / a.columns);
  if (!fits(slots) || a.E > MAX_EXPERTS || 2 * segments / ctas + 3 > MAX_SEGMENTS) return -1;
  Maps maps = {};
  if (!describe<K>(&maps.routed, a.routed, a.routed_rows, a.chunk) ||
      (shares && !describe<K>(&maps.shared, a.shared, a.shared_rows, a.chunk))) {
    return -1;
  }
  return launch(moe_int4_bulk_kernel<GATE_UP, COMPACT, MANY, KS, RT, CTAS>, dim3(ctas), dim3(K::THREADS), K::arrange(a),
                stream, 1, a, maps);
}

Matrix matrix(const void* data, const void* scale, const void* factor, int64_t expert, int64_t second, int64_t row,
              int64_t tiles) {
  return {static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(scale), static_cast<const uint8_t*>(factor),
          expert, second, static_cast<int>(row), static_cast<int>(tiles)};
}

// Up to MAX_SHARED tokens the shared expert rides along.
template <bool COMPACT>
int start_gate_up(const Args& a, int sms, void* stream) {
  if (a.T > MAX_SHARED) return start<true, COMPACT, false, 7, 2, 1>(a, sms, stream);
  return a.T > COLUMNS ? start<true, COMPACT, true, 7, 1, 2>(a, sms, stream)
                       : start<true, COMPACT, false, 7, 1, 2>(a, sms, stream);
}
template <bool COMPACT>
int start_down(const Args& a, int sms, void* stream) {
  if (a.T == 1) return start<false, COMPACT, false, 4, 2, 3>(a, sms, stream);
  return a.T > COLUMNS && a.T <= MAX_SHARED ? start<false, COMPACT, true, 8, 1, 2>(a, sms, stream)
                                            : start<false, COMPACT, false, 8, 1, 2>(a, sms, stream);
}

}  // namespace

// h [T k, I] and h_shared [T, S] from x [T, D]; S = 0: no shared expert. `row` is null unless scales are compact,
// `shared_scale` unless the shared expert is e4m3. Returns -1 for sizes it cannot take.
API int moe_int4_bulk_gate_up(const void* x, const void* ids, const void* packed, const void* scale, const void* row,
                              const void* shared, const void* shared_scale, void* h, void* h_shared, int64_t T,
                              int64_t k, int64_t E, int64_t D, int64_t I, int64_t S, int64_t sms, void* stream) {
  Args a{matrix(packed, scale, row, 2 * I, I, D / 2, I / 8),
         matrix(shared, nullptr, shared_scale, 0, S, shared_scale == nullptr ? 2 * D : D, S / 8),
         static_cast<const bf16*>(x),
         static_cast<const bf16*>(x),
         static_cast<const int*>(ids),
         nullptr,
         h,
         static_cast<bf16*>(h_shared),
         static_cast<int>(T),
         static_cast<int>(k),
         static_cast<int>(E),
         static_cast<int>(D),
         0,
         2 * I * E,
         2 * S,
         static_cast<int>(T <= 4 ? T : T <= 96 ? 4 : COLUMNS)};
  return row == nullptr ? start_gate_up<false>(a, sms, stream) : start_gate_up<true>(a, sms, stream);
}

// y [T, P, D] from h and h_shared; P = k + 1 with a row of y for the shared expert, written if S > 0.
API int moe_int4_bulk_down(const void* h, const void* h_shared, const void* ids, const void* weights,
                           const void* packed, const void* scale, const void* row, const void* shared,
                           const void* shared_scale, void* y, int64_t T, int64_t k, int64_t E, int64_t D, int64_t I,
                           int64_t S, int64_t P, int64_t sms, void* stream) {
  Args a{matrix(packed, scale, row, D, 8, I / 2, D / 16),
         matrix(shared, nullptr, shared_scale, 0, 8, shared_scale == nullptr ? 2 * S : S, S ? D / 16 : 0),
         static_cast<const bf16*>(h),
         static_cast<const bf16*>(h_shared),
         static_cast<const int*>(ids),
         static_cast<const float*>(weights),
         y,
         nullptr,
         static_cast<int>(T),
         static_cast<int>(k),
         static_cast<int>(E),
         static_cast<int>(I),
         static_cast<int>(P),
         D * E,
         D,
         static_cast<int>(T <= 4 ? T : T <= 64 ? 4 : COLUMNS)};
  return row == nullptr ? start_down<false>(a, sms, stream) : start_down<true>(a, sms, stream);
}
