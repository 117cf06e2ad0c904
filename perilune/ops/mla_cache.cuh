// The cache's row of one token: the normalised latent and the rotated key, as latents.py says.
#pragma once
#include "e4m3.cuh"
#include "mla.cuh"

namespace mla {

// What a step adds to the cache, and where. `packed`: rows of 640 bytes, as latents.py says, else of 576 bf16.
struct NewRows {
  const bf16* ckv;  // [T, LATENT + ROPE], rows `stride` elements apart
  int64_t stride;
  const bf16* norm;        // [LATENT]
  const float *cos, *sin;  // [T, ROPE / 2]
  uint8_t* cache;          // [slots] rows
  int64_t slots;
  const int64_t* slot;  // [T]; below 0: none
  int packed, T;
  float eps;
};

// From a launcher's arguments, in the order of new_rows.py.
inline NewRows new_rows(const void* ckv, int64_t stride, const void* norm, const void* cos, const void* sin,
                        void* cache, int64_t slots, int64_t packed, const void* slot, int64_t T, float eps) {
  return {static_cast<const bf16*>(ckv), stride, static_cast<const bf16*>(norm), static_cast<const float*>(cos),
          static_cast<const float*>(sin), static_cast<uint8_t*>(cache), slots, static_cast<const int64_t*>(slot),
          static_cast<int>(packed), static_cast<int>(T), eps};
}

__device__ __forceinline__ uint32_t rotate(uint32_t pair, float c, float s) {
  float2 v = widen(pair);
  return narrow(v.x * c - v.y * s, v.y * c + v.x * s);
}

template <bool PACKED>
__device__ void write_row(const NewRows& a, int token, const uint4 (&norm)[2]) {
  int lane = threadIdx.x % 32;
  int64_t to = a.slot[token];
  if (to < 0 || to >= a.slots) return;
  const bf16* from = a.ckv + token * a.stride;
  uint4 x[2];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = *reinterpret_cast<const uint4*>(from + i * 256 + lane * 8);
    for (uint32_t word : {x[i].x, x[i].y, x[i].z, x[i].w}) {
      float2 v = widen(word);
      squares += v.x * v.x + v.y * v.y;
    }
  }
  uint32_t pe = *reinterpret_cast<const uint32_t*>(from + LATENT + lane * 2);
  pe = rotate(pe, a.cos[token * (ROPE / 2) + lane], a.sin[token * (ROPE / 2) + lane]);
  float scale = rsqrtf(warp_sum(squares) / LATENT + a.eps);
  constexpr int LATENT_BYTES = PACKED ? LATENT : LATENT * 2;
  uint8_t* row = a.cache + to * (LATENT_BYTES + ROPE * 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto scaled = [scale](uint32_t word, uint32_t weight) {
      float2 v = widen(word), w = widen(weight);
      return narrow(v.x * scale * w.x, v.y * scale * w.y);
    };
    uint4 y = {scaled(x[i].x, norm[i].x), scaled(x[i].y, norm[i].y), scaled(x[i].z, norm[i].z),
               scaled(x[i].w, norm[i].w)};
    if (PACKED) {
      *reinterpret_cast<uint2*>(row + i * 256 + lane * 8) = {e4m3::rounded(y.x, y.y), e4m3::rounded(y.z, y.w)};
    } else {
      *reinterpret_cast<uint4*>(row + (i * 256 + lane * 8) * 2) = y;
    }
  }
  *reinterpret_cast<uint32_t*>(row + LATENT_BYTES + lane * 4) = pe;
}

// By a warp per token: the whole of what a kernel does for `token`, the wait included.
__device__ __forceinline__ void add_row(const NewRows& a, int token) {
  int lane = threadIdx.x % 32;
  uint4 norm[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) norm[i] = *reinterpret_cast<const uint4*>(a.norm + i * 256 + lane * 8);
  wait_for_predecessor();
  if (token >= a.T) return;
  if (a.packed) {
    write_row<true>(a, token, norm);
  } else {
    write_row<false>(a, token, norm);
  }
}

}  // namespace mla
