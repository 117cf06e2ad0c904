// Absorbed MLA over one range of a context, by one CTA.
//
// A tile is 64 query rows (token, head) of one request. A producer warp loads 64 latents at a time (TMA, two stages,
// 128-byte swizzle). Warpgroup 0 computes the scores and the softmax and writes the probabilities to shared memory;
// then both warpgroups accumulate 256 columns of the output each. Packed latents (latent_cache.py) are loaded as e4m3
// bytes; the producer's warpgroup converts them to bf16 while the other warpgroups compute the previous tile.
#pragma once
#include "cuda/e4m3.cuh"
#include "attention/sm90/split_kv_short.cuh"
#include "cuda/tensor_map.cuh"

namespace mla {

constexpr int CHUNKS = WIDTH / 64, STAGES = 2, ATTEND_THREADS = 384, WIDENERS = 128;
constexpr int CHUNK_BYTES = 64 * 128, TILE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int ROPE_AT = LATENT / 64 * CHUNK_BYTES, BYTES_AT = ROPE_AT / 2;  // offsets in a tile: rope, packed latents

struct Control {
  float rescale[ROWS], inverse[ROWS];
  int changed[4];
  uint64_t query, full[STAGES], ready[STAGES], empty[STAGES];
  Work work;
};
constexpr int ATTEND_BYTES = TILE_BYTES * (1 + STAGES) + CHUNK_BYTES + 1024;
static_assert(sizeof(Control) <= 1024 && ATTEND_BYTES <= 227 * 1024);

// Tensor maps of the cache's rows, with boxes of GROUP rows (few) and of KEYS rows (many). few, many: all of a bf16
// cache, or the rope keys of a packed cache. few_bytes, many_bytes: the latents of a packed cache.
struct Maps {
  CUtensorMap few, many, few_bytes, many_bytes;
};

// d [64 x 64] (+)= a [64 x 16] b [64 x 16]^T, both with k fastest.
__device__ __forceinline__ void scores_product(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %34, 0;"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PERILUNE_D4 "}, %32, %33, add, 1, 1, 0, 0; }"
      : PERILUNE_C4
      : "l"(a), "l"(b), "r"(add));
}
// d [64 x 256] += a [64 x 16] b [16 x 256], a with k fastest, b with columns fastest.
__device__ __forceinline__ void values_product(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" PERILUNE_D16 "}, %128, %129, 1, 1, 1, 0, 1;"
               : PERILUNE_C16
               : "l"(a), "l"(b));
}
template <int n>
__device__ __forceinline__ void settle(float (&d)[n]) {  // keeps the compiler from using d before the wait
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int id>
__device__ __forceinline__ void meet() {  // a named barrier of both warpgroups
  asm volatile("bar.sync %0, 256;" ::"n"(id) : "memory");
}
template <int id>
__device__ __forceinline__ void arrive() {
  asm volatile("bar.arrive %0, 256;" ::"n"(id) : "memory");
}

// Converts latents from e4m3 to bf16 in place. The bytes are in the second half of the tile's memory, so the bf16 of a
// chunk overwrite only bytes of earlier chunks, or of the chunks just read. Called by the producer's warpgroup.
__device__ __forceinline__ void widen_latents(char* tile, uint64_t* ready) {
  constexpr int OF_CHUNK = KEYS * 4, AT_ONCE = 2 * OF_CHUNK, EACH = AT_ONCE / WIDENERS;  // pieces of 16 bytes
  const int thread = threadIdx.x % WIDENERS;
#pragma unroll 1
  for (int first = 0; first < LATENT / 64 * OF_CHUNK; first += AT_ONCE) {
    uint4 v[EACH];
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      v[n] = *reinterpret_cast<const uint4*>(tile + BYTES_AT + (first + n * WIDENERS + thread) * 16);
    }
    named_sync(5, WIDENERS);  // all threads have read the bytes that are overwritten now
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int piece = n * WIDENERS + thread, row = piece / 4 % KEYS, column = piece % 4 * 2;
      char* to = tile + (first + piece) / OF_CHUNK * CHUNK_BYTES + row * 128;
      auto store = [&](int c, uint32_t a, uint32_t b) {
        *reinterpret_cast<uint4*>(to + ((c ^ (row & 7)) * 16)) =
            make_uint4(e4m3::pair<0>(a), e4m3::pair<1>(a), e4m3::pair<0>(b), e4m3::pair<1>(b));
      };
      store(column, v[n].x, v[n].y);
      store(column + 1, v[n].z, v[n].w);
    }
  }
  shared_writes_visible();
  barrier_arrive(ready);
}

