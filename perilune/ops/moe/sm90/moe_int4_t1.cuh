// Parts of moe_int4_t1.cu: a CTA's shared memory, the split of work over CTAs, and a consumer warp's part of a slot:
// staged activations, scales, tiles of the chosen experts and of the shared one.
#pragma once
#include "cuda/int4_fixed.cuh"
#include "cuda/router_mailbox.cuh"
#include "cuda/residual_mailbox.cuh"
#include "moe/sm90/int4_mma.cuh"

namespace moe {

using namespace fixed_point;

constexpr int MAX_SLOTS = 12, GATE_UP_SLOTS = 4, EARLY_SLOTS = 2, EARLY_WIDTH = 1024;
constexpr int MAX_CHOICES = mailbox::MAX_CHOICES;

struct Matrix {
  const uint8_t* data;
  const uint8_t* scale;   // INT4: one for 32 k
  const uint8_t* factor;  // one for a row: bf16 of compact scales, float of e4m3 weights; else null
  int64_t expert;         // rows of an expert
  int64_t second;         // rows between a tile's row 0 and its row 8
  int row;                // bytes of a row
  int tiles;              // tiles of an expert; 0 if there is no such matrix
};

struct Args {
  Matrix routed, shared;
  const bf16* in;         // gate_up: x [K]; down: h [k, K]
  const bf16* in_shared;  // x, or h of the shared expert
  const int* ids;         // [k]
  const float* weights;   // [k]; down only
  void* out;              // gate_up: h [k, 8 tiles] bf16; down: y [P, 16 tiles] float
  bf16* out_shared;       // gate_up: [8 tiles]; down writes row P - 1 of y
  int k, E, K, P, S;
  uint32_t reciprocal, per_cta;  // 2^32 / units of an expert, 2^32 / CTAs; rounded up
  int64_t each, each_shared;     // down: routed units per CTA, and per shared unit by bytes; times 2^20
  int64_t routed_rows, shared_rows;
  uint32_t* mailbox;    // router_mailbox.cuh; down clears it
  uint32_t launch;    // number of the router launch that publishes the ids; 0: gate_up waits for its predecessor
  const uint32_t* fresh;  // gate_up: residual mailbox, to compute x from (residual_mailbox.cuh); null: x is read
  const bf16* norm;       // [K] norm weights, if `fresh`
  float eps;
  int dealt;          // gate_up: routed units that CTAs take without the counter, one each; 0: all from the counter
  int quartered;      // gate_up: slots of a quartered unit of the shared expert; 0: its units are tiles
  uint32_t* counter;  // routed units that gate_up's CTAs have taken from it; zero before, down clears it
  int chunk;          // adjacent bytes of a row in a slot: 128, or 64 if rows are no multiple of 128
  int slots;          // slots of the ring
  int scale_buffers;  // units with scales and factors in shared memory
  int scale_row, scales, block;  // bytes: scales of a row, of a unit; scales and factors of a unit
  int xs_bytes;                  // bytes of staged activations
  // Offsets in shared memory, behind the ring. quarters: row factors of quartered units, 32 bytes for a slot; zeros: 64
  // bytes; xs: activations; units: a float for each group of 32 of them; held: scales and factors.
  int sums, quarters, zeros, xs, units, held;
  int xs_shared;                 // offset of the shared expert's activations: xs, or a second buffer
};

inline Matrix matrix(const void* data, const void* scale, const void* factor, int64_t expert, int64_t second,
                     int64_t row, int64_t tiles) {
  return {static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(scale), static_cast<const uint8_t*>(factor),
          expert, second, static_cast<int>(row), static_cast<int>(tiles)};
}

// The matrices and sizes of a product, as moe_int4_t1_gate_up and moe_int4_t1_down get them.
inline Args gate_up_of(const void* packed, const void* scale, const void* row, const void* shared,
                       const void* shared_scale, int64_t k, int64_t E, int64_t D, int64_t I, int64_t S) {
  Args a = {};
  a.routed = matrix(packed, scale, row, 2 * I, I, D / 2, I / 8);
  a.shared = matrix(shared, nullptr, shared_scale, 0, S, shared_scale == nullptr ? 2 * D : D, S / 8);
  a.k = static_cast<int>(k), a.E = static_cast<int>(E), a.K = static_cast<int>(D);
  a.routed_rows = 2 * I * E, a.shared_rows = 2 * S;
  return a;
}
inline Args down_of(const void* packed, const void* scale, const void* row, const void* shared,
                    const void* shared_scale, int64_t k, int64_t E, int64_t D, int64_t I, int64_t S) {
  Args a = {};
  a.routed = matrix(packed, scale, row, D, 8, I / 2, D / 16);
  a.shared = matrix(shared, nullptr, shared_scale, 0, 8, shared_scale == nullptr ? 2 * S : S, S ? D / 16 : 0);
  a.k = static_cast<int>(k), a.E = static_cast<int>(E), a.K = static_cast<int>(I), a.S = static_cast<int>(S);
  a.routed_rows = D * E, a.shared_rows = D;
  return a;
}

// Dimensions of the maps: byte within a chunk (64 or 128 bytes), row, chunk of the row. quartered: the same matrix as
// `shared`, in boxes of QUARTERED_ROWS rows, not swizzled.
struct Maps {
  CUtensorMap routed, shared, quartered;
};

struct Chosen {
  int expert, number;  // number: index of the choice, below k
  float weight;        // down only
};

struct Range {
  int first, end;
};

struct Plan {
  Chosen chosen[MAX_CHOICES];
  int count;    // length of `chosen`
  Range units;  // this CTA's numbers of all (choice, unit), counted choice by choice
};

// A CTA's shared memory.
struct InShared {
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
    uint64_t ready;  // gate_up: x is here
    int taken[MAX_SLOTS];  // gate_up: the unit that begins in a slot; negative: no more units
    uint32_t half;         // JOINED: of h's mailbox, in this launch
    Range down[2];         // JOINED: units of down: the shared expert's, the chosen ones'
  };
  static __device__ __forceinline__ Barriers& barriers() {
    __shared__ Barriers b;
    return b;
  }
};

