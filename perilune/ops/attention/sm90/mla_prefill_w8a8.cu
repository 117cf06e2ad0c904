// Causal attention as mla_prefill.cu, with products of 8 bits. Contract in mla_prefill_w8a8.py.
//
// round_kernel: per tile (128 keys of a head), the no-rope part of keys is rounded to int8 with one scale, values to
// e4m3 with another. Values are transposed, because the tensor cores take 8-bit operands only with k innermost. Their
// keys are permuted to the order in which thread t of four holds probabilities as accumulators: in each 32 keys,
// position 16 h + 4 t + i is key 16 h + 8 (i / 2) + 2 t + i mod 2.
//
// attend_kernel: as in mla_prefill.cu; the warpgroups round their queries to int8, with a scale per query. Scores are
// int8 products of 128 values, scaled; the bf16 products of the 64 rope values are added in the same registers. The
// int32 sums start at the bits of the float 1.5 2^23, so that their bits are the float 1.5 2^23 + sum: no conversion.
#include "attention/sm90/mla_prefill.cuh"
#include "cuda/token_scale.cuh"

namespace {

constexpr int STAGES = 3;
constexpr int GROUP_BYTES = 64 * 128;  // a warpgroup's 64 rows of 128 int8 or of 64 bf16 values
constexpr int TILE_BYTES = KEYS * 128;
constexpr int K_BYTES = 2 * TILE_BYTES, V_BYTES = TILE_BYTES;  // keys: int8, rope; values
constexpr int Q_BYTES = 2 * (1 + 1 + 2) * GROUP_BYTES;         // int8, rope, bf16 before rounding
constexpr int SHARED = 1024 + Q_BYTES + STAGES * (K_BYTES + V_BYTES) + 8 * (1 + 4 * STAGES);
constexpr float WHOLE = 12582912.0f;  // 1.5 2^23: x + WHOLE has x, |x| < 2^22, rounded to an integer in its lowest bits
constexpr float MOST = 127.0f;        // largest int8
constexpr int LIFT = 8;               // probabilities are multiplied by 2^8 before they are rounded to e4m3

__device__ __forceinline__ uint32_t whole(uint32_t pair, float factor) {  // two int8
  const float2 v = widen(pair);
  const uint32_t low = __float_as_uint(fmaf(v.x, factor, WHOLE)), high = __float_as_uint(fmaf(v.y, factor, WHOLE));
  return (low & 0xff) | (high & 0xff) << 8;
}
__device__ __forceinline__ uint2 whole(const uint4& v, float factor) {
  return make_uint2(whole(v.x, factor) | whole(v.y, factor) << 16, whole(v.z, factor) | whole(v.w, factor) << 16);
}
// Factor that maps the largest magnitude `top` to 127; 0 if `top` is 0 or NaN.
__device__ __forceinline__ float whole_factor(float top) { return top > 0.0f ? MOST / top : 0.0f; }

__device__ __forceinline__ __nv_bfloat16 largest_of(const uint4& v) {
  const __nv_bfloat162 most = __hmax2_nan(__hmax2_nan(token_scale::magnitude(v.x), token_scale::magnitude(v.y)),
                                          __hmax2_nan(token_scale::magnitude(v.z), token_scale::magnitude(v.w)));
  return __hmax_nan(most.x, most.y);
}

// k [total, heads, 128], v [heads, total, 128] -> k8 [heads, total, 128] int8, v8 [heads, tiles, 128 values, 128 keys]
// e4m3 with keys in the order above; scales [heads, tiles]: of k, of v. A CTA rounds a tile of a head.
__global__ void __launch_bounds__(256) round_kernel(const bf16* k, const bf16* v, uint8_t* k8, uint8_t* v8,
                                                    float2* scales, int total, int heads) {
  __shared__ uint32_t bytes[KEYS * VALUE / 4];
  __shared__ __nv_bfloat16 tops[2][8];
  const int tile = blockIdx.x, head = blockIdx.y, tid = threadIdx.x, chunk = tid % 16;
  const int64_t of_head = static_cast<int64_t>(head) * total + tile * KEYS;  // the tile's first row
  wait_for_predecessor();
  let_successor_start();
  uint4 key[8], value[8];
  __nv_bfloat16 top[2] = {__float2bfloat16(0.0f), __float2bfloat16(0.0f)};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = 16 * i + tid / 16;
    key[i] = load16(k + (static_cast<int64_t>(tile * KEYS + row) * heads + head) * NOPE + 8 * chunk);
    value[i] = load16(v + (of_head + row) * VALUE + 8 * chunk);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    top[0] = __hmax_nan(top[0], largest_of(key[i]));
    top[1] = __hmax_nan(top[1], largest_of(value[i]));
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) top[n] = __hmax_nan(top[n], __shfl_xor_sync(~0u, top[n], lane));
    if (tid % 32 == 0) tops[n][tid / 32] = top[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 2; n++) {
    for (int warp = 0; warp < 8; warp++) top[n] = __hmax_nan(top[n], tops[n][warp]);
  }
  const float of_keys = __bfloat162float(top[0]), of_values = token_scale::top(top[1]);
  if (tid == 0) scales[head * (total / KEYS) + tile] = make_float2(of_keys / MOST, token_scale::scale(of_values));
  const float factor = whole_factor(of_keys);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = 16 * i + tid / 16;
    *reinterpret_cast<uint2*>(k8 + (of_head + row) * NOPE + 8 * chunk) = whole(key[i], factor);
    // Words are swizzled by row / 16, so that lanes that each read a chunk of 16 rows share no bank.
    const uint2 rounded = token_scale::rounded(value[i], of_values);
    bytes[row * 32 + ((2 * chunk) ^ i)] = rounded.x;
    bytes[row * 32 + ((2 * chunk + 1) ^ i)] = rounded.y;
  }
  __syncthreads();
  for (int unit = tid; unit < KEYS * VALUE / 16; unit += 256) {
    const int part = unit % 8, n = unit / 8;  // keys 16 part .. + 15 of value n
    const auto* from = reinterpret_cast<const uint8_t*>(bytes) + 16 * part * 128 + ((n / 4) ^ part) * 4 + n % 4;
    uint32_t to[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      to[t] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) to[t] |= static_cast<uint32_t>(from[(8 * (i / 2) + 2 * t + i % 2) * 128]) << 8 * i;
    }
    *reinterpret_cast<uint4*>(v8 + (of_head + n) * KEYS + 16 * part) = make_uint4(to[0], to[1], to[2], to[3]);
  }
}