// The producer warp. It loads the first tile before the wait: no kernel that may still run writes block tables or
// latents of earlier steps. It loads the second tile after the query, which would otherwise arrive after that tile.
template <bool PACKED>
__device__ __forceinline__ void bring(const Work& work, const CUtensorMap* q, const Maps* maps, const int* table,
                                      int block, int H, char* shared, Control* control) {
  int lane = threadIdx.x % 32, groups = ceil_div(work.end - work.start, GROUP), old = work.context - work.count;
  constexpr int PER_TILE = KEYS / GROUP;
  auto row_of = [&](int group) {
    int position = work.start + min(group, groups - 1) * GROUP, page = quotient(position, block);
    return kept(table + page) * block + (position - page * block);
  };
  auto bring_queries = [&] {
    wait_for_predecessor();
    if (lane == 0 && work.quarter < 0) {
      barrier_expect(&control->query, TILE_BYTES);
      tensor_load(shared, q, 0, work.first_token * H + work.row, 0, &control->query);
    }
  };
  auto widen = [&](int tile) {
    barrier_wait(&control->full[tile % STAGES], tile / STAGES % 2);
    widen_latents(shared + TILE_BYTES * (1 + tile % STAGES), &control->ready[tile % STAGES]);
  };
  bool waited = false;
  int rows = row_of(lane);  // the cache rows of 32 groups, one per lane
#pragma unroll 1
  for (int first = 0; first < groups; first += PER_TILE) {
    int tile = first / PER_TILE, stage = tile % STAGES, here = min(PER_TILE, groups - first);
    if (!waited && (tile > 0 || work.start + (first + PER_TILE) * GROUP > old)) {
      bring_queries();
      waited = true;
    }
    if (first && first % 32 == 0) rows = row_of(first + lane);
    char* to = shared + TILE_BYTES * (1 + stage);
    if (tile >= STAGES) barrier_wait(&control->empty[stage], (tile / STAGES - 1) % 2);
    if (lane == 0) barrier_expect(&control->full[stage], here * GROUP * (PACKED ? LATENT + ROPE * 2 : WIDTH * 2));
    int row = __shfl_sync(EVERYONE, rows, first % 32);
    uint32_t adjacent = __ballot_sync(EVERYONE, rows == row + (lane - first % 32) * GROUP) >> first % 32;
    if (here == PER_TILE && (adjacent & ((1 << PER_TILE) - 1)) == (1 << PER_TILE) - 1) {
      if (lane == 0) {
        tensor_load(PACKED ? to + ROPE_AT : to, &maps->many, 0, row, 0, &control->full[stage]);
        if (PACKED) tensor_load(to + BYTES_AT, &maps->many_bytes, 0, row, 0, &control->full[stage]);
      }
      here = 0;
    }
#pragma unroll 1
    for (int g = 0; g < here; ++g) {
      row = __shfl_sync(EVERYONE, rows, first % 32 + g);
      if (lane == 0) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          char* bytes = to + BYTES_AT + c * (CHUNK_BYTES / 2) + g * GROUP * 64;
          char* values = to + c * CHUNK_BYTES + g * GROUP * 128;
          if (PACKED && c < CHUNKS - 1) {
            tensor_load(bytes, &maps->few_bytes, 0, row, c, &control->full[stage]);
          } else {
            tensor_load(values, &maps->few, 0, row, PACKED ? 0 : c, &control->full[stage]);
          }
        }
      }
    }
    if (PACKED) {  // fill all stages before the first tile is converted
      const bool last = first + PER_TILE >= groups;
      if (tile == STAGES - 1 || (last && tile < STAGES)) {
        for (int i = 0; i < tile; ++i) widen(i);
      }
      if (tile >= STAGES - 1 || last) widen(tile);
    }
  }
  if (!waited) bring_queries();
}

__device__ __forceinline__ void add_values(float (&o)[128], const char* probabilities, const char* values) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
    values_product(o, slab_descriptor(probabilities + k * 32), transposed_descriptor(values + k * 2048, CHUNK_BYTES));
  }
  wgmma_commit();
}

__device__ __forceinline__ void add_scores(float (&s)[32], const char* q, const char* keys) {
  wgmma_fence();
#pragma unroll 1
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int at = c * CHUNK_BYTES + k * 32;
      scores_product(s, slab_descriptor(q + at), slab_descriptor(keys + at), c + k);
    }
  }
  wgmma_commit();
}

__device__ __forceinline__ void rescale(float (&o)[128], float low, float high) {
#pragma unroll
  for (int i = 0; i < 128; i += 4) {
    o[i] *= low;
    o[i + 1] *= low;
    o[i + 2] *= high;
    o[i + 3] *= high;
  }
}

