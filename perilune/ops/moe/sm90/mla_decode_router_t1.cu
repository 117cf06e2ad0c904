// One token's norm, router scores and selection of experts in one launch, while the kernel before still adds to the
// residual. Contract in mla_decode_router.py.
//
// Each CTA loads some rows of the gate to shared memory first. Then it reads the new residual from the mailbox that the
// launch before writes, normalises all of it, and writes the scores of its rows. The last CTA, which has no rows, writes
// x, polls for the scores and selects the experts. x is not published: the expert kernel computes it itself. The code
// that runs once the residual has arrived is first run without effect (`rehearsal`), to fill the instruction cache: a
// miss takes microseconds while weights are being loaded. A CTA uses so few registers and so little shared memory that
// both CTAs of the expert kernel's first launch fit beside it on an SM, together with or after one of
// mla_decode_output.
#include "cuda/residual_mailbox.cuh"
#include "moe/sm90/topk.cuh"
#include "cuda/wgmma.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = fresh::THREADS, WARPS = fresh::WARPS, PIECES = fresh::PIECES;

struct Args {
  const uint32_t* fresh;         // [2][D / 2]: the residual's mailbox; launches alternate between halves
  unsigned long long* launches;  // number of CTAs of all launches so far
  const bf16* norm;              // [D]
  const bf16* gate;              // [E, D]
  routing::Choice choice;
  bf16* x;                       // [D]
  uint32_t* scores;              // [E]: inverted bits of a float; 0: not written. Zero before and after the launch
  uint32_t* mailbox;
  uint32_t launch;
  int D;
  float eps;
};

template <int EACH, int ROWS>
__global__ __launch_bounds__(THREADS, 3) void mla_decode_router_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) float squares[8];
  __shared__ float parts[ROWS][8];
  __shared__ uint64_t barrier;
  __shared__ uint32_t turn_shared;
  auto& choosing = *reinterpret_cast<routing::Choosing<EACH, WARPS>*>(memory);  // for the CTA without rows
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tid = threadIdx.x;
  const int pieces = a.D / 8, E = a.choice.E, begin = blockIdx.x * ROWS;
  const bool watches = blockIdx.x == gridDim.x - 1;
  let_successor_start();
  // Small loads before the gate: loads return in order of issue, and the rehearsal needs these.
  uint4 w[PIECES];
  fresh::load_weights(w, a.norm, pieces);
  if (tid == 0) {
    const unsigned long long started = atomicAdd(a.launches, 1ull);
    barrier_init(&barrier, 1);
    barriers_visible();
    if (!watches) {
      barrier_expect(&barrier, ROWS * a.D * 2);
      for (int r = 0; r < ROWS; r++) {  // rows past the last expert repeat its row
        bulk_load_once(memory + r * a.D * 2, a.gate + static_cast<int64_t>(min(begin + r, E - 1)) * a.D, a.D * 2,
                       &barrier);
      }
    }
    turn_shared = static_cast<uint32_t>(started / gridDim.x) & 1;
    if (watches) mailbox::publish_turn(a.mailbox, a.launch, turn_shared);
  }
  if (watches) choosing.begin(a.choice);
  __syncthreads();
  const uint32_t* half = a.fresh + turn_shared * (a.D / 2);
  const uint32_t* late = fresh::late(half, pieces);
