// Absorbed MLA for few tokens a request: attention split over the sequence, then combined and multiplied by W_UV; the
// contract is in mla_decode.py.
//
// `attend`: a tile is 64 query rows (token, head) of one request; each CTA attends a range of the context for one tile.
// A producer warp brings 64 latents at a time (TMA, two stages, 128-byte swizzle). Warpgroup 0 computes the scores and
// the softmax and hands the probabilities on in shared memory; both warpgroups then accumulate 256 columns of the
// output each. `share_work` gives every CTA its range from the contexts, so that one launch fits all contexts.
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
constexpr int TOKENS = 32;  // of one CTA of `combine`
constexpr int ATTEND_THREADS = 384, COMBINE_THREADS = 256;
constexpr uint32_t EVERYONE = ~0u;

// What a CTA does: rows row .. row + rows - 1 of request b against positions start .. end - 1.
struct Work {
  int b, row, rows, start, end, count, context, first_token;
};

// Where a token's ranges are: CTA first + row / ROWS * ranges + i, with row = index * H + head.
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
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* b, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(shared_address(b)),
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

// A box of 64 columns, some rows and some chunks of 64 columns, from `row` and `chunk` on; one thread.
__device__ __forceinline__ void tile_copy(void* to, const CUtensorMap* map, uint64_t* barrier, int row, int chunk) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(row), "r"(chunk)
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

// 128-byte swizzled operand: `repeat` is the distance of the next 64 columns if columns are fastest, else ignored.
__device__ __forceinline__ uint64_t operand(const void* shared, int repeat) {
  return (shared_address(shared) & 0x3ffff) >> 4 | static_cast<uint64_t>(repeat >> 4) << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
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

// Four 8 x 8 matrices of a 128-byte swizzled [rows][64] chunk: rows from `row` and row + 8, columns likewise.
__device__ __forceinline__ void store_matrices(char* chunk, int row, int column, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  int lane = threadIdx.x % 32, r = row + lane % 16, piece = column / 8 + lane / 16;
  uint32_t to = shared_address(chunk) + r * 128 + ((piece ^ (r & 7)) * 16);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// --- who does what

__device__ __forceinline__ int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<uint32_t>(a) + b - 1) / static_cast<uint32_t>(b));
}

// a / b for 0 <= a < 2^24 and b > 0, in a fraction of the time of the exact division.
__device__ __forceinline__ int quotient(int a, int b) {
  int q = __float2int_rz(__fdividef(static_cast<float>(a), static_cast<float>(b))), rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}
__device__ __forceinline__ int quotient_up(int a, int b) { return quotient(a + b - 1, b); }

// One warp. Every tile with a context gets at least one of the CTAs, the others go where contexts are long. Returns
// this CTA's work, or writes down where the ranges of `tokens` tokens from `first_token` on are.
template <bool record>
__device__ __forceinline__ Work share_work(const int* query_start, const int* context, int B, int H, int ctas,
                                           int least, Found* found, int first_token, int tokens) {
  int lane = threadIdx.x % 32, mine = blockIdx.x;
  int start = 0, count = 0, known = 0, n = 0;  // of request base + lane; n tiles
  auto read = [&](int b) {
    bool real = b < B;
    start = real ? query_start[b] : 0;
    count = real ? query_start[b + 1] - start : 0;
    known = real ? context[b] : 0;
    n = known > 0 ? ceil_div(count * H, ROWS) : 0;
  };
  if constexpr (record) {
    if (lane < tokens) found[lane] = {};
    __syncwarp();
  }
  int groups = 0, tiles = 0;  // of all tiles together; their number
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
      int unit = size > KEYS ? KEYS : GROUP;  // part of a tile costs as much as a whole one
      size = (size + unit - 1) & -unit;
      ranges = quotient_up(known, size);
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
        return {base + from, tile * ROWS, min(ROWS, count * H - tile * ROWS), range * size,
                min((range + 1) * size, known), count, known, start};
      }
    }
    before += __shfl_sync(EVERYONE, until, 31);
  }
  return {};
}

// --- attention over one range

