// Causal attention with keys of 128 + 64 values, the 64 shared by all heads, and values of 128. Contract in
// mla_prefill.py.
//
// Several requests of a step share the launches. Their keys and values lie one behind the other, each request's from a
// multiple of 128 on, with zeros behind the last: so that no tile holds keys of two requests.
//
// A CTA has 128 queries of a head of a request, two warpgroups of 64, and goes over the keys 128 at a time; a producing
// thread keeps two tiles of keys and two of values in shared memory. The product of the next tile's scores runs before and the
// product of this tile's probabilities with its values during the next tile's softmax.
#include "cuda/tensor_map.cuh"

using namespace hopper;

namespace {

constexpr int NOPE = 128, ROPE = 64, VALUE = 128;
constexpr int QUERIES = 128, KEYS = 128;  // of a tile
constexpr int SLICES = (NOPE + ROPE) / 64;
constexpr int STAGES = 2;
constexpr int MAX_REQUESTS = 64;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int Q_SLICE = 64 * 128, K_SLICE = KEYS * 128;  // bytes of 64 values
constexpr int Q_BYTES = 2 * SLICES * Q_SLICE, K_BYTES = SLICES * K_SLICE, V_BYTES = 2 * K_SLICE;
constexpr int SHARED = 1024 + Q_BYTES + STAGES * (K_BYTES + V_BYTES) + 8 * (2 + 4 * STAGES);

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float row_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float row_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

struct Request {
  int table, first, count, context, key;  // row of tables; first row of q, rows; keys, the first one's row
};
struct Requests {
  Request of[MAX_REQUESTS];
};

// rows[r.key + i] = the cache's row of position i of request r, or zeros from its context on. A warp has a row.
__global__ void __launch_bounds__(256)
    gather_kernel(const uint8_t* pages, const int* tables, int64_t table_stride, int block, int row_bytes,
                  const __grid_constant__ Requests requests, int count, int total, uint8_t* rows) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32;
  wait_for_predecessor();
  let_successor_start();
  if (row >= total) return;
  int n = 0;
  while (n + 1 < count && requests.of[n + 1].key <= row) n++;
  const Request& r = requests.of[n];
  const int at = row - r.key;
  const bool held = at < r.context;
  const int64_t slot = held ? static_cast<int64_t>(tables[r.table * table_stride + at / block]) * block + at % block : 0;
  for (int p = threadIdx.x % 32; p < row_bytes / 16; p += 32) {
    reinterpret_cast<uint4*>(rows + static_cast<int64_t>(row) * row_bytes)[p] =
        held ? load16(pages + slot * row_bytes + 16 * p) : make_uint4(0, 0, 0, 0);
  }
}

// What a thread keeps of its two rows.
struct Rows {
  float top[2], sum[2];  // the largest score so far, unscaled; the sum of this thread's probabilities
};

// Scores become probabilities; returns through `shrink` what earlier sums and outputs are to be multiplied with.
__device__ __forceinline__ void softmax(float (&s)[64], Rows& rows, float (&shrink)[2], float scale, bool masked,
                                        int visible) {
  if (masked) {  // `visible`: keys of this tile that the first row may see, less this thread's first column
#pragma unroll
    for (int i = 0; i < 64; i++)
      if (8 * (i / 4) + i % 2 >= visible + (i % 4 >= 2 ? 8 : 0)) s[i] = -INFINITY;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = rows.top[r];
#pragma unroll
    for (int i = 0; i < 64; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    top = row_max(top);
    shrink[r] = power_of_two((rows.top[r] - top) * scale);
    rows.top[r] = top;
    float sum = 0.0f;
    const float offset = top * scale;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      s[i + 2 * r] = power_of_two(s[i + 2 * r] * scale - offset);
      s[i + 2 * r + 1] = power_of_two(s[i + 2 * r + 1] * scale - offset);
      sum += s[i + 2 * r] + s[i + 2 * r + 1];
    }
    rows.sum[r] = rows.sum[r] * shrink[r] + sum;
  }
}

