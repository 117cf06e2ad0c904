// Computes and writes a token's row of the latent cache: normalised latent and rotated rope key (latent_cache.py).
#pragma once
#include "cuda/e4m3.cuh"
#include "attention/sm90/mla_shapes.cuh"

namespace mla {

// The new cache rows of a step and their slots. packed: a cache of 640-byte rows (latent_cache.py), else of 576 bf16.
struct NewRows {
  const bf16* ckv;  // [T, LATENT + ROPE], rows `stride` elements apart
  int64_t stride;
  const bf16* norm;        // [LATENT]
  const float *cos, *sin;  // [T, ROPE / 2]
  uint8_t* cache;          // [slots] rows
  int64_t slots;
  const int64_t* slot;  // [T]: row of the cache; below 0: the token is not written
  int packed, T;
  float eps;
};

// NewRows from a launcher's arguments, which are those of cache_rows.arguments.
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

// A lane's part of a row of ckv: latent values 8 lane .. + 7 and 256 + 8 lane .. + 7, pair `lane` of the rope key.
struct NewRow {
  uint4 latent[2];
  uint32_t key;
};

template <bool PACKED>
__device__ void write_row(const NewRows& a, int token, const NewRow& x, const uint4 (&norm)[2]) {
  int lane = threadIdx.x % 32;
  int64_t to = a.slot[token];
  if (to < 0 || to >= a.slots) return;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for (uint32_t word : {x.latent[i].x, x.latent[i].y, x.latent[i].z, x.latent[i].w}) {
      float2 v = widen(word);
      squares += v.x * v.x + v.y * v.y;
    }
  }
  uint32_t pe = rotate(x.key, a.cos[token * (ROPE / 2) + lane], a.sin[token * (ROPE / 2) + lane]);
  float scale = rsqrtf(warp_sum(squares) / LATENT + a.eps);
  constexpr int LATENT_BYTES = PACKED ? LATENT : LATENT * 2;
  uint8_t* row = a.cache + to * (LATENT_BYTES + ROPE * 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto scaled = [scale](uint32_t word, uint32_t weight) {
      float2 v = widen(word), w = widen(weight);
      return narrow(v.x * scale * w.x, v.y * scale * w.y);
    };
    const uint4& from = x.latent[i];
    uint4 y = {scaled(from.x, norm[i].x), scaled(from.y, norm[i].y), scaled(from.z, norm[i].z),
               scaled(from.w, norm[i].w)};
    if (PACKED) {
      *reinterpret_cast<uint2*>(row + i * 256 + lane * 8) = {e4m3::rounded(y.x, y.y), e4m3::rounded(y.z, y.w)};
    } else {
      *reinterpret_cast<uint4*>(row + (i * 256 + lane * 8) * 2) = y;
    }
  }
  *reinterpret_cast<uint32_t*>(row + LATENT_BYTES + lane * 4) = pe;
}

__device__ __forceinline__ void write_row(const NewRows& a, int token, const NewRow& x, const uint4 (&norm)[2]) {
  if (a.packed) {
    write_row<true>(a, token, x, norm);
  } else {
    write_row<false>(a, token, x, norm);
  }
}

// A warp waits for the predecessor, then writes the cache row of `token`.
__device__ __forceinline__ void add_row(const NewRows& a, int token) {
  int lane = threadIdx.x % 32;
  uint4 norm[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) norm[i] = *reinterpret_cast<const uint4*>(a.norm + i * 256 + lane * 8);
  wait_for_predecessor();
  if (token >= a.T) return;
  const bf16* from = a.ckv + token * a.stride;
  NewRow x;
#pragma unroll
  for (int i = 0; i < 2; ++i) x.latent[i] = *reinterpret_cast<const uint4*>(from + i * 256 + lane * 8);
  x.key = *reinterpret_cast<const uint32_t*>(from + LATENT + lane * 2);
  write_row(a, token, x, norm);
}

}  // namespace mla
