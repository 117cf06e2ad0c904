// Absorbed MLA for few tokens a request: attention split over the sequence, then combined and multiplied by W_UV; the
// contract is in mla_decode.py.
//
// `attend`: a tile is 64 query rows (token, head) of one request; each CTA attends a range of the context for one tile.
// A producer warp brings 64 latents at a time (TMA, two stages, 128-byte swizzle). Warpgroup 0 computes the scores and
// the softmax and hands the probabilities on in shared memory; both warpgroups then accumulate 256 columns of the output
// each. `share_work` gives every CTA its range from the contexts, so that one launch fits all contexts.
// `combine`: a cluster of CTAs per head and 32 tokens. A CTA weighs the ranges' outputs for its part of the latent,
// multiplies by its rows of W_UV (streamed before the wait), and the cluster sums over its CTAs.
//
// No activation's pointer is __restrict__: the compiler may move a load through such a one above the wait.
#include <cuda.h>

#include "mla.cuh"

using namespace mla;

namespace {

constexpr int ROWS = 64, KEYS = 64, CHUNKS = WIDTH / 64, STAGES = 2, GROUP = 16, MAX_RANGES = 256;
constexpr int CHUNK_BYTES = 64 * 128, TILE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int PARTIAL = ROWS * LATENT;  // elements of one CTA's output: [LATENT / 64][ROWS][64], swizzled as in memory
constexpr int ATTEND_THREADS = 384, COMBINE_THREADS = 256;
constexpr uint32_t EVERYONE = ~0u;

// What a CTA does: rows row .. row + rows - 1 of request b against positions start .. end - 1.
struct Work {
  int b, row, rows, start, end, count, context, first_token;
};

// Where `combine` finds a token's ranges: CTA first + row / ROWS * ranges + i, with row = index * H + head.
struct Found {
  int first, ranges, index, unused;
};

struct Control {
  float rescale[ROWS], inverse[ROWS];
  int changed[4];
  uint64_t query, full[STAGES], empty[STAGES];
  Work work;
};
constexpr int ATTEND_BYTES = TILE_BYTES * (1 + STAGES) + CHUNK_BYTES + 1024;
static_assert(sizeof(Control) <= 1024 && ATTEND_BYTES <= 227 * 1024);

// --- barriers, copies, products

__device__ __forceinline__ void barrier_init(uint64_t* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* b, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(
          shared_address(b)),
      "r"(parity)
      : "memory");
}
// What a warpgroup gives back or takes of the SM's registers.
template <int n, bool more>
__device__ __forceinline__ void registers() {
  if constexpr (more) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
  }
}
// Shared memory written by ordinary stores is about to be read by tensor cores or the copy engine.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void tile_copy(void* to, const CUtensorMap* map, uint64_t* barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}
__device__ __forceinline__ void copy_out(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

template <int id>
__device__ __forceinline__ void meet() {  // of both warpgroups
  asm volatile("bar.sync %0, 256;" ::"n"(id) : "memory");
}
template <int id>
__device__ __forceinline__ void announce() {
  asm volatile("bar.arrive %0, 256;" ::"n"(id) : "memory");
}

// 128-byte swizzled operand: `repeat` is the distance of the next 64 columns (columns fastest), ignored if k is fastest.
__device__ __forceinline__ uint64_t operand(const void* shared, int repeat) {
  return (shared_address(shared) & 0x3ffff) >> 4 | static_cast<uint64_t>(repeat >> 4) << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
template <int n>
__device__ __forceinline__ void settle(float (&d)[n]) {  // keeps uses of d below the wait
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d [64 x 64] (+)= a [64 x 16] b [64 x 16]^T, both with k fastest.
__device__ __forceinline__ void scores_product(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
      " %32, %33, add, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(add));
}

// d [64 x 256] += a [64 x 16] b [16 x 256], a with k fastest, b with columns fastest.
__device__ __forceinline__ void values_product(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127},"
      " %128, %129, 1, 1, 1, 0, 1;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b));
}

// Four 8 x 8 matrices of a 128-byte swizzled [rows][64] chunk: rows from `row` and row + 8, columns from `column` and + 8.
__device__ __forceinline__ void store_matrices(char* chunk, int row, int column, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  int lane = threadIdx.x % 32, r = row + lane % 16, piece = column / 8 + lane / 16;
  uint32_t to = shared_address(chunk) + r * 128 + ((piece ^ (r & 7)) * 16);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// --- who does what

__device__ __forceinline__ int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<uint32_t>(a) + b - 1) / static_cast<uint32_t>(b));
}