__global__ void __launch_bounds__(THREADS, 1)
    attend_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                  const __grid_constant__ CUtensorMap rope, const __grid_constant__ CUtensorMap v,
                  const __grid_constant__ Requests requests, bf16* out, int64_t out_row, float scale) {
  extern __shared__ uint8_t memory[];
  uint8_t* queries = memory + (-shared_address(memory) & 1023);
  uint8_t* keys = queries + Q_BYTES;
  uint8_t* values = keys + STAGES * K_BYTES;
  uint64_t* q_full = reinterpret_cast<uint64_t*>(values + STAGES * V_BYTES);
  uint64_t *k_full = q_full + 1, *k_empty = k_full + STAGES, *v_full = k_empty + STAGES, *v_empty = v_full + STAGES;
  const int tid = threadIdx.x, head = blockIdx.y;
  const int first = (gridDim.x - 1 - blockIdx.x) * QUERIES;  // the longest rows first
  const Request& request = requests.of[blockIdx.z];
  const int count = request.count, context = request.context, before = context - count;
  const int tiles = (min(context, before + first + QUERIES) + KEYS - 1) / KEYS;
  if (tid == 0) {
    barrier_init(q_full, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(k_full + i, 1);
      barrier_init(k_empty + i, CONSUMERS / 32);
      barrier_init(v_full + i, 1);
      barrier_init(v_empty + i, CONSUMERS / 32);
    }
    barriers_visible();
  }
  __syncthreads();
  wait_for_predecessor();
  let_successor_start();
  if (first >= count) return;

  if (tid >= CONSUMERS) {
    registers_give<24>();
    if (tid == CONSUMERS) {
      barrier_expect(q_full, Q_BYTES);
      for (int i = 0; i < 2 * SLICES; i++)
        tensor_load(queries + i * Q_SLICE, &q, i % SLICES * 64, request.first + first + i / SLICES * 64, head,
                    q_full);
      for (int j = 0; j <= tiles; j++) {
        if (j < tiles) {
          const int stage = j % STAGES;
          uint8_t* to = keys + stage * K_BYTES;
          barrier_wait(k_empty + stage, (j / STAGES & 1) ^ 1);
          barrier_expect(k_full + stage, K_BYTES);
          tensor_load(to, &k, 0, request.key + j * KEYS, head, k_full + stage);
          tensor_load(to + K_SLICE, &k, 64, request.key + j * KEYS, head, k_full + stage);
          tensor_load(to + 2 * K_SLICE, &rope, 0, request.key + j * KEYS, 0, k_full + stage);
        }
        if (j > 0) {
          const int i = j - 1, stage = i % STAGES;
          uint8_t* to = values + stage * V_BYTES;
          barrier_wait(v_empty + stage, (i / STAGES & 1) ^ 1);
          barrier_expect(v_full + stage, V_BYTES);
          tensor_load(to, &v, 0, request.key + i * KEYS, head, v_full + stage);
          tensor_load(to + K_SLICE, &v, 64, request.key + i * KEYS, head, v_full + stage);
        }
      }
    }
  } else {
    registers_take<240>();
    const int group = tid / 128, w = tid / 32 % 4, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int row = first + 64 * group + 16 * w + g;
    float s[64], o[64], shrink[2];
    uint32_t p[32];
    Rows rows = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.0f;
    const uint64_t a = slab_descriptor(queries + group * SLICES * Q_SLICE);
    const uint64_t b0 = slab_descriptor(keys), v0 = transposed_descriptor(values, K_SLICE);

    auto scores = [&](int j) {
      barrier_wait(k_full + j % STAGES, j / STAGES & 1);
      const uint64_t b = b0 + j % STAGES * (K_BYTES >> 4);
      wgmma_fence();
      wgmma_shared<0>(s, a, b);
#pragma unroll
      for (int i = 1; i < 4 * SLICES; i++)
        wgmma_shared<1>(s, a + i / 4 * (Q_SLICE >> 4) + i % 4 * 2, b + i / 4 * (K_SLICE >> 4) + i % 4 * 2);
      wgmma_commit();
    };
    auto weigh = [&](int j) {
      barrier_wait(v_full + j % STAGES, j / STAGES & 1);
      const uint64_t b = v0 + j % STAGES * (V_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KEYS / 16; i++) wgmma_transposed(o, p + 4 * i, b + 128 * i);
      wgmma_commit();
    };
    auto pack = [&] {
#pragma unroll
      for (int i = 0; i < 32; i++) p[i] = narrow(s[2 * i], s[2 * i + 1]);
    };
    auto to_softmax = [&](int j) {
      // Row r sees keys up to before + r. The warp's first row decides whether the tile holds hidden ones.
      const int visible = before + row + 1 - j * KEYS - 2 * t;
      softmax(s, rows, shrink, scale, (j + 1) * KEYS > before + row - g + 1, visible);
    };

    barrier_wait(q_full, 0);
    scores(0);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(k_empty);
    to_softmax(0);
    pack();
    for (int j = 1; j < tiles; j++) {
      scores(j);
      weigh(j - 1);
      wgmma_wait<1>();
      if (lane == 0) barrier_arrive(k_empty + j % STAGES);
      to_softmax(j);
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(v_empty + (j - 1) % STAGES);
#pragma unroll
      for (int i = 0; i < 64; i++) o[i] *= shrink[i / 2 % 2];
      pack();
    }
    weigh(tiles - 1);
    wgmma_wait<0>();

#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float share = 1.0f / row_sum(rows.sum[r]);
      if (row + 8 * r < count) {
        bf16* to = out + (request.first + row + 8 * r) * out_row + head * VALUE + 2 * t;
#pragma unroll
        for (int i = 0; i < 16; i++)
          *reinterpret_cast<uint32_t*>(to + 8 * i) = narrow(o[4 * i + 2 * r] * share, o[4 * i + 2 * r + 1] * share);
      }
    }
  }
}