// A warpgroup writes columns 256 half .. + 255 of the range's output. shared: the query's memory, which is free by now.
__device__ void write_out(float (&o)[128], int half, const Control* control, char* shared, bf16* partial, int rows) {
  int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16;
  rescale(o, control->inverse[row + lane / 4], control->inverse[row + lane / 4 + 8]);
  shared += half * 4 * CHUNK_BYTES;
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    store_matrices(shared + j / 8 * CHUNK_BYTES, row, j % 8 * 8, narrow(o[j * 4], o[j * 4 + 1]),
                   narrow(o[j * 4 + 2], o[j * 4 + 3]), narrow(o[j * 4 + 4], o[j * 4 + 5]),
                   narrow(o[j * 4 + 6], o[j * 4 + 7]));
  }
  shared_writes_visible();
  named_sync(3 + half, 128);
  if (threadIdx.x % 128 == 0) {
    bool whole = rows == ROWS;
    partial += half * 4 * ROWS * 64;
#pragma unroll 1
    for (int chunk = 0; chunk < (whole ? 1 : 4); ++chunk) {
      bulk_store(partial + chunk * ROWS * 64, shared + chunk * CHUNK_BYTES, whole ? 4 * CHUNK_BYTES : rows * 128);
    }
    bulk_stores_read();
  }
}

