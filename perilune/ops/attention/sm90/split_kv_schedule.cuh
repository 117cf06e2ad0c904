// The split-KV schedule of decode attention: which CTA computes which range of a context for which query rows.
#pragma once
#include "attention/sm90/mla_shapes.cuh"

namespace mla {

constexpr int ROWS = 64, KEYS = 64;  // query rows (token, head) of a tile; latents of a tile
constexpr int QUARTER = ROWS / 4;    // rows of a CTA if four CTAs share a tile
constexpr int GROUP = 16;            // latents that are always adjacent in the cache: the smallest block size
constexpr int MAX_RANGES = 256;
constexpr int PARTIAL = ROWS * LATENT;  // elements of a range's output: [LATENT / 64][ROWS][64], 128-byte swizzle
constexpr uint32_t EVERYONE = ~0u;

// The work of a CTA: query rows row .. row + rows - 1 of request b against positions start .. end - 1. quarter: the
// quarter of these rows that this CTA computes; below 0: all. slot: index of its output in `partials`. The request has
// `count` query tokens, from token first_token on, and `context` positions.
struct Work {
  int b, row, rows, start, end, count, context, first_token, slot, quarter;
};

// The ranges of a token: range i has slot first + row / ROWS * ranges + i, with row = index * H + head.
struct Found {
  int first, ranges, index, unused;
};

// Loads a value that every layer reads again, with the policy that keeps it in L2.
__device__ __forceinline__ int kept(const int* p) {
  int v;
  asm volatile("ld.global.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(v) : "l"(p), "l"(KEPT) : "memory");
  return v;
}

__host__ __device__ __forceinline__ int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<uint32_t>(a) + b - 1) / static_cast<uint32_t>(b));
}

// a / b for 0 <= a < 2^24 and b > 0, in a fraction of the time of the exact division.
__device__ __forceinline__ int quotient(int a, int b) {
  int q = __float2int_rz(__fdividef(static_cast<float>(a), static_cast<float>(b))), rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}
__device__ __forceinline__ int quotient_up(int a, int b) { return quotient(a + b - 1, b); }

// Called by one warp. Every tile of query rows with a context gets at least one CTA; the other CTAs split the longest
// contexts into ranges of at least `least` positions. If no range exceeds KEYS positions and there are enough CTAs,
// each quarter of a range's rows that has any rows (QUARTER each) gets a CTA of its own. Returns this CTA's work. With
// `record`, writes instead the ranges of tokens first_token .. first_token + tokens - 1 to `found`.
template <bool record>
__device__ __forceinline__ Work share_work(const int* query_start, const int* context, int B, int H, int ctas,
                                           int least, Found* found, int first_token, int tokens) {
  int lane = threadIdx.x % 32, mine = blockIdx.x, quarter = -1;
  int start = 0, count = 0, known = 0, n = 0;  // request base + lane; n: its tiles
  auto read = [&](int b) {
    bool real = b < B;
    start = real ? kept(query_start + b) : 0;
    count = real ? kept(query_start + b + 1) - start : 0;
    known = real ? kept(context + b) : 0;
    n = known > 0 ? ceil_div(count * H, ROWS) : 0;
  };
  if constexpr (record) {
    if (lane < tokens) found[lane] = {};
    __syncwarp();
    if (least < 0) {  // one token, at most -least ranges, groups dealt to them round robin (split_kv_short.cuh)
      const int token = kept(query_start), next = kept(query_start + 1), there = kept(context);
      if (lane == 0 && next > token && there > 0) found[0] = {0, min(-least, ceil_div(there, GROUP)), 0, 0};
      return {};
    }
  }
  int groups = 0, tiles = 0;  // groups of latents of all tiles together; number of tiles
#pragma unroll 1
  for (int b = lane; b - lane < B; b += 32) {
    read(b);
    tiles += n;
    groups += n * ceil_div(known, GROUP);
  }
  tiles = __reduce_add_sync(EVERYONE, tiles);
  groups = __reduce_add_sync(EVERYONE, groups);
  int spare = ctas - tiles;
  int length = spare > 0 ? max(least, ceil_div(groups, spare) * GROUP) : 1 << 30;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < B; base += 32) {
    int ranges = 0, size = 0;
    if (B > 32) read(base + lane);
    if (n) {
      size = quotient_up(known, min(length < known ? quotient_up(known, length) : 1, MAX_RANGES));
      int unit = size > KEYS ? KEYS : GROUP;  // whole tiles: a partial tile costs as much as a whole one
      size = (size + unit - 1) & -unit;
      ranges = quotient_up(known, size);
    }
    int until = n * ranges;
    if (!record && B <= 32 && !__any_sync(EVERYONE, size > KEYS)) {
      const int quarters = __reduce_max_sync(EVERYONE, n ? ceil_div(min(count * H, ROWS), QUARTER) : 1);
      if (static_cast<int>(__reduce_add_sync(EVERYONE, until)) * quarters <= ctas) {
        quarter = mine % quarters;
        mine /= quarters;
      }
    }
    if (B > 1) {
#pragma unroll
      for (int i = 1; i < 32; i <<= 1) {
        int other = __shfl_up_sync(EVERYONE, until, i);
        if (lane >= i) until += other;
      }
    }
    int first = before + until - n * ranges;
    if constexpr (record) {
      int i = max(0, first_token - start), end = min(count, first_token + tokens - start);
#pragma unroll 1
      for (; i < end; ++i) found[start + i - first_token] = {first, ranges, i, 0};
    } else {
      bool here = mine >= first && mine < first + n * ranges;
      uint32_t who = __ballot_sync(EVERYONE, here);
      if (who) {
        int from = __ffs(who) - 1;
        auto of = [from](int v) { return __shfl_sync(EVERYONE, v, from); };
        first = of(first), ranges = of(ranges), size = of(size);
        count = of(count), known = of(known), start = of(start);
        int tile = quotient(mine - first, ranges);
        int range = mine - first - tile * ranges;
        int rows = min(ROWS, count * H - tile * ROWS);
        if (quarter * QUARTER >= rows) return {};
        return {base + from, tile * ROWS, rows, range * size, min((range + 1) * size, known), count, known, start, mine,
                quarter};
      }
    }
    before += __shfl_sync(EVERYONE, until, 31);
  }
  return {};
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mla
