// Shared by mla_decode_output_t1.cu and mla_decode_output_mma.cu: the layout of values, a tile's exchange with peers.
#pragma once
#include "cuda/peers.cuh"
#include "cuda/weight_stream.cuh"

namespace stream {

// Stores values k .. k + 7 in the layout that `multiply` reads (weight_stream.cuh).
template <typename W>
__device__ __forceinline__ void place(typename W::Value* xs, int k, const uint32_t (&pairs)[4]) {
  constexpr int LANE = 16 / W::BYTES;
  const int lane = k / LANE % 4, second = k / (W::BYTES == 1 ? 8 : W::CHUNK) % 2;
  auto* to = reinterpret_cast<uint2*>(xs + k / BLOCK * BLOCK + lane * 16 + second * 4);
  to[0] = make_uint2(pairs[0], pairs[2]);
  to[2] = make_uint2(pairs[1], pairs[3]);
}

// A warp's exchange of a tile (8 rows of y). Lanes 2 r and 2 r + 1 exchange the two halves of the tile with rank r.
struct Sent {
  int tile;      // below 0: the warp has sent no tile
  uint32_t old;  // lanes 0-3: the residual's pairs
  uint2 own;     // this rank's two pairs of the lane's half

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ bool of_peer(const Peers& peers) const {
    return lane() / 2 < peers.ranks && lane() / 2 != peers.rank;
  }
  __device__ __forceinline__ int place() const { return AFTER_WORDS + tile * 2 + lane() % 2; }

  // v: this rank's partial sum of row lane % 8.
  __device__ __forceinline__ void send(const Peers& peers, uint32_t epoch, float v) {
    const uint32_t mine = __bfloat16_as_ushort(__float2bfloat16(v)), pair = mine | __shfl_down_sync(~0u, mine, 1) << 16;
    own.x = __shfl_sync(~0u, pair, lane() % 2 * 4), own.y = __shfl_sync(~0u, pair, lane() % 2 * 4 + 2);
    if (!of_peer(peers)) return;
    hopper::send(peers.word(lane() / 2, peers.rank, epoch, place()), make_uint4(own.x, epoch, own.y, epoch));
  }

  // The new residual, in lanes 0-3 a pair each: the ranks' parts, added in order, plus `old`. NaN if a part is missing.
  __device__ __forceinline__ uint32_t added(const Peers& peers, uint32_t epoch) const {
    uint4 got = make_uint4(own.x, epoch, own.y, epoch);
    bool missing = of_peer(peers);
    const uint4* from = missing ? peers.word(peers.rank, lane() / 2, epoch, place()) : nullptr;
    const bool patient = *static_cast<const volatile uint32_t*>(peers.control) == 0;
    uint64_t begin = 0;
    for (int polls = 1;; polls++) {
      if (missing) got = look(from), missing = !arrived_word(got, epoch);
      if (!__any_sync(~0u, missing)) break;
      if (__any_sync(~0u, too_long(peers, polls, begin, patient))) {
        if (missing && patient) report(peers, lane() / 2);
        return NAN_PAIR;
      }
    }
    float low = 0, high = 0;
    for (int r = 0; r < peers.ranks; r++) {
      const int half = r * 2 + lane() / 2 % 2;
      const uint32_t x = __shfl_sync(~0u, got.x, half), z = __shfl_sync(~0u, got.z, half);
      const float2 f = widen(lane() % 2 ? z : x);
      low += f.x, high += f.y;
    }
    const float2 before = widen(old);
    return narrow(low + before.x, high + before.y);
  }
};

}  // namespace stream