// Transposes the 4 x 4 words of four lanes: word i of lane t becomes word t of lane i.
__device__ __forceinline__ uint4 transposed(const uint32_t (&v)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  const uint32_t x0 = odd ? a : v[0], x1 = odd ? v[1] : a, x2 = odd ? b : v[2], x3 = odd ? v[3] : b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? x0 : x2, 2), d = __shfl_xor_sync(~0u, high ? x1 : x3, 2);
  return high ? make_uint4(c, d, x2, x3) : make_uint4(x0, x1, c, d);
}

__device__ __forceinline__ uint32_t e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

struct Output {
  uint8_t* values;  // [T, row] e4m3
  float* scales;    // [heads, scale_rows]
  int64_t row, scale_rows;
};

__global__ void __launch_bounds__(THREADS, 1)
    attend_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                  const __grid_constant__ CUtensorMap rope, const __grid_constant__ CUtensorMap v,
                  const __grid_constant__ Requests requests, Order order, const float2* scales, int tiles_of_head,
                  Output out, float scale) {
  extern __shared__ uint8_t memory[];
  uint8_t* rounded = memory + (-shared_address(memory) & 1023);
  uint8_t* turned = rounded + 2 * GROUP_BYTES;  // rope values of queries
  uint8_t* raw = turned + 2 * GROUP_BYTES;
  uint8_t* keys = rounded + Q_BYTES;
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
      barrier_expect(q_full, 6 * GROUP_BYTES);
      for (int group = 0; group < 2; group++) {
        const int row = request.first + first + 64 * group;
        tensor_load(raw + 2 * group * GROUP_BYTES, &q, 0, row, head, q_full);
        tensor_load(raw + (2 * group + 1) * GROUP_BYTES, &q, 64, row, head, q_full);
        tensor_load(turned + group * GROUP_BYTES, &q, NOPE, row, head, q_full);
      }
      int stage = 0, phase = 1;
      for (int j = 0; j < tiles; j++) {
        const int row = request.key + j * KEYS;
        uint8_t* to = keys + stage * K_BYTES;
        barrier_wait(k_empty + stage, phase);
        barrier_expect(k_full + stage, K_BYTES);
        tensor_load(to, &k, 0, row, head, k_full + stage);
        tensor_load(to + TILE_BYTES, &rope, 0, row, 0, k_full + stage);
        barrier_wait(v_empty + stage, phase);
        barrier_expect(v_full + stage, V_BYTES);
        tensor_load(values + stage * V_BYTES, &v, 0, row, head, v_full + stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
  } else {
    registers_take<240>();
    const int group = tid / 128, w = tid / 32 % 4, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int row = first + 64 * group + 16 * w + g;
    const float2* own = scales + head * tiles_of_head + request.key / KEYS;
    float s[64], o[64], shrink[2], of_query[2];
    int n[64];
    uint32_t p[16];
    Rows rows = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    float2 now = own[0];
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.0f;
    const uint64_t a8 = slab_descriptor(rounded + group * GROUP_BYTES);
    const uint64_t a16 = slab_descriptor(turned + group * GROUP_BYTES);
    const uint64_t b8 = slab_descriptor(keys), b16 = slab_descriptor(keys + TILE_BYTES), v0 = slab_descriptor(values);

    // Four lanes round a row, each a quarter of its chunks of 8 values.
    barrier_wait(q_full, 0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int at = 16 * w + g + 8 * r;
      const auto chunk_of = [&](uint8_t* from, int chunk) { return from + at * 128 + (chunk ^ at % 8) * 16; };
      uint4 chunks[4];
      __nv_bfloat16 top = __float2bfloat16(0.0f);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int chunk = 4 * i + t;
        chunks[i] = *reinterpret_cast<const uint4*>(chunk_of(raw + (2 * group + chunk / 8) * GROUP_BYTES, chunk % 8));
        top = __hmax_nan(top, largest_of(chunks[i]));
      }
      top = __hmax_nan(top, __shfl_xor_sync(~0u, top, 1));
      top = __hmax_nan(top, __shfl_xor_sync(~0u, top, 2));
      const float factor = whole_factor(__bfloat162float(top));
      of_query[r] = __bfloat162float(top) / MOST;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int chunk = 4 * i + t;
        *reinterpret_cast<uint2*>(chunk_of(rounded + group * GROUP_BYTES, chunk / 2) + chunk % 2 * 8) =
            whole(chunks[i], factor);
      }
    }
    shared_writes_visible();
    named_sync(1 + group, 128);

    auto scores = [&](int j, int stage, int phase) {
#pragma unroll
      for (int i = 0; i < 64; i++) n[i] = __float_as_int(WHOLE);
      barrier_wait(k_full + stage, phase);
      const uint64_t b = b8 + stage * (K_BYTES >> 4), turned_b = b16 + stage * (K_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < NOPE / 32; i++) wgmma_s8(n, a8 + 2 * i, b + 2 * i);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 64; i++) {
        const float by = of_query[i / 2 % 2] * now.x;
        s[i] = fmaf(__int_as_float(n[i]), by, -WHOLE * by);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < ROPE / 16; i++) wgmma_shared<1>(s, a16 + 2 * i, turned_b + 2 * i);
      wgmma_commit();
    };
    auto weigh = [&](int stage, int phase) {
      barrier_wait(v_full + stage, phase);
      const uint64_t b = v0 + stage * (V_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KEYS / 32; i++) wgmma_e4m3(o, p + 4 * i, b + 2 * i);
      wgmma_commit();
    };
    auto pack = [&] {
#pragma unroll
      for (int i = 0; i < 16; i++) {  // A's register i % 4 for 32 keys
        const float* from = s + 4 * (i / 4 * 4 + i % 4 / 2 * 2) + 2 * (i % 2);
        p[i] = e4m3(from[0], from[1]) | e4m3(from[4], from[5]) << 16;
      }
    };
    auto to_softmax = [&](int j) {
      const int visible = before + row + 1 - j * KEYS - 2 * t;
      softmax<LIFT>(s, rows, shrink, scale, (j + 1) * KEYS > before + row - g + 1, visible);
    };

    scores(0, 0, 0);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(k_empty);
    to_softmax(0);
    pack();
    int stage = 0, phase = 0;  // stage and phase of tile j - 1
    for (int j = 1; j < tiles; j++) {
      const int last = stage, last_phase = phase;
      const float of_last = now.y;
      if (++stage == STAGES) stage = 0, phase ^= 1;
      now = own[j];
      scores(j, stage, phase);
      weigh(last, last_phase);
      wgmma_wait<1>();
      if (lane == 0) barrier_arrive(k_empty + stage);
      to_softmax(j);
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(v_empty + last);
      const float other = __fdividef(of_last, now.y);  // o is in units of the current tile's value scale
      shrink[0] *= other, shrink[1] *= other;
#pragma unroll
      for (int i = 0; i < 64; i++) o[i] *= shrink[i / 2 % 2];
      pack();
    }
    weigh(stage, phase);
    wgmma_wait<0>();

    // Round to bf16, then as token_scale.cuh to e4m3 with a scale per 128 values: a head's.
    uint32_t pairs[16][2];  // for each 8 values, this thread's pair of either row
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float share = now.y / row_sum(rows.sum[r]);
      __nv_bfloat162 most = __floats2bfloat162_rn(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        pairs[i][r] = narrow(o[4 * i + 2 * r] * share, o[4 * i + 2 * r + 1] * share);
        most = __hmax2_nan(most, token_scale::magnitude(pairs[i][r]));
      }
      __nv_bfloat16 largest = __hmax_nan(most.x, most.y);
      largest = __hmax_nan(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = __hmax_nan(largest, __shfl_xor_sync(~0u, largest, 2));
      top[r] = token_scale::top(largest);
      const float factor = top[r] == 0.0f ? 1.0f : 1.0f / top[r] * token_scale::LARGEST;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const float2 pair = widen(pairs[i][r]);
        pairs[i][r] = e4m3(pair.x * factor, pair.y * factor);
      }
    }
    const bool held[2] = {row < count, row + 8 < count};
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const uint32_t words[4] = {pairs[i][0] | pairs[i][1] << 16, pairs[i + 1][0] | pairs[i + 1][1] << 16,
                                 pairs[i + 2][0] | pairs[i + 2][1] << 16, pairs[i + 3][0] | pairs[i + 3][1] << 16};
      const uint4 eight = transposed(words, t);  // values 8 (i + t) .. 8 (i + t) + 7 of both rows
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const auto half = [r](uint32_t a, uint32_t b) { return (a >> 16 * r & 0xffff) | (b >> 16 * r & 0xffff) << 16; };
        uint8_t* to = out.values + (request.first + row + 8 * r) * out.row + head * VALUE + 8 * (i + t);
        if (held[r]) *reinterpret_cast<uint2*>(to) = make_uint2(half(eight.x, eight.y), half(eight.z, eight.w));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (held[r] && t == 0)
        out.scales[head * out.scale_rows + request.first + row + 8 * r] = token_scale::scale(top[r]);
    }
  }
}

}  // namespace

