// One token's norm, router scores and selection of experts in one launch, while the kernel before still adds to the
// residual. Contract in mla_decode_router.py.
//
// Each CTA loads some rows of the gate to shared memory first. Then it reads the new residual from the mailbox that the
// launch before writes, normalises all of it, and writes the scores of its rows. The last CTA, which has no rows, writes
// x, polls for the scores and selects the experts. x is not published: the expert kernel computes it itself. The code
// that runs once the residual has arrived is run once before, without effect: an instruction cache miss takes
// microseconds while weights are being loaded. A CTA uses so few registers and so little shared memory that both CTAs of
// the expert kernel's next launch are co-resident with it on an SM, beside or after one of mla_decode_output's.
#include "cuda/residual_mailbox.cuh"
#include "moe/sm90/topk.cuh"
#include "cuda/wgmma.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = fresh::THREADS, WARPS = fresh::WARPS, PIECES = fresh::PIECES;

struct Args {
  const uint32_t* fresh;         // [2][D / 2]: the residual's mailbox; launches use the halves by turns
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

// Selects the experts, with all warps. Each lane waits for EACH scores. A score is listed unless top_k lanes of its warp
// have a better one: about 8.4 of a warp's 64 are, more with ties. An expert's rank is the number of better ones in the
// list. Ties go to the lower id.
template <int EACH>
struct Choosing {
  static constexpr int BLOCK = 64, MOST = (THREADS * EACH + BLOCK - 1) / BLOCK * BLOCK;
  alignas(16) uint64_t list[MOST];  // high: key; low: inverted expert id, so that ties go to the lower id; then zeros
  alignas(16) uint32_t best[WARPS][32];
  float biases[THREADS * EACH], scores[THREADS * EACH];
  int ids[32], listed;
};

template <int EACH>
__device__ __forceinline__ void choose(const Args& a, Choosing<EACH>& c, bool rehearsal) {
  using C = Choosing<EACH>;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, E = a.choice.E, first = warp * EACH * 32 + lane;
  const int top_k = a.choice.top_k;
  for (int n = tid; n < C::MOST; n += THREADS) c.list[n] = 0;
  if (tid == 0) c.listed = 0;
  __syncthreads();
  uint32_t seen[EACH] = {};
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      if (first + n * 32 < E && seen[n] == 0) seen[n] = mailbox::glance(a.scores + first + n * 32);
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) missing |= first + n * 32 < E && seen[n] == 0;
  } while (__any_sync(~0u, missing && !rehearsal));
  uint32_t key[EACH], best = 0;  // scores with bias as integers of the same order; 0 is below all
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const float score = __uint_as_float(~seen[n]);
    const uint32_t bits = __float_as_uint(score + c.biases[first + n * 32]);
    key[n] = first + n * 32 < E ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
    best = max(best, key[n]);
    c.scores[first + n * 32] = score;
  }
  c.best[warp][lane] = best;
  __syncwarp();
  int better[EACH] = {};  // lanes
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint4 v = reinterpret_cast<const uint4*>(c.best[warp])[i];
#pragma unroll
    for (int n = 0; n < EACH; n++) better[n] += (v.x > key[n]) + (v.y > key[n]) + (v.z > key[n]) + (v.w > key[n]);
  }
  uint32_t those[EACH];
  int count = 0;
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    those[n] = __ballot_sync(~0u, key[n] != 0 && better[n] < top_k);
    count += __popc(those[n]);
  }
  int at = lane == 0 ? atomicAdd(&c.listed, count) : 0;
  at = __shfl_sync(~0u, at, 0);
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const uint64_t word = static_cast<uint64_t>(key[n]) << 32 | ~static_cast<uint32_t>(first + n * 32);
    if (those[n] >> lane & 1) c.list[at + __popc(those[n] & ((1u << lane) - 1))] = word;
    at += __popc(those[n]);
  }
  __syncthreads();
  // Four lanes count the rank of one expert.
  const int listed = rehearsal ? 1 : c.listed;