// The producer warp. Latents of earlier steps, and the tables, are not written by the stream's last kernels: the first
// tiles of them are asked for before the wait.
__device__ __forceinline__ void bring(const Work& work, const CUtensorMap* q, const CUtensorMap* few,
                                      const CUtensorMap* many, const int* table, int block, int H, char* shared,
                                      Control* control) {
  int lane = threadIdx.x % 32, groups = ceil_div(work.end - work.start, GROUP), old = work.context - work.count;
  constexpr int PER_TILE = KEYS / GROUP;
  auto row_of = [&](int group) {
    int position = work.start + min(group, groups - 1) * GROUP, page = quotient(position, block);
    return table[page] * block + (position - page * block);
  };
  auto bring_queries = [&] {
    wait_for_predecessor();
    if (lane == 0) {
      barrier_expect(&control->query, TILE_BYTES);
      tile_copy(shared, q, &control->query, work.first_token * H + work.row, 0);
    }
  };
  bool waited = false;
  int rows = row_of(lane);  // of 32 groups, one a lane
#pragma unroll 1
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
    int row = __shfl_sync(EVERYONE, rows, first % 32);
    uint32_t adjacent = __ballot_sync(EVERYONE, rows == row + (lane - first % 32) * GROUP) >> first % 32;
    if (here == PER_TILE && (adjacent & ((1 << PER_TILE) - 1)) == (1 << PER_TILE) - 1) {
      if (lane == 0) tile_copy(to, many, &control->full[stage], row, 0);
      continue;
    }
#pragma unroll 1
    for (int g = 0; g < here; ++g) {
      row = __shfl_sync(EVERYONE, rows, first % 32 + g);
      if (lane == 0) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          tile_copy(to + c * CHUNK_BYTES + g * GROUP * 128, few, &control->full[stage], row, c);
        }
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
#pragma unroll 1
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      scores_product(s, operand(q + c * CHUNK_BYTES + k * 32, 0), operand(keys + c * CHUNK_BYTES + k * 32, 0), c + k);
    }
  }
  products_commit();
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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
  asm volatile("bar.sync %0, 128;" ::"r"(3 + half) : "memory");
  if (threadIdx.x % 128 == 0) {
    bool whole = rows == ROWS;
    partial += half * 4 * ROWS * 64;
#pragma unroll 1
    for (int chunk = 0; chunk < (whole ? 1 : 4); ++chunk) {
      copy_out(partial + chunk * ROWS * 64, shared + chunk * CHUNK_BYTES, whole ? 4 * CHUNK_BYTES : rows * 128);
    }
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}

__global__ void __launch_bounds__(ATTEND_THREADS, 1)
    attend(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap few,
           const __grid_constant__ CUtensorMap many, const int* tables, const int* query_start, const int* context,
           bf16* partials, float* weights, int B, int M, int H, int block, int least, float scale) {
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
  if (warp >= 8) {
    registers<56, false>();
    Work work{};
    if (warp == 8) {
      work = share_work<false>(query_start, context, B, H, gridDim.x, least, nullptr, 0, 0);
      if (lane == 0) control->work = work;
    }
    asm volatile("bar.sync 0;" ::: "memory");
    if (work.rows) {
      bring(work, &q, &few, &many, tables + static_cast<int64_t>(work.b) * M, block, H, shared, control);
    } else {
      wait_for_predecessor();
    }
  } else {
    registers<224, true>();
    int half = __shfl_sync(EVERYONE, warp / 4, 0), row = warp % 4 * 16 + lane / 4;
    asm volatile("bar.sync 0;" ::: "memory");
    const Work work = control->work;
    wait_for_predecessor();
    if (work.rows == 0) return;
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
      if (half == 0) {
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
            control->inverse[row] = sum_low > 0 ? __frcp_rn(sum_low) : 0;
            control->inverse[row + 8] = sum_high > 0 ? __frcp_rn(sum_high) : 0;
            weights[row * gridDim.x + blockIdx.x] = top_low + __log2f(sum_low);
            weights[(row + 8) * gridDim.x + blockIdx.x] = top_high + __log2f(sum_high);
          }
        }
      } else if (at + KEYS > work.end) {
        // Past the end lies anything, nan included, and a probability of 0 does not hide that.
        int from = work.end - at;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < (KEYS - from) * (LATENT / 8); i += 128) {
          int key = from + i / (LATENT / 8), piece = i % (LATENT / 8);
          *reinterpret_cast<uint4*>(keys + piece / 8 * CHUNK_BYTES + key * 128 + piece % 8 * 16) = uint4{};
        }
      }
      publish();
      meet<1>();
      if (control->changed[warp % 4]) rescale(o, control->rescale[row], control->rescale[row + 8]);
      add_values(o, probabilities, keys + half * 4 * CHUNK_BYTES);
      products_wait<0>();
      settle(o);
      if (half && tile < tiles - 1) announce<2>();
      if (lane == 0) barrier_arrive(&control->empty[stage]);
    }
    write_out(o, half, control, shared, partials + static_cast<int64_t>(blockIdx.x) * PARTIAL, work.rows);
  }
}