// k [total, heads, 128] and v [heads, total, 128] bf16; k8 [heads, total, 128], v8 [heads, total / 128, 128, 128],
// scales [heads, total / 128, 2]; total is a multiple of 128.
API int mla_prefill_w8a8_round(const void* k, const void* v, void* k8, void* v8, void* scales, int64_t total,
                               int64_t heads, void* stream) {
  return launch(round_kernel, dim3(total / KEYS, heads), dim3(256), 0, stream, 1, static_cast<const bf16*>(k),
                static_cast<const bf16*>(v), static_cast<uint8_t*>(k8), static_cast<uint8_t*>(v8),
                static_cast<float2*>(scales), static_cast<int>(total), static_cast<int>(heads));
}

// q [T, heads, 192] with rows q_row values apart, heads adjacent; k8, v8 and scales as above; rope [total, 64] bf16,
// rows rope_row apart; values [T, heads, 128] e4m3, rows out_row bytes apart; out_scales [heads, scale_rows], written
// for rows of requests only. Other arguments as for mla_prefill.
API int mla_prefill_w8a8(const void* q, const void* k8, const void* rope, const void* v8, const void* scales,
                         void* values, void* out_scales, const void* requests, int64_t count, int64_t longest,
                         int64_t T, int64_t total, int64_t heads, int64_t q_row, int64_t rope_row, int64_t out_row,
                         int64_t scale_rows, float scale, void* stream) {
  CUtensorMap of_q, of_k, of_rope, of_v;
  const int64_t width = NOPE + ROPE, rows = total * 128;
  if (!maps::describe(&of_q, q, maps::SWIZZLED, {width, T, heads}, {2 * q_row, 2 * width}, {64, 64, 1}) ||
      !maps::describe(&of_k, k8, maps::SWIZZLED_BYTES, {128, total, heads}, {128, rows}, {128, KEYS, 1}) ||
      !maps::describe(&of_rope, rope, maps::SWIZZLED, {ROPE, total, 1}, {2 * rope_row, 2 * total * rope_row},
                      {64, KEYS, 1}) ||
      !maps::describe(&of_v, v8, maps::SWIZZLED_BYTES, {128, total, heads}, {128, rows}, {128, VALUE, 1})) {
    return -1;
  }
  const Output out = {static_cast<uint8_t*>(values), static_cast<float*>(out_scales), out_row, scale_rows};
  const Requests copy = copied(requests, count);
  const Order order = order_of(copy, count, heads, NOPE + VALUE);
  return launch(attend_kernel, order.grid(longest, count), dim3(THREADS), SHARED, stream, 1, of_q, of_k, of_rope, of_v,
                copy, order, static_cast<const float2*>(scales), static_cast<int>(total / KEYS), out,
                scale * 1.4426950408889634f);
}