// As attend_kernel, by CTAs that stay: each takes piece after piece, 128 queries of a head of a request, in the order in
// which CTAs of attend_kernel start, and what attend_kernel does before and after its tiles runs beside the tiles of the
// pieces next to it. The tiles of all pieces of a CTA are one sequence: the first scores of a piece are multiplied
// together with the last values of the piece before. A piece's results have the same bits as attend_kernel's.
//
// `taken` is 0 before and after a launch: the pieces that CTAs have asked for beyond each one's first. Each CTA asks
// until it is refused, so that the numbers handed out are 0 to pieces - 1; who gets the last one makes it 0 again.
struct Piece {
  int request, head, first;  // request -1: there is none
};

__device__ Piece piece_of(int n, const Requests& requests, int count, int heads) {
  for (int r = 0; r < count; r++) {
    const int rows = (requests.of[r].count + QUERIES - 1) / QUERIES;
    if (n < rows * heads) return {r, n / rows, (rows - 1 - n % rows) * QUERIES};  // the longest rows of a head first
    n -= rows * heads;
  }
  return {-1, 0, 0};
}

__device__ __forceinline__ int tiles_of(const Piece& piece, const Request& request) {
  const int before = request.context - request.count;
  return (min(request.context, before + piece.first + QUERIES) + KEYS - 1) / KEYS;
}