// --- combination

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t address_of(const float* p, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}
__device__ __forceinline__ void store_there(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// CLUSTER CTAs (x) per head, each with LATENT / CLUSTER of the latent; 32 tokens (y). `few`: at most 8 tokens, and the
// warps share a token's ranges; else a warp has up to four tokens of its own.
template <int CLUSTER, bool few>
__global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const bf16* partials, const float* weights, const int* query_start, const int* context, const bf16* w_uv,
            bf16* out, int ctas, int B, int T, int H, int least) {
  constexpr int K = LATENT / CLUSTER, LANES = K / 8, SIDE = 32 / LANES, STRIDE = K + 32, OWN = VALUE / CLUSTER;
  constexpr int MINE = few ? 1 : TOKENS / 8, AT_ONCE = few ? 16 : 1, WARPS = COMBINE_THREADS / 32;
  using Weights = HeadWeights<K, VALUE>;
  extern __shared__ __align__(1024) char shared[];
  bf16* latent = reinterpret_cast<bf16*>(shared + Weights::BYTES);       // [TOKENS][STRIDE]
  float* products = reinterpret_cast<float*>(latent + TOKENS * STRIDE);  // [CLUSTER][TOKENS][OWN], written by all
  float* piecewise = products + TOKENS * VALUE;                          // [WARPS][K]
  __shared__ Found found[TOKENS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, from = rank * K;
  int first = blockIdx.y * TOKENS, tokens = min(TOKENS, T - first);
  cluster_arrive();
  Weights values{shared};
  values.load(w_uv + (static_cast<int64_t>(head) * LATENT + from) * VALUE, VALUE, threadIdx.x, COMBINE_THREADS);
  copies_commit();
  if (warp == 0) share_work<true>(query_start, context, B, H, ctas, least, found, first, tokens);
  __syncthreads();

  int sharing = !few || tokens > 4 ? 1 : tokens > 2 ? 2 : tokens > 1 ? 4 : 8;
  int column = from + lane % LANES * 8, side = lane / LANES;
  auto token_of = [&](int i) { return few ? warp / sharing : warp + WARPS * i; };
  int ranges[MINE], longest = 0;
  const float* weight[MINE];
  const bf16* partial[MINE];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    int token = token_of(i);
    Found f = token < tokens ? found[token] : Found{};
    int row = f.index * H + head, slot = f.first + row / ROWS * f.ranges;
    row %= ROWS;
    ranges[i] = f.ranges;
    longest = max(longest, f.ranges);
    weight[i] = weights + row * ctas + slot;
    partial[i] = partials + static_cast<int64_t>(slot) * PARTIAL + column / 64 * (ROWS * 64) + row * 64 +
                 ((column / 8) % 8 ^ (row & 7)) * 8;
  }
  wait_for_predecessor();
  let_successor_start();  // not before: whoever starts after this kernel may take the cache's rows as written

  int step = SIDE * sharing, s0 = few ? warp % sharing * SIDE + side : side;
  uint4 x[MINE][AT_ONCE];
  float share[MINE][AT_ONCE], top[MINE], inverse[MINE], sum[MINE][8] = {};
  auto read = [&] {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (j && s0 - side + j * step >= longest) break;
        int s = s0 + j * step;
        bool valid = s < ranges[i];
        x[i][j] = valid ? *reinterpret_cast<const uint4*>(partial[i] + static_cast<int64_t>(s) * PARTIAL) : uint4{};
        share[i][j] = valid ? weight[i][s] : -INFINITY;
      }
    }
  };
  read();
  float v[MINE][few ? MAX_RANGES / 32 : 1];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
#pragma unroll
    for (int j = 0; j < (few ? MAX_RANGES / 32 : 1); ++j) {
      v[i][j] = lane + j * 32 < ranges[i] ? weight[i][lane + j * 32] : -INFINITY;
    }
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    top[i] = -INFINITY;
#pragma unroll
    for (float w : v[i]) top[i] = fmaxf(top[i], w);
    if (!few) {
#pragma unroll 1
      for (int s = lane + 32; s < ranges[i]; s += 32) top[i] = fmaxf(top[i], weight[i][s]);
    }
    top[i] = warp_max(top[i]);
    float total = 0;
#pragma unroll
    for (float w : v[i]) total += w == -INFINITY ? 0 : power_of_two(w - top[i]);
    if (!few) {
#pragma unroll 1
      for (int s = lane + 32; s < ranges[i]; s += 32) total += power_of_two(weight[i][s] - top[i]);
    }
    total = warp_sum(total);
    inverse[i] = total > 0 ? 1 / total : 0;
  }
