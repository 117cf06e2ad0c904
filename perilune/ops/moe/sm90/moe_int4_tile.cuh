// A warp's part of a tile in moe_int4_mma_tma.cu: activations, which stay in registers, and products with INT4, bf16
// and e4m3 weights in a slot of the ring.
#pragma once
#include "moe/sm90/expert_segments.cuh"
#include "moe/sm90/int4_mma.cuh"

namespace moe {

constexpr int MAX_SLOTS = 16;
constexpr int TOKENS = 8;      // columns of B for the shared expert
// A work item: segment << TILE_BITS | tile, and two flags; negative: no more.
//   LAST: gate_up: the CTA's next item is of another segment or range, so its count of finished tiles is published.
//   WAITS: down: not all of the segment's h was written when the copies were issued.
constexpr int TILE_BITS = 10, LAST = 1 << 24, WAITS = 1 << 25;

struct Matrix {
  const uint8_t* data;
  const uint8_t* scale;   // INT4: one for 32 k
  const uint8_t* factor;  // one for a row: bf16 of compact scales, float of e4m3 weights; else null
  int64_t rows;           // rows of all experts
  int expert;             // rows of an expert
  int second;             // gate_up: rows between a gate row and its up row
  int row;                // bytes of a row
  int tiles;              // tiles of an expert; 0 if there is no such matrix
  int chunk;              // adjacent bytes of a row in a slot: 128, or 64 if rows are no multiple of 128
};

struct Args {
  Matrix routed, shared;
  const bf16* in;         // gate_up: x [T, K]; down: h [T k, K]
  const bf16* in_shared;  // [T, width]
  const int* ids;         // [T, k]
  const float* weights;   // [T, k]; down only
  void* out;              // gate_up: h [T k, 8 tiles] bf16; down: y [T, P, 16 tiles] float
  bf16* out_shared;       // gate_up: [T, 8 tiles]; down writes row P - 1 of y
  int T, k, E, K, width, P;
  int shared_tiles_of_h;  // down: gate_up's `shared.tiles`
  uint32_t per_round;     // 2^32 / (4 CTAs), rounded up
  uint32_t* taken;        // in a launch of one phase: ranges taken after every CTA's first; zero before
  int slots;         // slots of the ring
  int parts;         // groups of warps that share a tile
  int visit, shared_visit;  // slots of a tile per group
  int scale_row, scale_pitch, scale_swizzle;  // bytes; whether tensor maps swizzle the 16-byte chunks of scales
  int whole_scales;  // rows of scales are too short for a tensor map and are copied whole
  int scales, factors, sums, starts, segments, sorted, counts, places;  // offsets in shared memory
};

struct Maps {
  CUtensorMap routed, scales, shared;
};

struct Sums {  // barriers of the ring through which consumers pass their sums of tiles to the last warp
  static constexpr int TURNS = 8;
  uint64_t added[TURNS], free[TURNS];
  int result[TURNS];  // items
};
struct Place {  // a slot of a ring, and the parity of its barrier's phase
  int at, phase;
  __device__ __forceinline__ void advance(int by, int size) {
    at += by;
    while (at >= size) at -= size, phase ^= 1;
  }
};
struct Control {
  uint64_t full[MAX_SLOTS], empty[MAX_SLOTS], planned;
  Sums sums[2];  // [0]: down's, [1]: gate_up's
  uint32_t* units;  // this launch's half of `Units`
  int segments;
  int item[MAX_SLOTS];
  Place down;  // where down's slots begin
};
__device__ __forceinline__ Control& control() {
  __shared__ Control c;
  return c;
}

// WIDE: tiles in a slot of down, side by side: more than one where GROUP / WIDE chunks are a whole row (a rank's slice).
template <bool GATE_UP, bool COMPACT, int WIDE>
struct Tile {
  static constexpr int RT = GATE_UP ? 1 : WIDE;
  // GROUP: warps that share a slot; GROUPS: such groups of warps per CTA; VISIT: max slots of a tile per group.
  static constexpr int GROUP = GATE_UP ? 7 : 8, GROUPS = 2, VISIT = GATE_UP ? 2 : 1;
  static constexpr int WARPS = GROUP * GROUPS;
  static constexpr int KS = GROUP / RT;  // warps of a group per tile
  static constexpr int PIECE = KS * 128, SLOT = 16 * RT * PIECE;
  static constexpr int BOX_ROWS = GATE_UP ? 8 : 16 * RT, BOXES = GATE_UP ? 2 : 1;
  static constexpr int ROWS = GATE_UP ? 8 : 16, UNIT_ROWS = ROWS * RT;  // results of a tile, of a slot
  static_assert(GROUP % RT == 0 && (RT == 1 || !GATE_UP));
  static constexpr int SCALE_UNIT = COMPACT ? 8 : 16;  // bytes of scales per chunk
  static constexpr int SCALE_PITCH = (KS * SCALE_UNIT + 15) / 16 * 16, SCALES = 16 * RT * SCALE_PITCH;
  // Bytes between slots, and between the scales and the row scales of slots, of gate_up and down alike. Row scales come
  // with a group's first slot of a tile: plain loads would cost a memory latency for every tile.
  static constexpr int SLOT_PITCH = 16 * 8 * 128, SCALES_PITCH = COMPACT && WIDE < 8 ? 1024 : 2048;
  static constexpr int FACTORS_PITCH = 16 * WIDE * 4;
  static_assert(SLOT <= SLOT_PITCH && SCALES <= SCALES_PITCH);
  static constexpr int TURNS = GATE_UP ? 4 : 8;  // buffers in the ring of sums
  static constexpr int HELD = VISIT * 8;  // groups of 32 k with activations in a warp's registers