// From 8 values as `raised` returns them with high = RAISED / 16.
__device__ __forceinline__ void put_fixed_raised(uint4 v, uint8_t* groups, float* units, int group, int word) {
  const uint32_t even = __vmaxu2(magnitudes(v.x), magnitudes(v.y)), odd = __vmaxu2(magnitudes(v.z), magnitudes(v.w));
  const uint32_t most = max(max(even & 0xffff, even >> 16), max(odd & 0xffff, odd >> 16) + (4 << 7));
  static_assert(RAISED == 0x1p80f);
  put_fixed<80, 16>({low_float(v.x), low_float(v.y), high_float(v.x), high_float(v.y)},
                    {low_float(v.z), low_float(v.w), high_float(v.z), high_float(v.w)}, most, groups, units, group,
                    word);
}

template <bool GATE_UP, bool COMPACT, int KS, int RT>
struct OneToken : InShared {
  static constexpr int WARPS = KS * RT, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
  static constexpr int SHARE = 128, PIECE = KS * SHARE;  // bytes of a row in a slot: one warp's, all KS warps'
  static constexpr int UNIT_ROWS = 16 * RT, SLOT = UNIT_ROWS * PIECE;
  static constexpr int BOX_ROWS = GATE_UP ? UNIT_ROWS / 2 : UNIT_ROWS;  // adjacent rows, of one copy
  static constexpr int ROWS = GATE_UP ? 8 : 16;  // results of a tile

  // ---- which units this CTA works on: by one warp ----

  // The choice that a unit number belongs to. Dividing by a variable would take longer than issuing a slot's copies.
  static __device__ __forceinline__ int choice_of(const Args& a, int unit) { return __umulhi(unit, a.reciprocal); }