__global__ void __launch_bounds__(THREADS, 1)
    staying_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                   const __grid_constant__ CUtensorMap rope, const __grid_constant__ CUtensorMap v,
                   const __grid_constant__ Requests requests, int count, int heads, int pieces, int* taken, bf16* out,
                   int64_t out_row, float scale) {
  extern __shared__ uint8_t memory[];
  __shared__ Piece current;  // of the queries that are in shared memory
  uint8_t* queries = memory + (-shared_address(memory) & 1023);
  uint8_t* keys = queries + Q_BYTES;
  uint8_t* values = keys + STAGES * K_BYTES;
  uint64_t* q_full = reinterpret_cast<uint64_t*>(values + STAGES * V_BYTES);
  uint64_t *k_full = q_full + 1, *k_empty = k_full + STAGES, *v_full = k_empty + STAGES, *v_empty = v_full + STAGES;
  uint64_t* q_empty = v_empty + STAGES;
  const int tid = threadIdx.x;
  if (tid == 0) {
    barrier_init(q_full, 1);
    barrier_init(q_empty, CONSUMERS / 32);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(k_full + i, 1);
      barrier_init(k_empty + i, CONSUMERS / 32);
      barrier_init(v_full + i, 1);
      barrier_init(v_empty + i, CONSUMERS / 32);
    }
    barriers_visible();
  }
  __syncthreads();
  wait_for_predecessor();
  let_successor_start();

  if (tid >= CONSUMERS) {
    registers_give<24>();
    if (tid != CONSUMERS) return;
    auto load_values = [&](int n, int key, int head) {  // the n-th tile of this CTA
      const int stage = n % STAGES;
      uint8_t* to = values + stage * V_BYTES;
      barrier_wait(v_empty + stage, (n / STAGES & 1) ^ 1);
      barrier_expect(v_full + stage, V_BYTES);
      tensor_load(to, &v, 0, key, head, v_full + stage);
      tensor_load(to + K_SLICE, &v, 64, key, head, v_full + stage);
    };
    int n = 0, key_before = 0, head_before = 0;  // the tile; where the values of the tile before are
    int number = blockIdx.x;
    for (int turn = 0; number < pieces; turn++) {
      const int next = atomicAdd(taken, 1);  // before this piece's loads, so that nothing waits for it
      if (next == pieces - 1) *taken = 0;
      const Piece piece = piece_of(number, requests, count, heads);
      const Request& request = requests.of[piece.request];
      const int tiles = tiles_of(piece, request);
      for (int j = 0; j < tiles; j++, n++) {
        const int stage = n % STAGES, key = request.key + j * KEYS;
        uint8_t* to = keys + stage * K_BYTES;
        barrier_wait(k_empty + stage, (n / STAGES & 1) ^ 1);
        barrier_expect(k_full + stage, K_BYTES);
        tensor_load(to, &k, 0, key, piece.head, k_full + stage);
        tensor_load(to + K_SLICE, &k, 64, key, piece.head, k_full + stage);
        tensor_load(to + 2 * K_SLICE, &rope, 0, key, 0, k_full + stage);
        if (n > 0) load_values(n - 1, key_before, head_before);
        if (j == 0) {  // behind the last values of the piece before, which its last scores do not wait for
          barrier_wait(q_empty, (turn & 1) ^ 1);
          current = piece;
          barrier_expect(q_full, Q_BYTES);
          for (int i = 0; i < 2 * SLICES; i++)
            tensor_load(queries + i * Q_SLICE, &q, i % SLICES * 64, request.first + piece.first + i / SLICES * 64,
                        piece.head, q_full);
        }
        key_before = key, head_before = piece.head;
      }
      number = gridDim.x + next;
      if (number >= pieces) {
        load_values(n - 1, key_before, head_before);
        barrier_wait(q_empty, turn & 1);
        current.request = -1;
        barrier_arrive(q_full);
      }
    }
  } else {
    registers_take<240>();
    const int group = tid / 128, w = tid / 32 % 4, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int own = 64 * group + 16 * w + g;  // this thread's first row of a piece; its second is 8 further
    float s[64], o[64], shrink[2];
    uint32_t p[32];
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.0f;
    const uint64_t a = slab_descriptor(queries + group * SLICES * Q_SLICE);
    const uint64_t b0 = slab_descriptor(keys), v0 = transposed_descriptor(values, K_SLICE);

    auto scores = [&](int n) {
      barrier_wait(k_full + n % STAGES, n / STAGES & 1);
      const uint64_t b = b0 + n % STAGES * (K_BYTES >> 4);
      wgmma_fence();
      wgmma_shared<0>(s, a, b);
#pragma unroll
      for (int i = 1; i < 4 * SLICES; i++)
        wgmma_shared<1>(s, a + i / 4 * (Q_SLICE >> 4) + i % 4 * 2, b + i / 4 * (K_SLICE >> 4) + i % 4 * 2);
      wgmma_commit();
    };
    auto weigh = [&](int n) {
      barrier_wait(v_full + n % STAGES, n / STAGES & 1);
      const uint64_t b = v0 + n % STAGES * (V_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KEYS / 16; i++) wgmma_transposed(o, p + 4 * i, b + 128 * i);
      wgmma_commit();
    };
    auto pack = [&] {
#pragma unroll
      for (int i = 0; i < 32; i++) p[i] = narrow(s[2 * i], s[2 * i + 1]);
    };

    int tiles, visible, row, j = 0, turn = 0;  // of the piece that is being scored; visible: keys of
                                                   // the context that its warp's first row sees
    int left;                                      // rows of the request from this thread's first one on
    bf16* to;                                      // where the thread's first row goes
    Rows rows;
    auto begin = [&] {  // false if there is none
      barrier_wait(q_full, turn & 1);
      const Piece piece = current;
      turn++;
      if (piece.request < 0) return false;
      const Request& request = requests.of[piece.request];
      row = piece.first + own, j = 0;
      tiles = tiles_of(piece, request);
      visible = request.context - request.count + row - g + 1;
      left = request.count - row;
      to = out + (request.first + row) * out_row + piece.head * VALUE + 2 * t;
      rows = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
      return true;
    };
    auto scored = [&](int n) {  // the scores of tile n have been multiplied
      if (lane == 0) {
        barrier_arrive(k_empty + n % STAGES);
        if (j + 1 == tiles) barrier_arrive(q_empty);
      }
      softmax(s, rows, shrink, scale, (j + 1) * KEYS > visible, visible + g - j * KEYS - 2 * t);
    };
    auto write = [&](bf16* at, int within, const float (&sum)[2]) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float share = 1.0f / row_sum(sum[r]);
        if (8 * r < within) {
#pragma unroll
          for (int i = 0; i < 16; i++)
            *reinterpret_cast<uint32_t*>(at + 8 * r * out_row + 8 * i) =
                narrow(o[4 * i + 2 * r] * share, o[4 * i + 2 * r + 1] * share);
        }
      }
    };

    begin();
    scores(0);
    wgmma_wait<0>();
    scored(0);
    pack();
    int n = 1;
    for (;; n++) {
      const bool ended = ++j == tiles;
      bf16* const at = to;
      const int within = left;
      const float sum[2] = {rows.sum[0], rows.sum[1]};
      if (ended && !begin()) break;
      scores(n);
      weigh(n - 1);
      wgmma_wait<1>();
      scored(n);
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(v_empty + (n - 1) % STAGES);
      if (ended) {
        write(at, within, sum);
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = 0.0f;
      } else {
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] *= shrink[i / 2 % 2];
      }
      pack();
    }
    weigh(n - 1);
    wgmma_wait<0>();
    write(to, left, rows.sum);
  }
}