// One warp. Every tile with a context gets at least one of the gridDim.x CTAs, the others go where contexts are long.
// With `found`, writes down where every token's ranges are; without, returns this CTA's work.
template <bool record>
__device__ Work share_work(const int* query_start, const int* context, int B, int T, int H, int least, Found* found) {
  int lane = threadIdx.x % 32, mine = blockIdx.x;
  int start = 0, count = 0, known = 0, n = 0;  // of request base + lane; n tiles
  auto read = [&](int b) {
    bool real = b < B;
    start = real ? query_start[b] : 0;
    count = real ? query_start[b + 1] - start : 0;
    known = real ? context[b] : 0;
    n = known > 0 ? ceil_div(count * H, ROWS) : 0;
  };
  int groups = 0, tiles = 0;  // of all tiles together; their number
  for (int b = lane; b - lane < B; b += 32) {
    read(b);
    tiles += n;
    groups += n * ceil_div(known, GROUP);
  }
  tiles = __reduce_add_sync(EVERYONE, tiles);
  groups = __reduce_add_sync(EVERYONE, groups);
  int spare = static_cast<int>(gridDim.x) - tiles;
  int length = spare > 0 ? max(least, ceil_div(groups, spare) * GROUP) : 1 << 30;
  int before = 0;
  for (int base = 0; base < B; base += 32) {
    int ranges = 0, size = 0;
    if (B > 32) read(base + lane);
    if (n) {
      size = ceil_div(known, min(ceil_div(known, length), MAX_RANGES));
      int unit = size >= 8 * KEYS ? KEYS : GROUP;
      size = (size + unit - 1) & -unit;
      ranges = ceil_div(known, size);
    }
    int until = n * ranges;
    if (B > 1) {
#pragma unroll
      for (int i = 1; i < 32; i <<= 1) {
        int other = __shfl_up_sync(EVERYONE, until, i);
        if (lane >= i) until += other;
      }
    }
    int first = before + until - n * ranges;
    if constexpr (record) {
      for (int i = 0; i < count; ++i) found[start + i] = {first, ranges, i, 0};
    } else {
      bool here = mine >= first && mine < first + n * ranges;
      uint32_t who = __ballot_sync(EVERYONE, here);
      if (who) {
        int from = __ffs(who) - 1;
        auto of = [from](int v) { return __shfl_sync(EVERYONE, v, from); };
        first = of(first), ranges = of(ranges), size = of(size), count = of(count), known = of(known), start = of(start);
        int tile = static_cast<uint32_t>(mine - first) / static_cast<uint32_t>(ranges);
        int range = mine - first - tile * ranges;
        return {base + from, tile * ROWS, min(ROWS, count * H - tile * ROWS), range * size,
                min((range + 1) * size, known), count, known, start};
      }
    }
    before += __shfl_sync(EVERYONE, until, 31);
  }
  if constexpr (record) {
    for (int t = (B ? query_start[B] : 0) + lane; t < T; t += 32) found[t] = {0, 0, 0, 0};
  }
  return {};
}

// --- attention over one range