#pragma unroll 1
  for (bool rehearsal = true;; rehearsal = false) {
    if (!rehearsal) {
      if (!watches) barrier_wait(&barrier, 0);
      if (warp == 0) {
        while (__all_sync(~0u, mailbox::glance(late) == 0)) {  // until one late piece is written; then `look` polls all
        }
      }
      __syncthreads();
    }
    uint4 v[PIECES] = {};
    while (!fresh::look(v, half, rehearsal ? 0 : pieces)) {
    }
    fresh::normalise(v, w, pieces, a.eps, squares, [] { __syncthreads(); });
    if (watches) {
      if (!rehearsal) {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
          if (fresh::piece_of(n) < pieces) *reinterpret_cast<uint4*>(a.x + fresh::piece_of(n) * 8) = v[n];
        }
      }
      uint32_t* scores = a.scores + choosing.first();
      const auto real = [&](int n) { return choosing.first() + n * 32 < E; };
      choosing.choose(a.choice, 0, rehearsal, [&](float (&score)[EACH]) {
        uint32_t seen[EACH] = {};
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int n = 0; n < EACH; n++) {
            if (real(n) && seen[n] == 0) seen[n] = mailbox::glance(scores + n * 32);
          }
#pragma unroll
          for (int n = 0; n < EACH; n++) missing |= real(n) && seen[n] == 0;
        } while (__any_sync(~0u, missing && !rehearsal));
#pragma unroll
        for (int n = 0; n < EACH; n++) score[n] = __uint_as_float(~seen[n]);
      }, [&](int k, int id) { mailbox::publish_choice(a.mailbox, a.launch, k, id); });
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        if (real(n) && !rehearsal) scores[n * 32] = 0;
      }
    } else {
      float d[ROWS][4] = {}, acc[ROWS];
#pragma unroll
      for (int n = 0; n < PIECES; n++) {
        const uint8_t* at = memory + min(fresh::piece_of(n), pieces - 1) * 16;  // past the last one x is zero
#pragma unroll
        for (int r = 0; r < ROWS; r++) fresh::multiply(d[r], v[n], *reinterpret_cast<const uint4*>(at + r * a.D * 2));
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) acc[r] = fresh::of_diagonal(d[r]);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        if (lane == 0) parts[r][warp] = acc[r];
      }
      __syncthreads();
      if (warp == 0) {
        float v = lane % 8 < WARPS && lane / 8 < ROWS ? parts[lane / 8][lane % 8] : 0;
#pragma unroll
        for (int l = 1; l < 8; l <<= 1) v += __shfl_xor_sync(~0u, v, l);
        v = 1.0f / (1.0f + expf(-v));
        const int row = lane / 8;
        if (lane % 8 == 0 && row < ROWS && begin + row < E && !rehearsal) {
          mailbox::put(a.scores + begin + row, mailbox::written(__float_as_uint(v)));
        }
      }
    }
    if (!rehearsal) break;
  }
  wait_for_predecessor();
}

}  // namespace

// D a multiple of 256 and at most 7,168; E at most 512; top_k at most 32; rows: of the gate per CTA, 3 or 4.
// fresh: as written by the launch of mla_decode_output before this one; every launch with this mailbox must follow one.
// launches: 0 at first. scores [E]: zero before and after. mailbox: see router_mailbox.cuh; launch: see router.py.
API int mla_decode_router(const void* fresh, void* launches, const void* norm, const void* gate, const void* bias, void* x,
                  void* scores, void* mailbox, void* ids, void* weights, int64_t launch_number, int64_t D, int64_t E,
                  int64_t top_k, int64_t norm_weights, int64_t rows, float eps, float scale, void* stream) {
  const Args a{static_cast<const uint32_t*>(fresh),
               static_cast<unsigned long long*>(launches),
               static_cast<const bf16*>(norm),
               static_cast<const bf16*>(gate),
               {static_cast<const float*>(bias), static_cast<int*>(ids), static_cast<float*>(weights),
                static_cast<int>(E), static_cast<int>(top_k), static_cast<int>(norm_weights), scale},
               static_cast<bf16*>(x),
               static_cast<uint32_t*>(scores),
               static_cast<uint32_t*>(mailbox),
               static_cast<uint32_t>(launch_number),
               static_cast<int>(D),
               eps};
  if (rows < 3 || rows > 4 || D % 256 || D > THREADS * PIECES * 8) return -1;
  const unsigned ctas = static_cast<unsigned>((E + rows - 1) / rows) + 1;
  if (E > (rows == 3 ? WARPS * 64 : routing::MOST_EXPERTS)) return -1;
  const auto start = [&](auto kernel, int64_t least) {
    return launch(kernel, dim3(ctas), dim3(THREADS), max(rows * D * 2, least), stream, 1, a);
  };
  return rows == 4 ? start(mla_decode_router_kernel<3, 4>, sizeof(routing::Choosing<3, WARPS>))
                   : start(mla_decode_router_kernel<2, 3>, sizeof(routing::Choosing<2, WARPS>));
}