  // The first unit of CTA `cta`, if `all` units are split evenly.
  static __device__ __forceinline__ int before(const Args& a, int cta, int all) { return __umulhi(cta * all, a.per_cta); }

  // down: this CTA's routed units: with its shared units, an equal part of all bytes. The host has divided (`deal`):
  // divisions here delayed the first load of weights to some 1,500 clocks after the ids.
  static __device__ __forceinline__ Range dealt(const Args& a) {
    const int shared = a.shared.tiles / RT, all = a.k * (a.routed.tiles / RT);
    auto bound = [&](int n) {
      if (n == static_cast<int>(gridDim.x)) return all;
      const int64_t at = n * a.each - before(a, n, shared) * a.each_shared;
      return min(max(static_cast<int>((at + (1 << 19)) >> 20), 0), all);
    };
    return {bound(blockIdx.x), bound(blockIdx.x + 1)};
  }
  // On the host: the factors of `dealt`.
  static void deal(Args& a, int64_t ctas) {
    const int64_t shared = a.shared.tiles / RT, wide = a.shared.row, narrow = a.routed.row + a.scale_row;
    const int64_t routed = a.k * (a.routed.tiles / RT) * narrow, bytes = shared * wide + routed;
    // Routed units are split evenly if shared units exceed a CTA's equal part of the bytes, or half of all bytes.
    const bool even = bytes / ctas <= wide * ((shared + ctas - 1) / ctas) + 1 || shared * wide > bytes / 2;
    a.per_cta = static_cast<uint32_t>(((int64_t(1) << 32) + ctas - 1) / ctas);
    a.each = ((even ? routed : bytes) << 20) / (ctas * narrow), a.each_shared = even ? 0 : (wide << 20) / narrow;
  }

  // Choice number `lane` of the token; expert -1 from lane k on.
  struct Asked {
    int expert;
    float weight;  // down only
  };
  static __device__ __forceinline__ Asked ask(const Args& a) {
    const int lane = threadIdx.x % 32;
    Asked v{-1, 1};
    if (lane < a.k) {
      v.expert = __ldcg(a.ids + lane);
      if (!GATE_UP) v.weight = __ldcg(a.weights + lane);
    }
    return v;
  }

  // Writes the plan: the token's choices without ids that are no expert, and this CTA's units. down: `own` if all k ids
  // are experts, else an equal share of the remaining units.
  static __device__ void plan(const Args& a, Asked v, Range own) {
    Plan& p = plan_of();
    const int lane = threadIdx.x % 32, per_expert = a.routed.tiles / RT;
    const bool valid = static_cast<unsigned>(v.expert) < static_cast<unsigned>(a.E);
    const unsigned found = __ballot_sync(~0u, valid);
    const int all = __popc(found) * per_expert, s = __popc(found & ((1u << lane) - 1));
    if (valid) p.chosen[s] = Chosen{v.expert, lane, v.weight};
    if (!GATE_UP && all != a.k * per_expert) own = {before(a, blockIdx.x, all), before(a, blockIdx.x + 1, all)};
    if (lane == 0) p.count = __popc(found), p.units = GATE_UP ? Range{0, all} : own;
    __syncwarp();
    if (lane == 0) barrier_arrive(&barriers().planned);
  }

  // ---- a consumer warp ----

  static __device__ __forceinline__ void meet_all() { named_sync(1, CONSUMERS); }

  // Writes 8 activations to shared memory, for the shared expert: in the order of a word's nibbles.
  static __device__ __forceinline__ void put_raised(int xs, uint4 v, int piece) {
    *reinterpret_cast<uint4*>(memory(xs) + piece * 16) = raised(v, RAISED / 16);
  }
  // The same for routed experts.
  static __device__ __forceinline__ void put(const Args& a, uint4 v, int piece) {
    put_fixed(v, memory(a.xs), reinterpret_cast<float*>(memory(a.units)), piece / 4, piece % 4);
  }

