// Sum, norm, router scores and choice of experts of 2 to 8 tokens in one launch. Contract in add_norm_router.py.
//
// A cluster of CTAs has 24 rows of the gate, each CTA 896 columns of them, in shared memory before the activations are
// there. Every cluster adds up the whole residual, each CTA its columns of all tokens, exchanges the sums of squares,
// and multiplies; a CTA's parts of scores go to a mailbox in global memory. Cluster t also does what concerns token t
// alone: it sends this rank's part to the peers, the last warp of each of its CTAs, which does not multiply, writes x,
// and its first CTA adds the parts of the scores up and chooses.
//
// The residual is written in place, and every cluster reads it: so the CTA that chooses writes it, after the scores of
// its token have come from all CTAs, which have read the residual of all tokens by then. It has the row from the other
// CTAs of its cluster, so all CTAs but those that choose end early. Only those wait for later clusters, and none waits
// for them: so clusters need not be on the GPU together.
//
//   cluster t       add | squares | scores ----------------------- | rehearse, choose, write ids and residual
//     its last warp               | x, fence, let the experts start
//   other clusters  add | squares | scores, end
//   experts                                                        | read x, shared expert | wait for the end
//
// x has the bits of exchange_add_rmsnorm: the same threads add the same values in the same order.
#include "cuda/lines.cuh"
#include "cuda/router_mailbox.cuh"
#include "moe/sm90/choice.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int LAST = WARPS - 1;  // it multiplies nothing and chooses nothing
constexpr int ABREAST = THREADS / LINE_THREADS;  // tokens at a time, a thread for each 8 values
constexpr int WIDTH = lines::LINES * lines::PIECES * 8;  // columns of a CTA
constexpr int TILES = 3, ROWS = TILES * 8;                // rows of the gate of a cluster
constexpr int PITCH = WIDTH * 2 + 64;                     // bytes between rows: two neighbours share no bank
constexpr int CHUNK = 32, CHUNKS = WIDTH / CHUNK / LAST;  // of k; of a warp
constexpr int EACH = 2, TOP_K = 8;
static_assert(CHUNKS * LAST * CHUNK == WIDTH);

struct Args {
  bf16* residual;    // [T, D]
  const bf16* y;     // [T, D]
  const bf16* norm;  // [D]
  const bf16* gate;  // [E, D]
  routing::Choice choice;
  bf16* x;         // [T, D]
  uint32_t* sums;  // [T, CLUSTER, E]: bits of a float, inverted; zero, before and after, where there is none
  int T, D;
  float inverse, eps;
};

using Choosing = routing::Choosing<LAST, EACH>;

// The scores of a token's experts, as `routing::choose` wants them, once all parts are there. A rehearsal neither
// reads nor waits: a round trip to memory takes longer than the rest of it.
__device__ __forceinline__ void add_up(const Args& a, int token, int parts, bool rehearsal, float (&score)[EACH]) {
  const int E = a.choice.E, first = threadIdx.x / 32 * EACH * 32 + threadIdx.x % 32;
  uint32_t* sums = a.sums + static_cast<int64_t>(token) * CLUSTER * E;
  uint32_t seen[CLUSTER][EACH] = {};
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int p = 0; p < CLUSTER; p++) {
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        const int e = first + n * 32;
        if (p < parts && e < E && seen[p][n] == 0 && !rehearsal) seen[p][n] = mailbox::glance(sums + p * E + e);
      }
    }
#pragma unroll
    for (int p = 0; p < CLUSTER; p++) {
#pragma unroll
      for (int n = 0; n < EACH; n++) missing |= p < parts && first + n * 32 < E && seen[p][n] == 0;
    }
  } while (__any_sync(~0u, missing && !rehearsal));
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const int e = first + n * 32;
    float v = 0;
#pragma unroll
    for (int p = 0; p < CLUSTER; p++) {
      if (p >= parts) break;
      v += __uint_as_float(~seen[p][n]);
      if (e < E && !rehearsal) sums[p * E + e] = 0;
    }
    score[n] = 1.0f / (1.0f + expf(-v));
  }
}