#pragma unroll 1
  for (int begin = 0; begin < listed; begin += THREADS / 4) {
    const int of = begin + tid / 4;
    const uint64_t mine = c.list[min(of, C::MOST - 1)];
    int rank = 0;
#pragma unroll 1
    for (int block = 0; block < listed; block += C::BLOCK) {
#pragma unroll
      for (int i = 0; i < C::BLOCK / 8; i++) {
        const ulonglong2 v = *reinterpret_cast<const ulonglong2*>(c.list + block + i * 8 + lane % 4 * 2);
        rank += (v.x > mine) + (v.y > mine);
      }
    }
    rank += __shfl_xor_sync(~0u, rank, 1);
    rank += __shfl_xor_sync(~0u, rank, 2);
    if (lane % 4 == 0 && of < listed && rank < top_k) {
      const int id = static_cast<int>(~static_cast<uint32_t>(mine));
      if (!rehearsal) mailbox::publish_choice(a.mailbox, a.launch, rank, id);
      c.ids[rank] = id;
    }
  }
  __syncthreads();
  if (warp == 0) {
    const int id = c.ids[min(lane, top_k - 1)];
    const float kept = lane < top_k ? c.scores[id] : 0, sum = warp_sum(kept);
    if (lane < top_k && !rehearsal) {
      a.choice.ids[lane] = id;
      a.choice.weights[lane] = (a.choice.norm ? kept / (sum + 1e-20f) : kept) * a.choice.scale;
    }
  }
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    if (first + n * 32 < E && !rehearsal) a.scores[first + n * 32] = 0;
  }
}

template <int EACH, int ROWS>
__global__ __launch_bounds__(THREADS, 3) void mla_decode_router_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) float squares[8];
  __shared__ float parts[ROWS][8];
  __shared__ uint64_t barrier;
  __shared__ uint32_t turn_shared;
  auto& choosing = *reinterpret_cast<Choosing<EACH>*>(memory);  // of the CTA that has no rows
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tid = threadIdx.x;
  const int pieces = a.D / 8, E = a.choice.E, begin = blockIdx.x * ROWS;
  const bool watches = blockIdx.x == gridDim.x - 1;
  let_successor_start();
  // Small loads first: memory answers in order, and the rehearsal would wait for them behind the rows of the gate.
  uint4 w[PIECES];
  fresh::load_weights(w, a.norm, pieces);
  if (tid == 0) {
    const unsigned long long started = atomicAdd(a.launches, 1ull);
    barrier_init(&barrier, 1);
    barriers_visible();
    if (!watches) {
      barrier_expect(&barrier, ROWS * a.D * 2);
      for (int r = 0; r < ROWS; r++) {  // past the last expert: its row again
        bulk_load_once(memory + r * a.D * 2, a.gate + static_cast<int64_t>(min(begin + r, E - 1)) * a.D, a.D * 2,
                       &barrier);
      }
    }
    turn_shared = static_cast<uint32_t>(started / gridDim.x) & 1;
    if (watches) mailbox::publish_turn(a.mailbox, a.launch, turn_shared);
  }
  if (watches) {
    for (int n = tid; n < THREADS * EACH; n += THREADS) choosing.biases[n] = n < E ? a.choice.bias[n] : 0;
    if (tid < 32) choosing.ids[tid] = 0;
  }
  __syncthreads();
  const uint32_t* half = a.fresh + turn_shared * (a.D / 2);
  const uint32_t* late = fresh::late(half, pieces);
#pragma unroll 1
  for (bool rehearsal = true;; rehearsal = false) {
    if (!rehearsal) {
      if (!watches) barrier_wait(&barrier, 0);
      if (warp == 0) {
        while (__all_sync(~0u, mailbox::glance(late) == 0)) {  // any: the others follow while the pieces are asked for
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
      choose<EACH>(a, choosing, rehearsal);
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
  return rows == 4 ? start(mla_decode_router_kernel<3, 4>, sizeof(Choosing<3>))
                   : start(mla_decode_router_kernel<2, 3>, sizeof(Choosing<2>));
}