template <bool PACKED>
__global__ void __launch_bounds__(ATTEND_THREADS, 1)
    attend(const __grid_constant__ CUtensorMap q, const __grid_constant__ Maps maps, const bf16* rows,
           const int* tables, const int* query_start, const int* context, bf16* partials, float* weights, int B, int M,
           int H, int block, int least, float scale) {
  extern __shared__ __align__(1024) char shared[];
  Control* control = reinterpret_cast<Control*>(shared + TILE_BYTES * (1 + STAGES) + CHUNK_BYTES);
  char* probabilities = shared + TILE_BYTES * (1 + STAGES);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_successor_start();
  if (threadIdx.x == 0) {
    barrier_init(&control->query, 1);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(&control->full[i], 1);
      barrier_init(&control->ready[i], WIDENERS);
      barrier_init(&control->empty[i], 8);
    }
    barriers_visible();
    prefetch_map(&q);
    prefetch_map(&maps.many);
    if (PACKED) prefetch_map(&maps.many_bytes);
  }
  if (warp >= 8) {
    registers_give<56>();
    Work work{};
    if (warp == 8) {
      work = share_work<false>(query_start, context, B, H, gridDim.x, least, nullptr, 0, 0);
      if (lane == 0) control->work = work;
    }
    asm volatile("bar.sync 0;" ::: "memory");
    if (work.rows) {
      bring<PACKED>(work, &q, &maps, tables + static_cast<int64_t>(work.b) * M, block, H, shared, control);
    } else {
      if (PACKED) {
        const int tiles = ceil_div(control->work.end - control->work.start, KEYS);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
          barrier_wait(&control->full[tile % STAGES], tile / STAGES % 2);
          widen_latents(shared + TILE_BYTES * (1 + tile % STAGES), &control->ready[tile % STAGES]);
        }
      }
      if (control->work.rows || blockIdx.x == 0) wait_for_predecessor();
    }
  } else {
    registers_take<224>();
    int half = __shfl_sync(EVERYONE, warp / 4, 0), row = warp % 4 * 16 + lane / 4;
    asm volatile("bar.sync 0;" ::: "memory");
    const Work work = control->work;
    // A CTA without work ends at once. CTA 0 always waits, so that this kernel does not end before its predecessors.
    if (work.rows == 0 && blockIdx.x > 0) return;
    wait_for_predecessor();
    if (work.rows == 0) return;
    bf16* partial = partials + static_cast<int64_t>(work.slot) * PARTIAL;
    if (work.quarter >= 0) {
      const int skipped = work.quarter * QUARTER;
      const auto arrived = [&] {
        barrier_wait(&control->full[0], 0);
        if (PACKED) barrier_wait(&control->ready[0], 0);
      };
      const auto unseen = [&](int r) {
        return min(work.end, work.context - work.count + quotient(work.row + skipped + r, H) + 1);
      };
      attend_quarter<Short<KEYS, KEYS>>(
          rows + (static_cast<int64_t>(work.first_token) * H + work.row + skipped) * WIDTH,
          min(QUARTER, work.rows - skipped), shared + TILE_BYTES, shared, work.start, work.end, scale,
          partial + skipped * 64, weights + skipped * gridDim.x + work.slot, gridDim.x, arrived, unseen);
      return;
    }
    int tiles = ceil_div(work.end - work.start, KEYS);
    // Row r sees the positions before unseen(r).
    auto unseen = [&](int r) { return min(work.end, work.context - work.count + quotient(work.row + r, H) + 1); };
    int all_see = unseen(0), end_low = unseen(row), end_high = unseen(row + 8);
    float s[32], o[128] = {}, top_low = -INFINITY, top_high = -INFINITY, sum_low = 0, sum_high = 0;
    if (half == 0) barrier_wait(&control->query, 0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      int stage = tile % STAGES, at = work.start + tile * KEYS;
      char* keys = shared + TILE_BYTES * (1 + stage);
      barrier_wait(&control->full[stage], tile / STAGES % 2);
      if (PACKED) barrier_wait(&control->ready[stage], tile / STAGES % 2);
      if (half == 0) {
        add_scores(s, shared, keys);
        wgmma_wait<0>();
        settle(s);
        if (at + KEYS > all_see) {
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            int position = at + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (position >= (i & 2 ? end_high : end_low)) s[i] = -INFINITY;
          }
        }
        float max_low = s[0], max_high = s[2];
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          max_low = fmaxf(max_low, fmaxf(s[i], s[i + 1]));
          max_high = fmaxf(max_high, fmaxf(s[i + 2], s[i + 3]));
        }
#pragma unroll
        for (int i = 1; i < 4; i <<= 1) {
          max_low = fmaxf(max_low, __shfl_xor_sync(EVERYONE, max_low, i));
          max_high = fmaxf(max_high, __shfl_xor_sync(EVERYONE, max_high, i));
        }
        // Update the running maximum only if it grows by a factor above 2^8: fp32 sums have room for that factor, so
        // most tiles need no rescaling.
        auto follow = [scale](float& top, float max) {
          max *= scale;
          if (!(max > top + 8)) return 1.0f;
          float factor = power_of_two(top - max);
          top = max;
          return factor;
        };
        float factor_low = follow(top_low, max_low), factor_high = follow(top_high, max_high);
        float base_low = top_low == -INFINITY ? 0 : top_low, base_high = top_high == -INFINITY ? 0 : top_high;
        sum_low *= factor_low;
        sum_high *= factor_high;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          s[i] = power_of_two(fmaf(s[i], scale, -base_low));
          s[i + 1] = power_of_two(fmaf(s[i + 1], scale, -base_low));
          s[i + 2] = power_of_two(fmaf(s[i + 2], scale, -base_high));
          s[i + 3] = power_of_two(fmaf(s[i + 3], scale, -base_high));
          sum_low += s[i] + s[i + 1];
          sum_high += s[i + 2] + s[i + 3];
        }
        if (tile) meet<2>();  // the other warpgroup has read the previous tile's probabilities
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          store_matrices(probabilities, warp * 16, j * 8, narrow(s[j * 4], s[j * 4 + 1]),
                         narrow(s[j * 4 + 2], s[j * 4 + 3]), narrow(s[j * 4 + 4], s[j * 4 + 5]),
                         narrow(s[j * 4 + 6], s[j * 4 + 7]));
        }
        bool changed = __any_sync(EVERYONE, factor_low != 1 || factor_high != 1) && tile;
        if (lane == 0) control->changed[warp] = changed;
        if (lane % 4 == 0) {
          control->rescale[row] = factor_low;
          control->rescale[row + 8] = factor_high;
        }
        if (tile == tiles - 1) {
#pragma unroll
          for (int i = 1; i < 4; i <<= 1) {
            sum_low += __shfl_xor_sync(EVERYONE, sum_low, i);
            sum_high += __shfl_xor_sync(EVERYONE, sum_high, i);
          }
          if (lane % 4 == 0) {
            control->inverse[row] = sum_low > 0 ? __frcp_rn(sum_low) : 0;
            control->inverse[row + 8] = sum_high > 0 ? __frcp_rn(sum_high) : 0;
            weights[row * gridDim.x + work.slot] = top_low + __log2f(sum_low);
            weights[(row + 8) * gridDim.x + work.slot] = top_high + __log2f(sum_high);
          }
        }
      } else if (at + KEYS > work.end) {
        // Rows past the end may hold anything: 0 x NaN is NaN, so set them to zero.
        int from = work.end - at;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < (KEYS - from) * (LATENT / 8); i += 128) {
          int key = from + i / (LATENT / 8), piece = i % (LATENT / 8);
          *reinterpret_cast<uint4*>(keys + piece / 8 * CHUNK_BYTES + key * 128 + piece % 8 * 16) = uint4{};
        }
      }
      shared_writes_visible();
      meet<1>();
      if (control->changed[warp % 4]) rescale(o, control->rescale[row], control->rescale[row + 8]);
      add_values(o, probabilities, keys + half * 4 * CHUNK_BYTES);
      wgmma_wait<0>();
      settle(o);
      if (half && tile < tiles - 1) arrive<2>();
      if (lane == 0) barrier_arrive(&control->empty[stage]);
    }
    write_out(o, half, control, shared, partial, work.rows);
  }
}

}  // namespace mla