template <int RANKS, int TOKENS>
__global__ __launch_bounds__(THREADS, 2) void add_norm_router_kernel(const __grid_constant__ Peers peers,
                                                                     const __grid_constant__ Args a) {
  constexpr int ROUNDS = TOKENS / ABREAST;
  constexpr int TOGETHER = RANKS == 8 && TOKENS == 8 ? 1 : 2;  // rounds, the lines of which are waited for together
  extern __shared__ __align__(128) uint8_t memory[];  // the gate's rows, at the end a row of the residual; x; sums
  __shared__ float received[TOKENS][CLUSTER * lines::WARPS];
  __shared__ Choosing choosing;
  __shared__ uint64_t gate_full, squares_full, row_full, room;
  const int ctas = cluster_size(), cta = cluster_rank(), cluster = blockIdx.x / ctas;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int slot = tid % 8, abreast = tid / LINE_THREADS, piece = tid % LINE_THREADS / 8 * lines::PIECES + slot;
  const bool data = slot < lines::PIECES, keeps = cluster < a.T, chooses = keeps && cta == 0;
  const int column = cta * WIDTH + piece * 8, begin = cluster * ROWS, E = a.choice.E;
  uint8_t* const xs = memory + ROWS * PITCH;
  float* const parts = reinterpret_cast<float*>(xs + TOKENS * PITCH);  // [LAST, TOKENS, ROWS]
  if (!keeps) let_successor_start();  // clusters of tokens: when x is written
  if (warp == LAST) {
    if (lane == 0) {
      barrier_init(&gate_full, 1);
      barrier_init(&squares_full, 1);
      barrier_init(&row_full, 1);
      barrier_init(&room, 1);
      barriers_visible();
      barrier_expect(&gate_full, ROWS * WIDTH * 2);
      barrier_expect(&squares_full, ctas * WARPS * ROUNDS * 4);
      if (chooses) barrier_expect(&row_full, a.D * 2);
    }
    __syncwarp();
    if (lane < ROWS) {  // past the last expert, its row again
      const bf16* from = a.gate + static_cast<int64_t>(min(begin + lane, E - 1)) * a.D + cta * WIDTH;
      bulk_load_once(memory + lane * PITCH, from, WIDTH * 2, &gate_full);
    }
  } else if (chooses) {
    for (int n = tid; n < LAST * EACH * 32; n += LAST * 32) choosing.biases[n] = n < E ? a.choice.bias[n] : 0;
    if (tid < 32) choosing.ids[tid] = 0;
  }
  cluster_arrive();
  const uint4 weight = data ? load16(a.norm + column) : uint4{};
  cluster_wait();  // the barriers of all CTAs are there
  wait_for_predecessor();

  // Before anything else: the loads that all else waits for.
  uint4 fresh[ROUNDS], own[ROUNDS];  // first the old residual
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int token = r * ABREAST + abreast;
    const int64_t at = static_cast<int64_t>(token) * a.D + column;
    const bool there = data && token < a.T;
    fresh[r] = there ? __ldcg(reinterpret_cast<const uint4*>(a.residual + at)) : uint4{};
    own[r] = there ? __ldcg(reinterpret_cast<const uint4*>(a.y + at)) : uint4{};
  }
  uint32_t* const count = RANKS > 1 ? peers.control + 1 : nullptr;  // [tokens, CLUSTER]
  uint32_t uses = 0;  // of a place of the token that is chosen for
  if (RANKS > 1 && chooses && tid < ctas) uses = __ldcg(count + cluster * CLUSTER + tid);
  bool patient = RANKS == 1 || __ldcg(peers.control) == 0;  // after a failure, lines are looked at once
  const uint32_t rank = RANKS > 1 ? peers.rank : 0;
  const uint4* places[ROUNDS];
  uint32_t from[ROUNDS], epochs[ROUNDS];
  if (RANKS > 1) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      epochs[r] = __ldcg(count + min(r * ABREAST + abreast, a.T - 1) * CLUSTER + cta) + 1;
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      const int token = r * ABREAST + abreast;
      const uint32_t epoch = epochs[r];
      const int64_t line = static_cast<int64_t>(min(token, a.T - 1) * CLUSTER + cta) * LINE_THREADS;
      const int64_t place = line + tid % LINE_THREADS + (epoch & 1 ? RANKS * HALF : 0);
      if (token == cluster && keeps) {
        const uint4 out = lines::either(data, own[r], make_uint4(epoch, epoch, epoch, epoch));
#pragma unroll
        for (int s = 1; s < RANKS; s++) send(peers.mailbox[(rank + s) % RANKS] + rank * HALF + place, out);
      }
      places[r] = peers.mailbox[rank] + place;
      from[r] = token < a.T ? ((1 << RANKS) - 1) & ~(1 << rank) : 0;
    }
  }