// The producer warp. Latents of earlier steps, and the tables, are not written by the stream's last kernels: the first
// tiles of them are asked for before the wait.
__device__ __forceinline__ void bring(const Work& work, const CUtensorMap* q, const CUtensorMap* few,
                                      const CUtensorMap* many, const int* table, uint32_t block, int H, char* shared,
                                      Control* control) {
  int lane = threadIdx.x % 32, groups = ceil_div(work.end - work.start, GROUP), old = work.context - work.count;
  constexpr int PER_TILE = KEYS / GROUP;
  auto row_of = [&](int group) {
    uint32_t position = work.start + min(group, groups - 1) * GROUP, page = position / block;
    return static_cast<int>(table[page] * block + (position - page * block));
  };
  auto bring_queries = [&] {
    wait_for_predecessor();
    if (lane == 0) barrier_expect(&control->query, TILE_BYTES);
    __syncwarp();
    if (lane < CHUNKS) {
      tile_copy(shared + lane * CHUNK_BYTES, q, &control->query, lane * 64, work.first_token * H + work.row);
    }
  };
  bool waited = false;
  int rows = row_of(lane);  // of 32 groups, one a lane
  for (int first = 0; first < groups; first += PER_TILE) {
    int tile = first / PER_TILE, stage = tile % STAGES, here = min(PER_TILE, groups - first);
    if (!waited && (tile >= STAGES || work.start + (first + PER_TILE) * GROUP > old)) {
      bring_queries();
      waited = true;
    }
    if (first && first % 32 == 0) rows = row_of(first + lane);
    char* to = shared + TILE_BYTES * (1 + stage);
    if (tile >= STAGES) barrier_wait(&control->empty[stage], (tile / STAGES - 1) % 2);
    if (lane == 0) barrier_expect(&control->full[stage], here * GROUP * WIDTH * 2);
    __syncwarp();
    int row = __shfl_sync(EVERYONE, rows, first % 32);
    if (here == PER_TILE && block % KEYS == 0 && row % KEYS == 0) {
      if (lane < CHUNKS) tile_copy(to + lane * CHUNK_BYTES, many, &control->full[stage], lane * 64, row);
      continue;
    }
    for (int g = 0; g < here; ++g) {
      row = __shfl_sync(EVERYONE, rows, first % 32 + g);
      if (lane < CHUNKS) {
        tile_copy(to + lane * CHUNK_BYTES + g * GROUP * 128, few, &control->full[stage], lane * 64, row);
      }
    }
  }
  if (!waited) bring_queries();
}

__device__ __forceinline__ void add_values(float (&o)[128], const char* probabilities, const char* values) {
  products_begin();
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
    values_product(o, operand(probabilities + k * 32, 0), operand(values + k * 2048, CHUNK_BYTES));
  }
  products_commit();
}

__device__ __forceinline__ void add_scores(float (&s)[32], const char* q, const char* keys) {
  products_begin();
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      scores_product(s, operand(q + c * CHUNK_BYTES + k * 32, 0), operand(keys + c * CHUNK_BYTES + k * 32, 0), c || k);
    }
  }
  products_commit();
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

// Columns 256 `half` .. + 255 of the range's output, by one warpgroup; `shared` is the query's memory, free by now.
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
  publish();
  if (half) {
    asm volatile("bar.sync 4, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 3, 128;" ::: "memory");
  }
  if (threadIdx.x % 128 < 4) {
    int chunk = threadIdx.x % 128;
    copy_out(partial + (half * 4 + chunk) * ROWS * 64, shared + chunk * CHUNK_BYTES, rows * 128);
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}

