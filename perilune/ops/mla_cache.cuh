// The cache's row of one token: the normalised latent and the rotated key, as latents.py says.
#pragma once
#include "e4m3.cuh"
#include "mla.cuh"

namespace mla {

__device__ __forceinline__ uint32_t rotate(uint32_t pair, float c, float s) {
  float2 v = widen(pair);
  return narrow(v.x * c - v.y * s, v.y * c + v.x * s);
}

template <bool PACKED>
__device__ void write_cache(int token, const bf16* ckv, int64_t stride, const uint4 (&norm)[2], const float* cos,
                            const float* sin, uint8_t* cache, int64_t slots, const int64_t* slot, float eps) {
  int lane = threadIdx.x % 32;
  int64_t to = slot[token];
  if (to < 0 || to >= slots) return;
  const bf16* from = ckv + token * stride;
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
  pe = rotate(pe, cos[token * (ROPE / 2) + lane], sin[token * (ROPE / 2) + lane]);
  float scale = rsqrtf(warp_sum(squares) / LATENT + eps);
  constexpr int LATENT_BYTES = PACKED ? LATENT : LATENT * 2;
  uint8_t* row = cache + to * (LATENT_BYTES + ROPE * 2);
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

}  // namespace mla