#pragma unroll
  for (int first = 0; first < ROUNDS; first += TOGETHER) {
    uint4 got[TOGETHER][RANKS];
    bool whole = true;
    if (RANKS > 1) {
      const uint4* some_places[TOGETHER];
      uint32_t some_from[TOGETHER], some_epochs[TOGETHER];
#pragma unroll
      for (int n = 0; n < TOGETHER; n++) {
        some_places[n] = places[first + n], some_from[n] = from[first + n], some_epochs[n] = epochs[first + n];
      }
      whole = lines::receive<RANKS, TOGETHER>(got, some_places, some_from, some_epochs, peers, patient);
      patient &= whole;
    }
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      const int r = first + n;
      float mine[8], before[8], value[8], squares = 0;
      lines::widened(mine, own[r]);
      lines::widened(before, fresh[r]);
      fresh[r] = whole ? lines::added<RANKS>(got[n], mine, before, rank)
                       : make_uint4(~0u, ~0u, ~0u, ~0u);  // NaN
      lines::widened(value, fresh[r]);
#pragma unroll
      for (int j = 0; j < 8; j++) squares += value[j] * value[j];
      squares = warp_sum(data ? squares : 0.f);
      if (lane < ctas) {
        float* to = &received[r * ABREAST + abreast][cta * lines::WARPS + warp % lines::WARPS];
        lines::send_in(to, &squares_full, lane, squares);
      }
    }
  }
  float factor[8];
  lines::widened(factor, weight);
  barrier_wait(&squares_full, 0);
  uint4 kept = {};  // of the residual of this cluster's token
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int token = r * ABREAST + abreast;
    const float sum = warp_sum(lane < ctas * lines::WARPS ? received[token][lane] : 0.f);
    const float scale = rsqrtf(sum * a.inverse + a.eps);
    float value[8];
    lines::widened(value, fresh[r]);
#pragma unroll
    for (int j = 0; j < 8; j++) value[j] = value[j] * scale * factor[j];
    const uint4 x = lines::rounded(value);
    if (data) *reinterpret_cast<uint4*>(xs + token * PITCH + piece * 16) = x;
    if (token == cluster) kept = fresh[r];
  }
  __syncthreads();
  if (warp == LAST) {
    if (!keeps) return;
    const uint4* from = reinterpret_cast<const uint4*>(xs + cluster * PITCH);
    uint4* to = reinterpret_cast<uint4*>(a.x + static_cast<int64_t>(cluster) * a.D + cta * WIDTH);
    for (int n = lane; n < WIDTH / 8; n += 32) to[n] = from[n];
    __threadfence();  // for the experts' kernel, which may read x as soon as it starts
    __syncwarp();
    let_successor_start();
    barrier_wait(&room, 0);
    if (data && abreast == cluster % ABREAST) lines::send_in(memory + column * 2, &row_full, 0, kept);
    return;
  }
  barrier_wait(&gate_full, 0);

  float acc[TILES][2][4] = {};
  const uint8_t* at_x = xs + min(g, TOKENS - 1) * PITCH + 16 * t;
  const uint8_t* at_gate = memory + g * PITCH + 16 * t;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = (warp * CHUNKS + c) * CHUNK * 2;
    const uint4 x = *reinterpret_cast<const uint4*>(at_x + at);
    const uint32_t even[4] = {x.x, 0, x.y, 0}, odd[4] = {x.z, 0, x.w, 0};
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const uint4 w = *reinterpret_cast<const uint4*>(at_gate + n * 8 * PITCH + at);
      mma(acc[n][0], even, w.x, w.y, bf16());
      mma(acc[n][1], odd, w.z, w.w, bf16());
    }
  }
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const float2 v = make_float2(acc[n][0][0] + acc[n][1][0], acc[n][0][1] + acc[n][1][1]);
    if (g < TOKENS) *reinterpret_cast<float2*>(parts + (warp * TOKENS + g) * ROWS + n * 8 + 2 * t) = v;
  }
  named_sync(1, LAST * 32);
  // Where the gate's rows of the first CTA were, there is room for a row of the residual.
  if (chooses && warp == LAST - 1 && lane < ctas) barrier_arrive_at(&room, lane);
  if (tid < a.T * ROWS) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < LAST; w++) v += parts[w * TOKENS * ROWS + tid];
    const int token = tid / ROWS, e = begin + tid % ROWS;
    if (e < E) mailbox::put(a.sums + (static_cast<int64_t>(token) * CLUSTER + cta) * E + e, mailbox::written(v));
  }
  if (!keeps) return;

  barrier_wait(&room, 0);
  if (data && abreast == cluster % ABREAST) lines::send_in(memory + column * 2, &row_full, 0, kept);
  if (!chooses) return;
  // Run once without effect while scores are on their way: the first run of any instruction takes long.