  // Copies `pieces` x 8 activations to shared memory. ROUTED: for routed experts.
  template <bool ROUTED>
  static __device__ __forceinline__ void stage(const Args& a, const bf16* from, int pieces) {
    constexpr int TOGETHER = GATE_UP ? 4 : 1;
    for (int first = threadIdx.x; first < pieces; first += TOGETHER * CONSUMERS) {
      uint4 held[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const int piece = first + i * CONSUMERS;
        if (piece < pieces) held[i] = __ldcg(reinterpret_cast<const uint4*>(from + piece * 8));
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const int piece = first + i * CONSUMERS;
        if (piece >= pieces) break;
        if (ROUTED) {
          put(a, held[i], piece);
        } else {
          put_raised(a.xs, held[i], piece);
        }
      }
    }
    meet_all();
  }

  // gate_up: converts x in place, after the shared expert's products. All warps have read x for them: they have met in
  // `finish`.
  static __device__ __forceinline__ void convert(const Args& a) {
    static_assert(!GATE_UP || RT == 1);
    constexpr int TOGETHER = 4;
    for (int first = threadIdx.x; first < a.K / 8; first += TOGETHER * CONSUMERS) {
      uint4 held[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        held[i] = *reinterpret_cast<const uint4*>(memory(a.xs) + min(first + i * CONSUMERS, a.K / 8 - 1) * 16);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const int piece = first + i * CONSUMERS;
        if (piece >= a.K / 8) break;
        put_fixed_raised(held[i], memory(a.xs), reinterpret_cast<float*>(memory(a.units)), piece / 4, piece % 4);
      }
    }
    meet_all();
  }

  // down of a rank's slice: as `stage`, for h of one choice (`chosen`, unless null) and for h of the shared expert (if
  // `shared`: this CTA has units of it), in one round trip.
  static __device__ __forceinline__ void stage_both(const Args& a, const bf16* chosen, bool shared) {
    static_assert(CONSUMERS / 2 * 8 >= EARLY_WIDTH);
    const bool second = threadIdx.x >= CONSUMERS / 2;
    const int piece = threadIdx.x % (CONSUMERS / 2);
    const bf16* from = second ? a.in_shared : chosen;
    if ((second ? shared : chosen != nullptr) && piece < (second ? a.S : a.K) / 8) {
      const uint4 held = __ldcg(reinterpret_cast<const uint4*>(from) + piece);
      if (second) {
        put_raised(a.xs_shared, held, piece);
      } else {
        put(a, held, piece);
      }
    }
    meet_all();
  }

  // As `stage`, for x = norm(residual) computed here, from a mailbox that is still being written: the same bits as x of
  // mla_decode_router_t1.cu.
  static __device__ __forceinline__ void stage_fresh(const Args& a) {
    static_assert(!GATE_UP || WARPS == fresh::WARPS);
    __shared__ __align__(16) float squares[8];
    __shared__ uint32_t turn_shared;
    const int lane = threadIdx.x % 32, pieces = a.K / 8;
    uint4 w[fresh::PIECES];
    fresh::load_weights(w, a.norm, pieces);
    if (threadIdx.x < 32) {  // lanes 0-7 and 8-15 poll a half of the mailbox each; lane 16 polls which half is written
      const uint32_t* at = lane < 16 ? fresh::late(a.fresh + lane / 8 * (a.K / 2), pieces) : a.mailbox + 1;
      uint32_t said, there;
      do {
        const uint32_t v = mailbox::glance(at);
        said = __shfl_sync(~0u, v, 16);
        there = __ballot_sync(~0u, v != 0) >> said % 2 * 8 & 0xff;
      } while (!mailbox::arrived_turn(said, a.launch) || there != 0xff);
      if (lane == 0) turn_shared = said & 1;
      if (mailbox::sm_of(said) == mailbox::sm_id()) {  // the CTA that selects experts is on this SM: wait for it
        while (!__all_sync(~0u, lane >= a.k || mailbox::arrived(mailbox::glance_choice(a.mailbox, a.k), a.launch))) {
        }
      }
    }
    meet_all();
    uint4 v[fresh::PIECES] = {};
    while (!fresh::look(v, a.fresh + turn_shared * (a.K / 2), pieces)) {
    }
    fresh::normalise(v, w, pieces, a.eps, squares, [] { meet_all(); });
#pragma unroll
    for (int n = 0; n < fresh::PIECES; n++) {
      const int piece = fresh::piece_of(n);
      put_raised(a.xs, v[n], min(piece, pieces));
    }
    meet_all();
  }