__global__ void __launch_bounds__(ATTEND_THREADS, 1)
    attend(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap few,
           const __grid_constant__ CUtensorMap many, const int* tables, const int* query_start, const int* context,
           bf16* partials, float* weights, Found* found, int B, int M, int T, int H, int block, int least, float scale) {
  extern __shared__ __align__(1024) char shared[];
  Control* control = reinterpret_cast<Control*>(shared + TILE_BYTES * (1 + STAGES) + CHUNK_BYTES);
  char* probabilities = shared + TILE_BYTES * (1 + STAGES);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_successor_start();
  if (threadIdx.x == 0) {
    barrier_init(&control->query, 1);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(&control->full[i], 1);
      barrier_init(&control->empty[i], 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (const CUtensorMap* map : {&q, &few, &many}) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
  }
  if (warp == 8) {
    Work work = share_work<false>(query_start, context, B, T, H, least, nullptr);
    if (lane == 0) control->work = work;
  }
  __syncthreads();
  const Work work = control->work;
  if (warp >= 8) {
    registers<40, false>();
    if (warp == 8 && work.rows) {
      bring(work, &q, &few, &many, tables + static_cast<int64_t>(work.b) * M, block, H, shared, control);
    } else {
      wait_for_predecessor();
      if (blockIdx.x == 0 && warp == 9) share_work<true>(query_start, context, B, T, H, least, found);
    }
  } else {
  registers<232, true>();
  wait_for_predecessor();
  if (work.rows == 0) return;
  int tiles = ceil_div(work.end - work.start, KEYS), last_keys = work.end - work.start - (tiles - 1) * KEYS;
  int row = warp % 4 * 16 + lane / 4;
  bf16* partial = partials + static_cast<int64_t>(blockIdx.x) * PARTIAL;
  float o[128] = {};
  if (warp < 4) {
    float s[32];
    // Row r sees the positions before unseen(r).
    auto unseen = [&](int r) { return min(work.end, work.context - work.count + (work.row + r) / H + 1); };
    int all_see = unseen(0), end_low = unseen(row), end_high = unseen(row + 8);
    float top_low = -INFINITY, top_high = -INFINITY, sum_low = 0, sum_high = 0;
    barrier_wait(&control->query, 0);
    for (int tile = 0; tile < tiles; ++tile) {
      int stage = tile % STAGES, at = work.start + tile * KEYS;
      const char* keys = shared + TILE_BYTES * (1 + stage);
      barrier_wait(&control->full[stage], tile / STAGES % 2);
      add_scores(s, shared, keys);
      products_wait<0>();
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
      // A maximum that grows by less than 2^8 is not followed: the sums bear it, and most tiles need no rescaling.
      auto follow = [scale](float& top, float max) {
        max *= scale;
        if (!(max > top + 8)) return 1.0f;
        float factor = exp2f(top - max);
        top = max;
        return factor;
      };
      float factor_low = follow(top_low, max_low), factor_high = follow(top_high, max_high);
      float base_low = top_low == -INFINITY ? 0 : top_low, base_high = top_high == -INFINITY ? 0 : top_high;
      sum_low *= factor_low;
      sum_high *= factor_high;
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        s[i] = exp2f(fmaf(s[i], scale, -base_low));
        s[i + 1] = exp2f(fmaf(s[i + 1], scale, -base_low));
        s[i + 2] = exp2f(fmaf(s[i + 2], scale, -base_high));
        s[i + 3] = exp2f(fmaf(s[i + 3], scale, -base_high));
        sum_low += s[i] + s[i + 1];
        sum_high += s[i + 2] + s[i + 3];
      }
      if (tile) meet<2>();  // the other warpgroup has read the last probabilities
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
          control->inverse[row] = sum_low > 0 ? 1 / sum_low : 0;
          control->inverse[row + 8] = sum_high > 0 ? 1 / sum_high : 0;
          weights[row * gridDim.x + blockIdx.x] = top_low + log2f(sum_low);
          weights[(row + 8) * gridDim.x + blockIdx.x] = top_high + log2f(sum_high);
        }
      }
      publish();
      meet<1>();
      if (changed) rescale(o, factor_low, factor_high);
      add_values(o, probabilities, keys);
      products_wait<0>();
      settle(o);
      if (lane == 0) barrier_arrive(&control->empty[stage]);
    }
    write_out(o, 0, control, shared, partial, work.rows);
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      int stage = tile % STAGES;
      char* keys = shared + TILE_BYTES * (1 + stage);
      barrier_wait(&control->full[stage], tile / STAGES % 2);
      if (tile == tiles - 1 && last_keys < KEYS) {
        // Past the end lies anything, nan included, and a probability of 0 does not hide that.
        for (int i = threadIdx.x % 128; i < (KEYS - last_keys) * (LATENT / 8); i += 128) {
          int key = last_keys + i / (LATENT / 8), piece = i % (LATENT / 8);
          *reinterpret_cast<uint4*>(keys + piece / 8 * CHUNK_BYTES + key * 128 + piece % 8 * 16) = uint4{};
        }
        publish();
      }
      meet<1>();
      if (control->changed[warp - 4]) rescale(o, control->rescale[row], control->rescale[row + 8]);
      add_values(o, probabilities, keys + 4 * CHUNK_BYTES);
      products_wait<0>();
      settle(o);
      if (tile < tiles - 1) announce<2>();
      if (lane == 0) barrier_arrive(&control->empty[stage]);
    }
    write_out(o, 1, control, shared, partial, work.rows);
  }
  }
}