#pragma unroll 1
  for (bool rehearsal = true;; rehearsal = false) {
    float score[EACH];
    add_up(a, cluster, ctas, rehearsal, score);
    routing::choose<LAST, EACH, TOP_K>(a.choice, choosing, score, cluster, rehearsal, [] { named_sync(1, LAST * 32); },
                                           [](int, int) {});
    if (!rehearsal) break;
  }
  barrier_wait(&row_full, 0);
  uint4* to = reinterpret_cast<uint4*>(a.residual + static_cast<int64_t>(cluster) * a.D);
  for (int n = tid; n < a.D / 8; n += LAST * 32) to[n] = reinterpret_cast<const uint4*>(memory)[n];
  if (RANKS > 1 && tid < ctas) count[cluster * CLUSTER + tid] = uses + 1;
}

template <int TOKENS>
auto kernel_for(int64_t ranks) {
  return ranks == 1   ? add_norm_router_kernel<1, TOKENS>
         : ranks == 2 ? add_norm_router_kernel<2, TOKENS>
         : ranks == 4 ? add_norm_router_kernel<4, TOKENS>
                      : add_norm_router_kernel<8, TOKENS>;
}

}  // namespace

// T 2 to 8, and a cluster for each; D 2 to 8 times 896; E at most 448; 8 experts of a token.
// peers, in the host's memory, or null. sums [8, 8, E]: zero before and after.
API int add_norm_router(const Peers* peers, void* residual, const void* y, const void* norm, const void* gate,
                        const void* bias, void* x, void* sums, void* ids, void* weights, int64_t T, int64_t D, int64_t E,
                        int64_t norm_weights, float eps, float scale, void* stream) {
  const Args a{static_cast<bf16*>(residual),
               static_cast<const bf16*>(y),
               static_cast<const bf16*>(norm),
               static_cast<const bf16*>(gate),
               {static_cast<const float*>(bias), static_cast<int*>(ids), static_cast<float*>(weights),
                static_cast<int>(E), TOP_K, static_cast<int>(norm_weights), scale},
               static_cast<bf16*>(x),
               static_cast<uint32_t*>(sums),
               static_cast<int>(T),
               static_cast<int>(D),
               1.f / D,
               eps};
  const int64_t ctas = D / WIDTH, clusters = (E + ROWS - 1) / ROWS;
  if (T < 2 || T > 8 || clusters < T || D % WIDTH || ctas < 2 || ctas > CLUSTER || E > LAST * EACH * 32) return -1;
  const int64_t ranks = peers == nullptr ? 1 : peers->ranks, tokens = T > 4 ? 8 : 4;
  const size_t shared = (ROWS + tokens) * PITCH + LAST * tokens * ROWS * 4;
  auto kernel = tokens == 8 ? kernel_for<8>(ranks) : kernel_for<4>(ranks);
  return launch(kernel, dim3(clusters * ctas), dim3(THREADS), shared, stream, ctas, peers == nullptr ? Peers{} : *peers,
                a);
}
