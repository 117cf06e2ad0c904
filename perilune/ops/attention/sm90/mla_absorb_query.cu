// All work between the attention projections and absorbed attention, in one launch. Contract in mla_absorb_query.py.
//
// CTAs 0 .. H * LATENT / COLUMNS - 1 (x) each load COLUMNS columns of one head's W_UK to shared memory before the wait
// and multiply TOKENS tokens (y) by them, 16 columns per warp. They also rotate their share of q_pe. The CTAs with
// higher x write the cache, a warp per token.
#include "attention/sm90/cache_row.cuh"

using namespace mla;

namespace {

constexpr int TOKENS = 64;  // tokens per CTA
constexpr int ROW = NOPE * 2 + 64;  // bytes from one token's q_nope to the next in shared memory

template <int COLUMNS>
__global__ void __launch_bounds__(COLUMNS * 2)
    query(const bf16* q, const __grid_constant__ NewRows rows, const bf16* w_uk, bf16* out, int H) {
  extern __shared__ __align__(128) char shared[];
  constexpr int THREADS = COLUMNS * 2, PARTS = LATENT / COLUMNS, STEPS = NOPE / 16, FROM = NOPE + ROPE;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int products = H * PARTS, T = rows.T, first = blockIdx.y * TOKENS, last = min(T, first + TOKENS);
  let_successor_start();
  if (blockIdx.x >= products) return add_row(rows, first + (blockIdx.x - products) * (THREADS / 32) + warp);
  int head = blockIdx.x / PARTS, column = blockIdx.x % PARTS * COLUMNS;
  HeadWeights<NOPE, COLUMNS> weights{shared};
  weights.load(w_uk + static_cast<int64_t>(head) * NOPE * LATENT + column, LATENT, threadIdx.x, THREADS);
  copies_commit();
  wait_for_predecessor();

  // A token's q_nope has 256 bytes. The pitch is 320 bytes, so that the reads of eight lanes have no bank conflict.
  auto row_of = [&](int token) { return shared + NOPE * COLUMNS * 2 + token * ROW; };
  for (int i = threadIdx.x; i < (last - first) * (NOPE / 8); i += THREADS) {
    int token = i / (NOPE / 8), piece = i % (NOPE / 8);
    copy16(row_of(token) + piece * 16, q + (static_cast<int64_t>(first + token) * H + head) * FROM + piece * 8);
  }
  copies_commit();
  for (int i = threadIdx.x + blockIdx.x % PARTS * THREADS; i < (last - first) * (ROPE / 2); i += PARTS * THREADS) {
    int token = first + i / (ROPE / 2), pair = i % (ROPE / 2);
    int64_t row = static_cast<int64_t>(token) * H + head;
    uint32_t pe = *reinterpret_cast<const uint32_t*>(q + row * FROM + NOPE + pair * 2);
    pe = rotate(pe, rows.cos[token * (ROPE / 2) + pair], rows.sin[token * (ROPE / 2) + pair]);
    *reinterpret_cast<uint32_t*>(out + row * WIDTH + LATENT + pair * 2) = pe;
  }
  copies_wait<0>();
  __syncthreads();
  uint32_t a[STEPS][4];
#pragma unroll
  for (int k = 0; k < STEPS; ++k) weights.fragment(a[k], k, warp * 16);
  float d[TOKENS / 8][4] = {};
#pragma unroll
  for (int group = 0; group < TOKENS / 8; ++group) {
    if (first + group * 8 >= last) break;
    const char* row = row_of(group * 8 + lane / 4) + lane % 4 * 16;
    uint4 x[NOPE / 32];
#pragma unroll
    for (int i = 0; i < NOPE / 32; ++i) x[i] = *reinterpret_cast<const uint4*>(row + i * 64);
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {
      mma(d[group], a[k], x[k / 2].x, x[k / 2].y, bf16());
      mma(d[group], a[k + 1], x[k / 2].z, x[k / 2].w, bf16());
    }
  }
  // Transpose through shared memory, so that stores are coalesced: [TOKENS][COLUMNS], with swizzled pieces.
  __syncthreads();
  auto place = [&](int row, int piece) { return shared + (row * (COLUMNS / 8) + (piece ^ (row & 7))) * 16; };
#pragma unroll
  for (int group = 0; group < TOKENS / 8; ++group) {
    uint32_t to = shared_address(place(group * 8 + lane % 8, warp * 2 + lane / 8 % 2));
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                 "r"(narrow(d[group][0], d[group][1])), "r"(narrow(d[group][2], d[group][3]))
                 : "memory");
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (last - first) * (COLUMNS / 8); i += THREADS) {
    int row = i / (COLUMNS / 8), piece = i % (COLUMNS / 8);
    *reinterpret_cast<uint4*>(out + (static_cast<int64_t>(first + row) * H + head) * WIDTH + column + piece * 8) =
        *reinterpret_cast<const uint4*>(place(row, piece));
  }
}

}  // namespace

API int mla_absorb_query(const void* q, const void* ckv, int64_t ckv_stride, const void* kv_norm, const void* cos,
                  const void* sin, void* cache, int64_t slots, int64_t packed, const void* slot, int64_t T, float eps,
                  const void* w_uk, void* out, int64_t H, void* stream) {
  const NewRows rows = new_rows(ckv, ckv_stride, kv_norm, cos, sin, cache, slots, packed, slot, T, eps);
  auto start = [&](auto kernel, int columns) {
    int warps = columns / 16, tokens = T < TOKENS ? T : TOKENS;
    dim3 grid(H * (LATENT / columns) + (tokens + warps - 1) / warps, (T + TOKENS - 1) / TOKENS);
    return launch(kernel, grid, dim3(columns * 2), NOPE * columns * 2 + (tokens + 7) / 8 * 8 * ROW, stream, 1, static_cast<const bf16*>(q), rows,
                  static_cast<const bf16*>(w_uk), static_cast<bf16*>(out), H);
  };
  if (T == 0) return 0;
  if (H >= 48) return start(query<256>, 256);
  if (H >= 24) return start(query<128>, 128);
  return start(query<64>, 64);
}