// Boxes of `box` rows of 64 values out of [heads, rows, width], strides in values; rows outside read as 0.
bool describe(CUtensorMap* map, const void* base, int64_t width, int64_t rows, int64_t heads, int64_t row_stride,
              int64_t head_stride, int box) {
  return maps::describe(map, base, maps::SWIZZLED, {width, rows, heads}, {2 * row_stride, 2 * head_stride},
                        {64, box, 1});
}

// The four maps of q, k, rope and v; false: no driver entry point for tensor maps, or they are refused.
bool describe_all(CUtensorMap (&maps)[4], const void* q, const void* k, const void* rope, const void* v, int64_t T,
                  int64_t total, int64_t heads, int64_t q_row, int64_t rope_row) {
  return describe(&maps[0], q, NOPE + ROPE, T, heads, q_row, NOPE + ROPE, 64) &&
         describe(&maps[1], k, NOPE, total, heads, heads * NOPE, NOPE, KEYS) &&
         describe(&maps[2], rope, ROPE, total, 1, rope_row, total * rope_row, KEYS) &&
         describe(&maps[3], v, VALUE, total, heads, VALUE, total * VALUE, KEYS);
}

// requests [count] as above, in host memory: tables' row, q's first row and rows, keys and their first row.
Requests copied(const void* requests, int64_t count) {
  Requests r = {};
  for (int i = 0; i < count; i++) r.of[i] = static_cast<const Request*>(requests)[i];
  return r;
}

}  // namespace