  // The pieces of 8 values of x that are staged for the shared expert.
  struct Window {
    int first, end;
  };

  // Offset in a slot of the 16 bytes `column` (0 to 3) of row `row` (0 to 15) of tile rt, in this warp's share.
  // other_half: the same in the row's other 64 bytes.
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

  static __device__ __forceinline__ float bf16_at(const uint8_t* at) {
    return __bfloat162float(*reinterpret_cast<const bf16*>(at));
  }

  // Where a lane's operands are, as offsets in shared memory; `far`: in a row's other 64 bytes. Lane (g, t) has groups
  // t and t + 4 of its warp's share of a slot.
  struct Lane {
    int near, far, below;     // weights of row g in a slot; from there to row g + 8
    int x_near, x_far, step;  // activations of the first slot, or zeros; bytes to those of the next slot
    int unit;                 // of `units`: the first slot's, of group t
    static constexpr int SCALE = COMPACT ? 1 : 2;  // bytes of a scale
  };
  static __device__ __forceinline__ Lane lane_of(const Args& a, int ks, int rt) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = ks * (SHARE / 16);
    const bool zero = g / 2 != t;
    Lane v;
    v.near = place(a, ks, rt, g, t), v.far = other_half(a, v.near), v.below = place(a, ks, rt, g + 8, t) - v.near;
    const int x = a.xs + (first + t) * FIXED_GROUP;
    v.x_near = zero ? a.zeros : x + turned(t, g % 2 * 2);
    v.x_far = zero ? a.zeros : x + 4 * FIXED_GROUP + turned(4 + t, g % 2 * 2);
    v.step = zero ? 0 : PIECE / 16 * FIXED_GROUP;
    v.unit = a.units + (first + t) * 4;
    return v;
  }

  // sums += rows g and g + 8 of this warp's tile times x, over this lane's groups of slot `from`. n: number of the slot
  // in its row; left: bytes that the warp has of it; above, below: scales of the two rows.
  static __device__ __forceinline__ void int4_share(int from, const Lane& v, int n, int left, const uint8_t* above,
                                                    const uint8_t* below, float (&sums)[2]) {
    const uint8_t* slot = memory(from * SLOT);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (left <= h * 64) break;
      const int x = (h ? v.x_far : v.x_near) + n * v.step;
      const uint4 p = *reinterpret_cast<const uint4*>(slot + (h ? v.far : v.near));
      const uint4 q = *reinterpret_cast<const uint4*>(slot + (h ? v.far : v.near) + v.below);
      const uint4 b = *reinterpret_cast<const uint4*>(memory(x)), c = *reinterpret_cast<const uint4*>(memory(x ^ 16));
      const float unit = *reinterpret_cast<const float*>(memory(v.unit + (n * (PIECE / 16) + h * 4) * 4));
      int d[4] = {};
      mma_bytes(d, {bytes_of(p.x << 4), bytes_of(q.x << 4), bytes_of(p.y << 4), bytes_of(q.y << 4)}, b.x, b.y);
      mma_bytes(d, {bytes_of(p.x), bytes_of(q.x), bytes_of(p.y), bytes_of(q.y)}, c.x, c.y);
      mma_bytes(d, {bytes_of(p.z << 4), bytes_of(q.z << 4), bytes_of(p.w << 4), bytes_of(q.w << 4)}, b.z, b.w);
      mma_bytes(d, {bytes_of(p.z), bytes_of(q.z), bytes_of(p.w), bytes_of(q.w)}, c.z, c.w);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint8_t* at = (r ? below : above) + h * 4 * Lane::SCALE;
        const float scale = COMPACT ? static_cast<float>(*at) : bf16_at(at);
        sums[r] += static_cast<float>(d[2 * r] * 256 + d[2 * r + 1]) * unit * scale;
      }
    }
  }

  // Adds what the 4 lanes of a row have.
  static __device__ __forceinline__ void add_lanes(float (&sums)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sums[r] += __shfl_xor_sync(~0u, sums[r], 1);
      sums[r] += __shfl_xor_sync(~0u, sums[r], 2);
    }
  }

  // acc += 16 bytes of weights in row g, at `top`, and in row g + 8, `below` bytes further, times staged x.
  template <bool FP8>
  static __device__ __forceinline__ void multiply_dense(const uint8_t* top, int below, const uint8_t* x,
                                                        float (&acc)[2][4]) {
    constexpr int EACH = FP8 ? 2 : 1;
    uint4 v[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) v[e] = *reinterpret_cast<const uint4*>(x + e * 16);
    const uint4 upper = *reinterpret_cast<const uint4*>(top), lower = *reinterpret_cast<const uint4*>(top + below);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      uint32_t low[4], high[4];
      values<FP8>(upper, lower, e, low, high);
      mma(acc[0], low, v[e].x, v[e].y, bf16());
      mma(acc[1], high, v[e].z, v[e].w, bf16());
    }
  }

  // total = a tile of the shared expert times x; with `step` > 1, of every step-th slot from slot `begin` on. STAGED: x
  // is in shared memory already.
  template <bool FP8, bool STAGED>
  static __device__ __forceinline__ void dense_tile(const Args& a, int buffer, Window& window, int& from, int& phase,
                                                    float (&total)[4], int begin = 0, int step = 1) {
    constexpr int EACH = FP8 ? 2 : 1;    // pieces of x for 16 bytes of weights
    constexpr int PIECES = FP8 ? 8 : 4;  // pieces of x for 64 bytes of weights
    constexpr int SLOT_PIECES = PIECE / 64 * PIECES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int ks = warp % KS, rt = warp / KS, own = ks * SHARE;
    const int all = a.shared.row / 64 * PIECES, most = (a.xs_bytes - 64) / 16, slots = divide_up(a.shared.row, PIECE);
    float acc[2][4] = {};
    const int near = place(a, ks, rt, g, t), far = other_half(a, near), below = place(a, ks, rt, g + 8, t) - near;
    float upper = FP8 ? 1 : 1 / RAISED, lower = upper;
    for (int n = begin; n < slots; n += step) {
      const int piece = n * SLOT_PIECES;
      if (!STAGED && (piece < window.first || min(piece + SLOT_PIECES, all) > window.end)) {
        if (window.end > 0) meet_all();  // all warps have read the previous activations
        window.first = all > most ? piece : 0;
        window.end = min(window.first + (all > most ? most / SLOT_PIECES * SLOT_PIECES : all), all);
        stage<false>(a, a.in_shared + window.first * 8, window.end - window.first);
      }
      barrier_wait(&barriers().full[from], phase);
      const uint8_t* slot = memory(from * SLOT);
      const uint8_t* x = memory(a.xs_shared) + (piece - window.first + own / 64 * PIECES + t * EACH) * 16;
      if (FP8 && n == begin) {
        const float* factor = reinterpret_cast<const float*>(memory(a.held) + buffer * a.block + a.scales);
        upper = factor[GATE_UP ? rt * 8 + g : rt * 16 + g] * (0x1p120f / RAISED);
        lower = factor[GATE_UP ? RT * 8 + rt * 8 + g : rt * 16 + g + 8] * (0x1p120f / RAISED);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (n * PIECE + own + h * 64 >= a.shared.row) break;
        multiply_dense<FP8>(slot + (h ? far : near), below, x + h * PIECES * 16, acc);
      }
      release(a, from, phase);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) total[n] = (acc[0][n] + 16 * acc[1][n]) * (n < 2 ? upper : lower);
  }

  // A quartered unit of the shared expert: QUARTERED_ROWS gate rows and their up rows, four quarters of each. A quarter
  // takes the place of a row of a tile: row q * QUARTERED_ROWS + r of A is quarter q of row r, and column q of B has the
  // activations of quarter q. So a unit has a quarter of a tile's bytes.
  static constexpr int QUARTERED_ROWS = 2, QUARTER_BOX = QUARTERED_ROWS * PIECE;

  // gate, up: this lane's sums of row g of A, in the lanes with t = g / 4.
  template <bool FP8>
  static __device__ __forceinline__ void quartered_unit(const Args& a, int unit, int& from, int& phase, float& gate,
                                                        float& up) {
    constexpr int EACH = FP8 ? 2 : 1, PIECES = FP8 ? 8 : 4;  // as in dense_tile
    const int ks = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int quarter = g / QUARTERED_ROWS, row = g % QUARTERED_ROWS;
    const int line = quarter * QUARTER_BOX + (ks * QUARTERED_ROWS + row) * SHARE + t * 16;
    int x = a.xs + (g % 4 * (a.K / 32) + ks * 2 * PIECES + t * EACH) * 16;
    float acc[2][4] = {};
    float factor[2] = {FP8 ? 1 : 1 / RAISED, FP8 ? 1 : 1 / RAISED};
    for (int n = 0; n < a.quartered; n++) {
      barrier_wait(&barriers().full[from], phase);
      if (FP8 && n == 0) {  // factors of 4 gate rows and 4 up rows, among them the unit's
        const float* of_rows = reinterpret_cast<const float*>(memory(a.quarters + from * 32));
        const float* own = of_rows + unit * QUARTERED_ROWS % 4 + row;
        factor[0] = own[0] * (0x1p120f / RAISED), factor[1] = own[4] * (0x1p120f / RAISED);
      }
      const uint8_t* slot = memory(from * SLOT + line);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        multiply_dense<FP8>(slot + h * 64, SLOT / 2, memory(x + h * PIECES * 16), acc);
      }
      release(a, from, phase);
      x += PIECE / 64 * PIECES * 16;
    }
    const int column = quarter % 2;  // of this lane's two