// --- combination

__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ float read_of(const float* p, int rank) {
  uint32_t there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
}

// CLUSTER CTAs (x) per head, each with LATENT / CLUSTER of the latent; 32 tokens (y). `few`: at most 8 tokens, and the
// warps share a token's ranges; else a warp has up to four tokens of its own.
template <int CLUSTER, bool few>
__global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const bf16* partials, const float* weights, const Found* found, const bf16* w_uv, bf16* out, int ctas, int T,
            int H) {
  constexpr int K = LATENT / CLUSTER, LANES = K / 8, SIDE = 32 / LANES, STRIDE = K + 32;
  constexpr int MINE = few ? 1 : TOKENS / 8, AT_ONCE = few ? 16 : 1, WARPS = COMBINE_THREADS / 32;
  using Weights = HeadWeights<K, VALUE>;
  extern __shared__ __align__(1024) char shared[];
  bf16* latent = reinterpret_cast<bf16*>(shared + Weights::BYTES);      // [TOKENS][STRIDE]
  float* product = reinterpret_cast<float*>(latent + TOKENS * STRIDE);  // [TOKENS][VALUE], and [WARPS][K] before
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, from = rank * K;
  int first = blockIdx.y * TOKENS, tokens = min(TOKENS, T - first);
  Weights values{shared};
  values.load(w_uv + (static_cast<int64_t>(head) * LATENT + from) * VALUE, VALUE, threadIdx.x, COMBINE_THREADS);
  copies_commit();
  wait_for_predecessor();
  let_successor_start();  // not before: whoever starts after this kernel may take the cache's rows as written

  int sharing = !few || tokens > 4 ? 1 : tokens > 2 ? 2 : tokens > 1 ? 4 : 8;
  int column = from + lane % LANES * 8, side = lane / LANES;
  auto token_of = [&](int i) { return few ? warp / sharing : warp + WARPS * i; };
  int ranges[MINE], longest = 0;
  const float* weight[MINE];
  const bf16* partial[MINE];
  float top[MINE], inverse[MINE], sum[MINE][8] = {};
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    int token = token_of(i);
    Found f = token < tokens ? found[first + token] : Found{};
    int row = f.index * H + head, slot = f.first + row / ROWS * f.ranges;
    row %= ROWS;
    ranges[i] = f.ranges;
    longest = max(longest, f.ranges);
    weight[i] = weights + row * ctas + slot;
    partial[i] = partials + static_cast<int64_t>(slot) * PARTIAL + column / 64 * (ROWS * 64) + row * 64 +
                 ((column / 8) % 8 ^ (row & 7)) * 8;
  }
  if constexpr (few) {
    float v[MAX_RANGES / 32];
    top[0] = -INFINITY;
#pragma unroll
    for (int j = 0; j < MAX_RANGES / 32; ++j) {
      v[j] = lane + j * 32 < ranges[0] ? weight[0][lane + j * 32] : -INFINITY;
      top[0] = fmaxf(top[0], v[j]);
    }
    top[0] = warp_max(top[0]);
    float total = 0;
#pragma unroll
    for (int j = 0; j < MAX_RANGES / 32; ++j) total += v[j] == -INFINITY ? 0 : exp2f(v[j] - top[0]);
    total = warp_sum(total);
    inverse[0] = total > 0 ? 1 / total : 0;
  } else {
    float v[MINE];
#pragma unroll
    for (int i = 0; i < MINE; ++i) v[i] = lane < ranges[i] ? weight[i][lane] : -INFINITY;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      top[i] = v[i];
      for (int s = lane + 32; s < ranges[i]; s += 32) top[i] = fmaxf(top[i], weight[i][s]);
      top[i] = warp_max(top[i]);
      float total = v[i] == -INFINITY ? 0 : exp2f(v[i] - top[i]);
      for (int s = lane + 32; s < ranges[i]; s += 32) total += exp2f(weight[i][s] - top[i]);
      total = warp_sum(total);
      inverse[i] = total > 0 ? 1 / total : 0;
    }
  }
  int step = SIDE * sharing, begin = warp % sharing * SIDE + side;
  for (int s0 = few ? begin : side; s0 < longest; s0 += step * AT_ONCE) {
    uint4 x[MINE][AT_ONCE];
    float share[MINE][AT_ONCE];
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        int s = s0 + j * step;
        bool valid = s < ranges[i];
        x[i][j] = valid ? *reinterpret_cast<const uint4*>(partial[i] + static_cast<int64_t>(s) * PARTIAL) : uint4{};
        share[i][j] = valid ? weight[i][s] : -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (few && s0 + j * step >= longest) break;
        float w = share[i][j] == -INFINITY ? 0 : exp2f(share[i][j] - top[i]) * inverse[i];
        uint32_t words[4] = {x[i][j].x, x[i][j].y, x[i][j].z, x[i][j].w};
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          float2 y = widen(words[l]);
          sum[i][l * 2] += w * y.x;
          sum[i][l * 2 + 1] += w * y.y;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int l = LANES; l < 32; l <<= 1) sum[i][j] += __shfl_xor_sync(EVERYONE, sum[i][j], l);
    }
  }
  if (few && sharing > 1) {
    if (lane < LANES) {
      float4* to = reinterpret_cast<float4*>(product + warp * K + lane * 8);
      to[0] = {sum[0][0], sum[0][1], sum[0][2], sum[0][3]};
      to[1] = {sum[0][4], sum[0][5], sum[0][6], sum[0][7]};
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * K; i += COMBINE_THREADS) {
      float y = 0;
      for (int w = 0; w < sharing; ++w) y += product[(i / K * sharing + w) * K + i % K];
      latent[i / K * STRIDE + i % K] = __float2bfloat16(y);
    }
  } else if (lane < LANES) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      uint4 y = {narrow(sum[i][0], sum[i][1]), narrow(sum[i][2], sum[i][3]), narrow(sum[i][4], sum[i][5]),
                 narrow(sum[i][6], sum[i][7])};
      if (token_of(i) < tokens) *reinterpret_cast<uint4*>(latent + token_of(i) * STRIDE + lane * 8) = y;
    }
  }
  copies_wait<0>();
  __syncthreads();
  uint32_t a[K / 16][4];