// pages [N, block, row_bytes], rows [total, row_bytes]; at most 64 requests. row_bytes is a multiple of 16.
API int mla_prefill_gather(const void* pages, const void* tables, int64_t table_stride, int64_t block,
                           int64_t row_bytes, const void* requests, int64_t count, void* rows, int64_t total,
                           void* stream) {
  return launch(gather_kernel, dim3((total + 7) / 8), dim3(256), 0, stream, 1, static_cast<const uint8_t*>(pages),
                static_cast<const int*>(tables), table_stride, static_cast<int>(block), static_cast<int>(row_bytes),
                copied(requests, count), static_cast<int>(count), static_cast<int>(total), static_cast<uint8_t*>(rows));
}

// q [T, heads, 192] and out [T, heads, 128] with rows q_row and out_row values apart, heads adjacent; k [total, heads,
// 128], v [heads, total, 128]; rope [total, 64], rows rope_row apart. Bases and rows are multiples of 16 bytes. At most
// 64 requests, of at most `longest` rows of q. -1: no driver entry point for tensor maps, or they are refused.
API int mla_prefill(const void* q, const void* k, const void* rope, const void* v, void* out, const void* requests,
                    int64_t count, int64_t longest, int64_t T, int64_t total, int64_t heads, int64_t q_row,
                    int64_t rope_row, int64_t out_row, float scale, void* stream) {
  CUtensorMap maps[4];
  if (!describe_all(maps, q, k, rope, v, T, total, heads, q_row, rope_row)) return -1;
  const dim3 grid((longest + QUERIES - 1) / QUERIES, heads, count);
  return launch(attend_kernel, grid, dim3(THREADS), SHARED, stream, 1, maps[0], maps[1], maps[2], maps[3],
                copied(requests, count), static_cast<bf16*>(out), out_row, scale * 1.4426950408889634f);
}

// The same by at most `processors` CTAs that stay; taken: 0, and 0 again afterwards, of launches of one stream.
API int mla_prefill_staying(const void* q, const void* k, const void* rope, const void* v, void* out,
                            const void* requests, int64_t count, void* taken, int64_t T, int64_t total, int64_t heads,
                            int64_t q_row, int64_t rope_row, int64_t out_row, int64_t processors, float scale,
                            void* stream) {
  CUtensorMap maps[4];
  if (!describe_all(maps, q, k, rope, v, T, total, heads, q_row, rope_row)) return -1;
  const Requests all = copied(requests, count);
  int64_t pieces = 0;
  for (int i = 0; i < count; i++) pieces += heads * ((all.of[i].count + QUERIES - 1) / QUERIES);
  const dim3 grid(pieces < processors ? pieces : processors);
  return launch(staying_kernel, grid, dim3(THREADS), SHARED, stream, 1, maps[0], maps[1], maps[2], maps[3], all,
                static_cast<int>(count), static_cast<int>(heads), static_cast<int>(pieces), static_cast<int*>(taken),
                static_cast<bf16*>(out), out_row, scale * 1.4426950408889634f);
}