  using Held = uint32_t[HELD][4];

  static __device__ __forceinline__ uint8_t* memory(int at) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    return bytes + at;
  }
  static __device__ __forceinline__ Sums& sums_ring() { return control().sums[GATE_UP]; }

  static __device__ __forceinline__ Plan plan_of(const Args& a) {
    return {reinterpret_cast<Segment*>(memory(a.segments)), reinterpret_cast<uint16_t*>(memory(a.sorted)),
            reinterpret_cast<uint32_t*>(memory(a.counts)), reinterpret_cast<uint32_t*>(memory(a.places))};
  }
  static __host__ __device__ __forceinline__ int halves(const Args& a) { return a.T > TOKENS ? 2 : 1; }
  static __device__ __forceinline__ int planes(const Args& a) { return a.T > 1 ? 2 : 1; }
  static __device__ __forceinline__ int row_of(const Args& a, int pair) { return GATE_UP ? pair / a.k : pair; }

  struct Warp {
    int lane, g, t, ks, part, turn;  // turn: number of the next sums
    Place from;
    float* starts;
    int rt;
    int odd;  // offset of a slot's scales in its box, in odd slots: boxes start at multiples of 16 bytes
  };

  // Loads this warp's k of N tokens of a segment to registers b, and the start values of the sums to shared memory.
  template <int N>
  static __device__ __forceinline__ void hold(const Args& a, const Warp& w, Segment segment, Held& b) {
    constexpr int EACH = 8 / N;  // groups of an accumulator
    const int token = min(w.g / EACH, segment.count() - 1), own = w.g % EACH;
    const bf16* row = a.in + static_cast<int64_t>(row_of(a, plan_of(a).sorted[segment.first() + token])) * a.K;
    uint4 v[VISIT][N];
#pragma unroll
    for (int j = 0; j < VISIT; j++) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        const int k = ((w.part * a.visit + j) * KS + w.ks) * 256 + (i * EACH + own) * 32 + w.t * 8;
        v[j][i] = make_uint4(0, 0, 0, 0);
        if (j < a.visit && k < a.K) v[j][i] = __ldcg(reinterpret_cast<const uint4*>(row + k));
      }
    }
    __syncwarp();  // all lanes have read the previous start values
#pragma unroll
    for (int j = 0; j < VISIT; j++) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        float sum = total(v[j][i]);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (w.t == 0) w.starts[(j * N + i) * 8 + w.g] = sum * (-8 * UNIT * RAISED);
        const uint4 x = raised(v[j][i], RAISED / 16);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
