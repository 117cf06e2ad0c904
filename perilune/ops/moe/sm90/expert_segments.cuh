// The split of work of moe_int4_mma_tma.cu: routed pairs are grouped by expert, and CTAs take ranges.
#pragma once
#include "moe/sm90/int4_mma.cuh"

namespace moe {

constexpr int MAX_EXPERTS = 1024, MAX_PAIRS = 2048;
constexpr int COLUMNS = 4;  // max pairs of a segment

// Pairs of one expert: the expert, the first pair's index in the sorted list, their number.
struct Segment {
  uint32_t bits;
  __device__ Segment(int expert, int first, int count) : bits(expert | first << 10 | count << 22) {}
  __device__ int expert() const { return bits & 1023; }
  __device__ int first() const { return bits >> 10 & 4095; }
  __device__ int count() const { return bits >> 22; }
};

// In shared memory.
struct Plan {
  Segment* segments;
  uint16_t* sorted;  // pairs, by expert
  uint32_t* counts;  // scratch: pairs of every expert
  uint32_t* places;  // scratch, of every pair: its index among its expert's pairs << 16 | the expert
};
__host__ __device__ __forceinline__ int most_segments(int pairs, int experts) {
  return min(pairs, experts + pairs / COLUMNS);
}

// By one warp: groups the pairs of ids [T, k] by expert, skips ids that are no expert, returns the number of segments.
__device__ inline int group_pairs(const int* ids, int T, int k, int E, const Plan& p) {
  const int lane = threadIdx.x % 32, pairs = T * k;
  const auto id_of = [&](int n) {
    const int e = n < pairs ? __ldcg(ids + n) : -1;
    return static_cast<unsigned>(e) < static_cast<unsigned>(E) ? e : -1;
  };
  if (pairs <= 32) {  // one lane per pair; counting all experts would take 3 us
    const int e = id_of(lane);
    const unsigned same = __match_any_sync(~0u, e), before = (1u << lane) - 1;
    const int place = __popc(same & before), size = min(COLUMNS, __popc(same) - place);
    const bool first = e >= 0 && place % COLUMNS == 0;  // first pair of a segment
    int at = first ? size : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int v = __shfl_up_sync(~0u, at, d);
      if (lane >= d) at += v;
    }
    if (first) at -= size;
    const unsigned all = __ballot_sync(~0u, first);
    unsigned those = same;
    for (int n = place / COLUMNS * COLUMNS; n > 0; n--) those &= those - 1;
    at = __shfl_sync(~0u, at, __ffs(those) - 1);
    if (e >= 0) p.sorted[at + place % COLUMNS] = lane;
    if (first) p.segments[__popc(all & before)] = Segment(e, at, size);
    __syncwarp();
    return __popc(all);
  }
  // Counts chosen experts only and reads ids once: a pass over all experts, and a memory latency for every 32 pairs,
  // took most of the time.
  constexpr uint32_t NONE = 0xffff;
#pragma unroll 8
  for (int n = lane; n < pairs; n += 32) {
    const int e = id_of(n);
    p.places[n] = e & NONE;
    if (e >= 0) p.counts[e] = 0;
  }
  __syncwarp();
  // No atomicAdd: every CTA makes the same plan for itself, and CUDA promises no order among a warp's atomics.
  for (int first = 0; first < pairs; first += 32) {
    const int n = first + lane;
    const uint32_t e = n < pairs ? p.places[n] : NONE;
    const unsigned same = __match_any_sync(~0u, e);
    const int place = __popc(same & ((1u << lane) - 1)), at = e != NONE ? p.counts[e] : 0;
    __syncwarp();
    if (e != NONE) p.places[n] = e | static_cast<uint32_t>(at + place) << 16;
    if (e != NONE && place == 0) p.counts[e] = at + __popc(same);
    __syncwarp();
  }
  // An expert's first pair has index 0, so its word is the expert alone. Prefix sums: segments << 16 | pairs.
  const auto size_of = [](uint32_t count) { return (count + COLUMNS - 1) / COLUMNS << 16 | count; };
  uint32_t own = 0;
  for (int n = lane; n < pairs; n += 32) {
    const uint32_t e = p.places[n];
    if (e < NONE) own += size_of(p.counts[e]);
  }
  uint32_t before = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t v = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += v;
  }
  const uint32_t all = __shfl_sync(~0u, before, 31);
  before -= own;
  for (int n = lane; n < pairs; n += 32) {
    const uint32_t e = p.places[n];
    if (e >= NONE) continue;
    const int count = p.counts[e], at = before & 0xffff;
    for (int i = 0; i < count; i += COLUMNS) {
      p.segments[(before >> 16) + i / COLUMNS] = Segment(e, at + i, min(COLUMNS, count - i));
    }
    p.counts[e] = at;  // where the expert's pairs begin
    before += size_of(count);
  }
  __syncwarp();
  for (int n = lane; n < pairs; n += 32) {
    const uint32_t word = p.places[n];
    if ((word & NONE) != NONE) p.sorted[p.counts[word & NONE] + (word >> 16)] = n;
  }
  __syncwarp();
  return all >> 16;
}

struct Range {
  int first, end;
};

// An equal part of `all` for every CTA.
__device__ __forceinline__ Range equal_part(int all) {
  const int64_t c = blockIdx.x, G = gridDim.x;
  return {static_cast<int>(c * all / G), static_cast<int>((c + 1) * all / G)};
}

// Ranges of `all` items, numbered from 0, that CTAs take one at a time. In each round the CTAs share QUARTERS / 4 of
// the remaining items equally: long runs of one expert at first, short ranges at last, so that all CTAs end together.
// Each CTA calls number() with increasing i. reciprocal: 2^32 / (4 CTAs), rounded up; a division would take the thread
// that issues copies about 100 clocks.
template <int QUARTERS>
class Ranges {
 public:
  __device__ Ranges(int all, uint32_t reciprocal)
      : all_(all), reciprocal_(reciprocal), round_(0), first_(0), size_(share()) {}
  // Empty if none is left.
  __device__ Range number(int i) {
    const int G = gridDim.x;
    for (; i - round_ >= G && first_ < all_; round_ += G) {
      first_ += size_ * G;
      size_ = share();
    }
    if (first_ >= all_) return {all_, all_};
    const int from = first_ + (i - round_) * size_;
    return {min(from, all_), min(from + size_, all_)};
  }

 private:
  __device__ int share() const { return max(__umulhi((all_ - first_) * QUARTERS, reciprocal_), 1u); }
  int all_;
  uint32_t reciprocal_;
  int round_, first_, size_;  // number of the round's first range, its first item, items of a range
};

}  // namespace moe
