// Causal attention with keys of 128 + 64 values, the 64 shared by all heads, and values of 128. Contract in
// mla_prefill.py.
//
// Several requests of a step share the launches. Their keys and values are concatenated. Each request starts at a
// multiple of 128 rows and is padded with zeros, so that no tile holds keys of two requests.
//
// A CTA computes 128 queries of a head of a request, two warpgroups of 64 each, over 128 keys at a time. A producer
// thread keeps two tiles of keys and two of values in shared memory. Per tile j: issue the products scores(j) and
// probabilities(j - 1) x values(j - 1); compute softmax(j) while the second product runs.
#include "attention/sm90/mla_prefill.cuh"

namespace {

constexpr int SLICES = (NOPE + ROPE) / 64;
constexpr int STAGES = 2;
constexpr int Q_SLICE = 64 * 128, K_SLICE = KEYS * 128;  // bytes of 64 values
constexpr int Q_BYTES = 2 * SLICES * Q_SLICE, K_BYTES = SLICES * K_SLICE, V_BYTES = 2 * K_SLICE;
constexpr int SHARED = 1024 + Q_BYTES + STAGES * (K_BYTES + V_BYTES) + 8 * (1 + 4 * STAGES);

// rows[r.key + i] = the cache row of position i of request r, or zeros past its context. A warp copies a row.
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

__global__ void __launch_bounds__(THREADS, 1)
    attend_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                  const __grid_constant__ CUtensorMap rope, const __grid_constant__ CUtensorMap v,
                  const __grid_constant__ Requests requests, Order order, bf16* out, int64_t out_row, float scale) {
  extern __shared__ uint8_t memory[];
  uint8_t* queries = memory + (-shared_address(memory) & 1023);
  uint8_t* keys = queries + Q_BYTES;
  uint8_t* values = keys + STAGES * K_BYTES;
  uint64_t* q_full = reinterpret_cast<uint64_t*>(values + STAGES * V_BYTES);
  uint64_t *k_full = q_full + 1, *k_empty = k_full + STAGES, *v_full = k_empty + STAGES, *v_empty = v_full + STAGES;
  const int tid = threadIdx.x, head = order.head(), first = order.first();
  const Request& request = requests.of[order.request()];
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
  if (first >= count || head >= order.heads) return;

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
      // Row r sees keys up to before + r. The warp's first row decides whether the tile needs the mask.
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

// Boxes of `box` rows of 64 values out of [heads, rows, width], strides in values; rows outside read as 0.
bool describe(CUtensorMap* map, const void* base, int64_t width, int64_t rows, int64_t heads, int64_t row_stride,
              int64_t head_stride, int box) {
  return maps::describe(map, base, maps::SWIZZLED, {width, rows, heads}, {2 * row_stride, 2 * head_stride},
                        {64, box, 1});
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
// 64 requests, each with at most `longest` rows of q. -1: no driver entry point for tensor maps, or the driver refuses.
API int mla_prefill(const void* q, const void* k, const void* rope, const void* v, void* out, const void* requests,
                    int64_t count, int64_t longest, int64_t T, int64_t total, int64_t heads, int64_t q_row,
                    int64_t rope_row, int64_t out_row, float scale, void* stream) {
  CUtensorMap maps[4];
  if (!describe(&maps[0], q, NOPE + ROPE, T, heads, q_row, NOPE + ROPE, 64) ||
      !describe(&maps[1], k, NOPE, total, heads, heads * NOPE, NOPE, KEYS) ||
      !describe(&maps[2], rope, ROPE, total, 1, rope_row, total * rope_row, KEYS) ||
      !describe(&maps[3], v, VALUE, total, heads, VALUE, total * VALUE, KEYS)) {
    return -1;
  }
  const Requests copy = copied(requests, count);
  const Order order = order_of(copy, count, heads, 2 * (NOPE + VALUE));
  return launch(attend_kernel, order.grid(longest, count), dim3(THREADS), SHARED, stream, 1, maps[0], maps[1], maps[2],
                maps[3], copy, order, static_cast<bf16*>(out), out_row, scale * 1.4426950408889634f);
}