#pragma unroll
          for (int n = 0; n < 4; n++) {
            b[j * 8 + i * EACH + e][n] = e == own ? (&x.x)[n] : 0;
          }
        }
      }
    }
    __syncwarp();
  }

  // The scales of two neighbouring groups.
  static __device__ __forceinline__ float2 scales_at(const uint8_t* at) {
    if (COMPACT) {
      const uint32_t v = *reinterpret_cast<const uint16_t*>(at);
      constexpr uint32_t BASE = 0x4b000000;  // 2^23
      return make_float2(__uint_as_float(__byte_perm(v, BASE, 0x7440)) - __uint_as_float(BASE),
                         __uint_as_float(__byte_perm(v, BASE, 0x7441)) - __uint_as_float(BASE));
    }
    const uint32_t v = *reinterpret_cast<const uint32_t*>(at);
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000));
  }

  // A slot's `empty` barrier takes 8 arrivals (Down::GROUP), so that both phases can use it: of gate_up's 7 warps, warp
  // 0 arrives twice.
  static __device__ __forceinline__ void release(const Args& a, Warp& w) {
    __syncwarp();
    if (w.lane == 0) barrier_arrive(&control().empty[w.from.at]);
    if (GROUP < 8 && w.ks == 0 && w.lane == 0) barrier_arrive(&control().empty[w.from.at]);
    w.from.advance(a.parts, a.slots);
  }

  // Offset in a slot of the 16 bytes `column` (0 to 3) of row `row` < 16 RT, in this warp's chunk.
  static __device__ __forceinline__ int near_of(int chunk, int ks, int row, int column) {
    const int line = GATE_UP ? row % 8 : row, half = GATE_UP ? row / 8 * (SLOT / 2) : 0;
    return half + ks * 128 * BOX_ROWS + line * chunk + (column ^ (chunk == 128 ? row % 8 : row % 8 / 2)) * 16;
  }
  // The same in the row's other 64 bytes.
  static __device__ __forceinline__ int far_of(int chunk, int near) {
    return chunk == 128 ? near ^ 64 : near + 64 * BOX_ROWS;
  }

  // Offset of byte `at` of the scales of row `row` < 16 RT.
  static __device__ __forceinline__ int scale_of(const Args& a, int row, int at) {
    const int swap = !a.scale_swizzle ? 0 : SCALE_PITCH == 128 ? row % 8 : row / 2 % 4;
    return row * a.scale_pitch + (at / 16 ^ swap) * 16 + at % 16;
  }

  // The sums of rows g and g + 8, not yet times RESULT, of token t N / 4.
  template <int N>
  static __device__ __forceinline__ float2 multiply(const Args& a, Warp& w, const Held& b, int near, int far,
                                                    const uint8_t* scales) {
    constexpr int EACH = 8 / N;
    float top[N] = {}, bottom[N] = {};
#pragma unroll
    for (int j = 0; j < VISIT; j++) {
      if (j >= a.visit) break;
      if (j > 0) barrier_wait(&control().full[w.from.at], w.from.phase);
      const uint32_t slot = shared_address(memory(w.from.at * SLOT_PITCH));
      const uint8_t* scale = scales + w.from.at * SCALES_PITCH;
      if (KS * SCALE_UNIT % 16 && (w.part * a.visit + j) % 2) scale += w.odd;  // boxes begin at multiples of 16 bytes
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float2 start = *reinterpret_cast<const float2*>(w.starts + (j * N + i) * 8 + w.t * 2);
        float d[4] = {start.x, start.y, start.x, start.y};
#pragma unroll
        for (int e = 0; e < EACH; e += 2) {
          const int group = i * EACH + e;
          uint32_t words[4];
          load_matrices(words, slot + ((group < 4 ? near : far) ^ (group % 4 * 16)));
#pragma unroll
          for (int n = 0; n < 2; n++) {
            uint32_t low[4], high[4];
            nibbles(words[n * 2], words[n * 2 + 1], low, high);
            const uint32_t(&x)[4] = b[j * 8 + group + n];
            mma(d, low, x[0], x[1], bf16());
            mma(d, high, x[2], x[3], bf16());
          }
        }
        const int pair = N == 1 ? w.t : N == 2 ? i * 2 + w.t % 2 : i;  // index of two neighbouring groups
        const float2 f = scales_at(scale + pair * (SCALE_UNIT / 4));
        const float2 k = scales_at(scale + pair * (SCALE_UNIT / 4) + 8 * a.scale_pitch);
        top[i] = fmaf(f.y, d[1], fmaf(f.x, d[0], top[i]));
        bottom[i] = fmaf(k.y, d[3], fmaf(k.x, d[2], bottom[i]));
      }
      release(a, w);
    }
    if constexpr (N == 4) {
      return make_float2((top[0] + top[1]) + (top[2] + top[3]), (bottom[0] + bottom[1]) + (bottom[2] + bottom[3]));
    } else {
#pragma unroll
      for (int i = 0; i < N; i++) {
        top[i] += __shfl_xor_sync(~0u, top[i], 1);
        bottom[i] += __shfl_xor_sync(~0u, bottom[i], 1);
      }
      if constexpr (N == 2) return make_float2(top[0] + top[1], bottom[0] + bottom[1]);
      return make_float2(top[0] + __shfl_xor_sync(~0u, top[0], 2), bottom[0] + __shfl_xor_sync(~0u, bottom[0], 2));
    }
  }

  // Passes this warp's sums of a tile to the last warp.
  static __device__ __forceinline__ void hand(const Args& a, const Warp& w, float2 sums, int item) {
    Sums& c = sums_ring();
    const Place to{w.turn % TURNS, w.turn / TURNS & 1};
    barrier_wait(&c.free[to.at], to.phase ^ 1);
    const int own = (to.at * a.parts + w.part) * GROUP + w.rt * KS + w.ks;
    float2* at = reinterpret_cast<float2*>(memory(a.sums)) + own * 32;
    at[w.lane] = sums;
    if (w.part == 0 && w.ks == 0 && w.rt == 0 && w.lane == 0) c.result[to.at] = item;
    __syncwarp();
    if (w.lane == 0) barrier_arrive(&c.added[to.at]);
  }

  // Loads the activations of token 8 half + g for this warp's k of the shared expert.
  template <bool FP8>
  static __device__ __forceinline__ void hold_tokens(const Args& a, const Warp& w, int half, Held& b) {
    constexpr int GROUPS_OF_SLOT = FP8 ? 4 : 2;
    const bf16* row = a.in_shared + static_cast<int64_t>(min(half * TOKENS + w.g, a.T - 1)) * a.width;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int j = i / GROUPS_OF_SLOT, group = i % GROUPS_OF_SLOT;
      const int within = FP8 ? group / 2 * 64 + w.t * 16 + group % 2 * 8 : group * 32 + w.t * 8;
      const int k = ((w.part * a.shared_visit + j) * KS + w.ks) * (GROUPS_OF_SLOT * 32) + within;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (j < a.shared_visit && k < a.width) v = __ldcg(reinterpret_cast<const uint4*>(row + k));
      const uint4 x = raised(v, RAISED);
      b[i][0] = x.x, b[i][1] = x.y, b[i][2] = x.z, b[i][3] = x.w;
    }
  }

  // A tile of the shared expert times 8 tokens: d as mma's.
  template <bool FP8>
  static __device__ __forceinline__ void multiply_tokens(const Args& a, Warp& w, const Held& b, float (&d)[4]) {
    constexpr int GROUPS_OF_SLOT = FP8 ? 4 : 2, SLOTS = HELD / GROUPS_OF_SLOT;
    const int near = near_of(a.shared.chunk, w.ks, w.rt * 16 + w.g, w.t), far = far_of(a.shared.chunk, near);
    const int below = near_of(a.shared.chunk, w.ks, w.rt * 16 + w.g + 8, w.t) - near;
    float other[4] = {};
#pragma unroll
    for (int n = 0; n < 4; n++) d[n] = 0;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      if (j >= a.shared_visit) break;
      barrier_wait(&control().full[w.from.at], w.from.phase);
      const uint8_t* slot = memory(w.from.at * SLOT_PITCH);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 top = *reinterpret_cast<const uint4*>(slot + (h ? far : near));
        const uint4 bottom = *reinterpret_cast<const uint4*>(slot + (h ? far : near) + below);
#pragma unroll
        for (int e = 0; e < GROUPS_OF_SLOT / 2; e++) {
          uint32_t low[4], high[4];
          values<FP8>(top, bottom, e, low, high);
          const uint32_t(&x)[4] = b[j * GROUPS_OF_SLOT + h * (GROUPS_OF_SLOT / 2) + e];
          mma(d, low, x[0], x[1], bf16());
          mma(other, high, x[2], x[3], bf16());
        }
      }
      release(a, w);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) d[n] += other[n];
  }
};

}  // namespace moe