#pragma unroll
    for (int n = 0; n < 4; n++) acc[0][n] += 16 * acc[1][n];
    gate = (column ? acc[0][1] : acc[0][0]) * factor[0];
    up = (column ? acc[0][3] : acc[0][2]) * factor[1];
  }

  // Lays out shared memory and returns its bytes. `both`: separate buffers for down's two inputs.
  static int arrange(Args& a, bool both) {
    a.scale_row = a.K / (COMPACT ? 32 : 16);
    a.scales = UNIT_ROWS * a.scale_row;
    a.block = a.scales + UNIT_ROWS * (a.shared.factor != nullptr ? 4 : COMPACT ? 2 : 0);
    a.sums = a.slots * SLOT;
    a.quarters = a.sums + 2 * WARPS * 64;
    a.zeros = a.quarters + (GATE_UP ? GATE_UP_SLOTS * 32 : 0);
    a.xs = a.zeros + 64;
    a.xs_bytes = a.K * 2 + 64;
    if (a.shared.tiles) {  // at least the activations of one slot
      a.xs_bytes = max(a.xs_bytes, min(PIECE, a.shared.row) * (a.shared.factor == nullptr ? 1 : 2) + 64);
    }
    a.xs_shared = both ? a.xs + a.xs_bytes : a.xs;
    a.units = a.xs_shared + a.xs_bytes;
    a.held = a.units + divide_up(a.K / 32, 4) * 16;
    return a.held + a.scale_buffers * a.block;
  }
};

}  // namespace moe