#pragma unroll
  for (int k = 0; k < K / 16; ++k) values.fragment(a[k], k, warp * 16);
#pragma unroll 1
  for (int group = 0; group * 8 < tokens; ++group) {
    float d[2][4] = {};
#pragma unroll
    for (int k = 0; k < K / 32; ++k) {
      uint4 x = *reinterpret_cast<const uint4*>(latent + (group * 8 + lane / 4) * STRIDE + k * 32 + lane % 4 * 8);
      mma(d[0], a[k * 2], x.x, x.y, bf16());
      mma(d[1], a[k * 2 + 1], x.z, x.w, bf16());
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product[(group * 8 + lane % 4 * 2 + i % 2) * VALUE + warp * 16 + lane / 4 + i / 2 * 8] = d[0][i] + d[1][i];
    }
  }
  cluster_meet();
  constexpr int OWN = VALUE / CLUSTER;
  for (int i = threadIdx.x; i < tokens * OWN; i += COMBINE_THREADS) {
    int token = i / OWN, column_out = rank * OWN + i % OWN;
    float y = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) y += read_of(product + token * VALUE + column_out, r);
    out[(static_cast<int64_t>(first + token) * H + head) * VALUE + column_out] = __float2bfloat16(y);
  }
  cluster_meet();  // nobody leaves while others read its sums
}