#pragma unroll 1
  while (s0 < longest) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (j && s0 - side + j * step >= longest) break;
        float w = share[i][j] == -INFINITY ? 0 : power_of_two(share[i][j] - top[i]) * inverse[i];
        uint32_t words[4] = {x[i][j].x, x[i][j].y, x[i][j].z, x[i][j].w};
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          float2 y = widen(words[l]);
          sum[i][l * 2] += w * y.x;
          sum[i][l * 2 + 1] += w * y.y;
        }
      }
    }
    s0 += step * AT_ONCE;
    if (s0 < longest) read();
  }
  __syncwarp();
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
      float4* to = reinterpret_cast<float4*>(piecewise + warp * K + lane * 8);
      to[0] = {sum[0][0], sum[0][1], sum[0][2], sum[0][3]};
      to[1] = {sum[0][4], sum[0][5], sum[0][6], sum[0][7]};
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
  if (few && sharing > 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * K; i += COMBINE_THREADS) {
      float y = 0;
#pragma unroll 1
      for (int w = 0; w < sharing; ++w) y += piecewise[(i / K * sharing + w) * K + i % K];
      latent[i / K * STRIDE + i % K] = __float2bfloat16(y);
    }
    __syncthreads();
  }
  cluster_wait();  // the others have started: their memory is there
  int column_out = warp * 16 + lane / 4;
  uint32_t there = address_of(products + rank * (TOKENS * OWN) + column_out % OWN, column_out / OWN);
#pragma unroll 1
  for (int group = 0; group * 8 < tokens; ++group) {
    float d[2][4] = {};
#pragma unroll
    for (int k = 0; k < K / 32; ++k) {
      uint4 y = *reinterpret_cast<const uint4*>(latent + (group * 8 + lane / 4) * STRIDE + k * 32 + lane % 4 * 8);
      mma(d[0], a[k * 2], y.x, y.y, bf16());
      mma(d[1], a[k * 2 + 1], y.z, y.w, bf16());
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int token = group * 8 + lane % 4 * 2 + i % 2;
      if (token < tokens) store_there(there + (token * OWN + i / 2 * 8) * 4, d[0][i] + d[1][i]);
    }
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * OWN; i += COMBINE_THREADS) {
    float y = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) y += products[r * (TOKENS * OWN) + i];
    out[(static_cast<int64_t>(first + i / OWN) * H + head) * VALUE + rank * OWN + i % OWN] = __float2bfloat16(y);
  }
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

// Rows of WIDTH bf16 as [chunk][row][64], in boxes of `rows` rows and `chunks` chunks.
bool describe(CUtensorMap* map, const void* from, int64_t count, int rows, int chunks) {
  cuuint64_t sizes[3] = {64, static_cast<cuuint64_t>(count), CHUNKS}, strides[2] = {WIDTH * 2, 128};
  cuuint32_t box[3] = {64, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(chunks)}, steps[3] = {1, 1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(from), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int CLUSTER>
int start_combine(const void* partials, const void* weights, const void* query_start, const void* context,
                  const void* w_uv, void* out, int64_t ctas, int64_t B, int64_t T, int64_t H, int64_t least,
                  void* stream) {
  constexpr int K = LATENT / CLUSTER;
  constexpr size_t bytes =
      HeadWeights<K, VALUE>::BYTES + TOKENS * (K + 32) * 2 + TOKENS * VALUE * 4 + COMBINE_THREADS / 32 * K * 4;
  dim3 grid(H * CLUSTER, (T + TOKENS - 1) / TOKENS);
  return launch(T <= 8 ? combine<CLUSTER, true> : combine<CLUSTER, false>, grid, dim3(COMBINE_THREADS), bytes, stream,
                CLUSTER, static_cast<const bf16*>(partials), static_cast<const float*>(weights),
                static_cast<const int*>(query_start), static_cast<const int*>(context), static_cast<const bf16*>(w_uv),
                static_cast<bf16*>(out), ctas, B, T, H, least);
}

}  // namespace

// partials [ctas, 64, 512] bf16, weights [64, ctas] float are scratch. -1: no driver entry point
// for tensor maps, or they are refused.
API int mla_decode(const void* q, const void* cache, int64_t cache_rows, int64_t block, const void* tables, int64_t M,
                   const void* query_start, const void* context, const void* w_uv, void* partials, void* weights,
                   void* out, int64_t B, int64_t T, int64_t H, int64_t ctas, int64_t least, float scale,
                   void* stream) {
  if (T == 0) return 0;
  CUtensorMap queries, few, many;
  if (!encoder() || !describe(&queries, q, T * H, ROWS, CHUNKS) || !describe(&few, cache, cache_rows, GROUP, 1) ||
      !describe(&many, cache, cache_rows, KEYS, CHUNKS)) {
    return -1;
  }
  int failed = launch(attend, dim3(ctas), dim3(ATTEND_THREADS), ATTEND_BYTES, stream, 1, queries, few, many,
                      static_cast<const int*>(tables), static_cast<const int*>(query_start),
                      static_cast<const int*>(context), static_cast<bf16*>(partials), static_cast<float*>(weights),
                      B, M, H, block, least, scale * 1.4426950408889634f);
  if (failed) return failed;
  auto start = H >= 48 ? start_combine<2> : H >= 24 ? start_combine<4> : start_combine<8>;
  return start(partials, weights, query_start, context, w_uv, out, ctas, B, T, H, least, stream);
}