// --- launching

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
  static Encode found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult status;
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &status);
    return e == cudaSuccess && status == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(f) : nullptr;
  }();
  return found;
}

// Rows of WIDTH bf16 in boxes of 64 columns and `box` rows.
bool describe(CUtensorMap* map, const void* rows, int64_t count, int box) {
  cuuint64_t sizes[2] = {WIDTH, static_cast<cuuint64_t>(count)}, strides[1] = {WIDTH * 2};
  cuuint32_t boxes[2] = {64, static_cast<cuuint32_t>(box)}, steps[2] = {1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(rows), sizes, strides, boxes, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int CLUSTER>
int start_combine(const void* partials, const void* weights, const void* found, const void* w_uv, void* out,
                  int64_t ctas, int64_t T, int64_t H, void* stream) {
  constexpr int K = LATENT / CLUSTER;
  constexpr size_t bytes = HeadWeights<K, VALUE>::BYTES + TOKENS * (K + 32) * 2 + TOKENS * VALUE * 4;
  static_assert(TOKENS * VALUE >= COMBINE_THREADS / 32 * K);
  dim3 grid(H * CLUSTER, (T + TOKENS - 1) / TOKENS);
  return launch(T <= 8 ? combine<CLUSTER, true> : combine<CLUSTER, false>, grid, dim3(COMBINE_THREADS), bytes, stream,
                CLUSTER, static_cast<const bf16*>(partials), static_cast<const float*>(weights),
                static_cast<const Found*>(found), static_cast<const bf16*>(w_uv), static_cast<bf16*>(out), ctas, T, H);
}

}  // namespace

// partials [ctas, 64, 512] bf16, weights [64, ctas] float and found [T, 4] int32 are scratch. -1: no driver entry point
// for tensor maps, or they are refused.
API int mla_decode(const void* q, const void* cache, int64_t cache_rows, int64_t block, const void* tables, int64_t M,
                   const void* query_start, const void* context, const void* w_uv, void* partials, void* weights,
                   void* found, void* out, int64_t B, int64_t T, int64_t H, int64_t ctas, int64_t least, float scale,
                   void* stream) {
  if (T == 0) return 0;
  CUtensorMap queries, few, many;
  if (!encoder() || !describe(&queries, q, T * H, ROWS) || !describe(&few, cache, cache_rows, GROUP) ||
      !describe(&many, cache, cache_rows, KEYS)) {
    return -1;
  }
  int failed = launch(attend, dim3(ctas), dim3(ATTEND_THREADS), ATTEND_BYTES, stream, 1, queries, few, many,
                      static_cast<const int*>(tables), static_cast<const int*>(query_start),
                      static_cast<const int*>(context), static_cast<bf16*>(partials), static_cast<float*>(weights),
                      static_cast<Found*>(found), B, M, T, H, block, least, scale * 1.4426950408889634f);
  if (failed) return failed;
  if (H >= 48) return start_combine<2>(partials, weights, found, w_uv, out, ctas, T, H, stream);
  if (H >= 24) return start_combine<4>(partials, weights, found, w_uv, out, ctas, T, H, stream);
  return start_combine<8>(partials, weights, found, w_uv, out, ctas, T, H, stream);
}
