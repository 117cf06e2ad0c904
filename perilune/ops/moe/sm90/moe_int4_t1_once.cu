// The MoE block for one token of a rank's slice, both halves in one launch. Contract in moe_int4.py.
//
// As moe_int4_t1.cu, which explains tiles, units and slots; but every CTA goes on to down when no units of gate_up are
// left, with the same ring of slots. So the memory does not idle between the halves: while the last sums of gate_up are
// on their way to h, the ring fills with weights of down. On a slice the time between two launches was as long as down's
// stream.
//
// h travels as words of a pair of values and a tag, the number of the launch: a matching tag says that the pair is of
// this launch. A CTA polls for the words of the experts that it multiplies by, and of no others.
//
//   copying warp    shared gate_up | choice | units of gate_up ... | shared and routed units of down ......|
//   multiplying                  wait for x | products, words of h ....... | wait for words of h | products |
//
// All CTAs must be on the GPU together, two to a processor: each waits for what others make of h.
#include "moe/sm90/moe_int4_t1.cuh"

using namespace hopper;
using namespace moe;

namespace {

constexpr int CTAS = 2, SLOTS = 4;  // CTAs of a processor; of a ring

struct Shape {
  Args up, down;
};
struct AllMaps {
  Maps up, down;
};
struct Handed {
  uint64_t* words;             // of h: [k I / 2], then [S / 2]: a pair of values, and a tag in the upper half
  unsigned long long* counts;  // of all launches: CTAs that have begun; CTAs that have read the router's mailbox
  uint32_t* taken;             // [2]: units of gate_up taken; launches use them by turns, and each zeroes the other
};

template <bool COMPACT>
struct Kernel : InShared {
  using Up = OneToken<true, COMPACT, 7, 1>;
  using Down = OneToken<false, COMPACT, 1, 7>;
  static constexpr int WARPS = Up::WARPS, CONSUMERS = Up::CONSUMERS, THREADS = Up::THREADS, SLOT = Up::SLOT;
  static_assert(WARPS == Down::WARPS && SLOT == Down::SLOT);

  static __device__ __forceinline__ ulonglong2 look(const uint64_t* p) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
    return v;
  }
  static __device__ __forceinline__ bool arrived(const ulonglong2& v, uint32_t tag) {
    return v.x >> 32 == tag && v.y >> 32 == tag;
  }

  // ---- the copying warp ----

  static __device__ void produce(const Shape& s, const AllMaps& maps, Range up_shared, Range down_shared,
                                 uint32_t* taken) {
    const Args &up = s.up, &down = s.down;
    const int lane = threadIdx.x % 32;
    if (lane == 0) prefetch_map(&maps.up.routed);
    if (lane == 1) prefetch_map(&maps.down.routed);
    if (lane == 2 && up.shared.tiles > 0) prefetch_map(&maps.up.shared);
    if (lane == 3 && up.shared.tiles > 0) prefetch_map(&maps.down.shared);
    int into = 0, phase = 1, buffer = 0, opened = 0, ahead = 0, units = 0;
    bool planned = false;
    uint32_t heard = 0;  // what the mailbox said of choice `lane`
    const auto take = [&] { return lane == 0 ? static_cast<int>(atomicAdd(taken, 1)) : 0; };
    const auto plan_if_arrived = [&](uint32_t word) {
      if (!__all_sync(~0u, lane >= up.k || mailbox::arrived(word, up.launch))) return;
      Up::plan(up, {lane < up.k ? mailbox::choice_of(word) : -1, 1});
      ahead = take();
      planned = true;
    };
    const auto copy = [&](auto of, const Args& a, const Matrix& w, const CUtensorMap& map, int expert, int unit,
                          int number) {
      using Of = decltype(of);
      const int slots = divide_up(w.row, Of::PIECE);
      const int64_t first = expert * w.expert + static_cast<int64_t>(unit) * Of::BOX_ROWS;
      for (int n = 0; n < slots; n++) {
        if (!planned && opened < a.slots) {  // one at a time: what others hand over would arrive behind a whole ring
          if (opened > 0) barrier_wait(&barriers().full[opened - 1], 0);
          opened++;
        }
        barrier_wait_to_refill(&barriers().empty[into], phase);
        Of::request(a, w, map, first, n, into, buffer, number);
        if (++into == a.slots) into = 0, phase ^= 1;
        if (!planned && up.launch) {  // what was asked for a slot ago is there
          plan_if_arrived(heard);
          heard = mailbox::glance_choice(up.mailbox, up.k);
        }
      }
      if (++buffer == a.scale_buffers) buffer = 0;
    };

    for (int u = up_shared.first; u < up_shared.end; u++) copy(Up(), up, up.shared, maps.up.shared, 0, u, 0);
    if (!up.launch) {
      wait_for_predecessor();
      Up::plan(up, Up::ask(up));
      ahead = take();
      planned = true;
    }
    while (!planned) plan_if_arrived(mailbox::glance_choice(up.mailbox, up.k));
    Plan& p = plan_of();
    for (;;) {
      const int u = __shfl_sync(~0u, ahead, 0);
      if (u >= p.units.end) break;
      const int c = Up::choice_of(up, u);
      copy(Up(), up, up.routed, maps.up.routed, p.chosen[c].expert, u - c * up.routed.tiles, u);
      units++;
      ahead = take();
      barrier_wait(&barriers().empty[into], phase);  // and no unit before its slot is free
    }

    const int per_expert = down.routed.tiles / WARPS;
    const Range own = Down::routed_units(down, p.count * per_expert);
    if (lane == 0) {
      p.down = own;
      barriers().units = units;
      barrier_arrive(&barriers().last);
    }
    __syncwarp();
    buffer = 0;  // down has scales of its own
    for (int u = down_shared.first; u < down_shared.end; u++) copy(Down(), down, down.shared, maps.down.shared, 0, u, -1);
    for (int u = own.first; u < own.end; u++) {
      const int c = Down::choice_of(down, u);
      copy(Down(), down, down.routed, maps.down.routed, p.chosen[c].expert, u - c * per_expert, -1);
    }
  }

  // ---- the multiplying warps ----

  // As OneToken::stage, of words of h: `shared` pieces of 8 values of the shared expert, if any, then those of `count`
  // choices from `first` on.
  static __device__ __forceinline__ void stage_h(const Args& a, const Handed& handed, uint32_t tag, int shared,
                                                 int first, int count) {
    const unsigned quad = 0xfu << (threadIdx.x & 28);
    const int each = a.K / 8, pieces = shared + count * each;
#pragma unroll 1
    for (int piece = threadIdx.x; piece < pieces; piece += CONSUMERS) {
      const int c = piece < shared ? 0 : (piece - shared) / each;
      const int at = piece < shared ? a.k * each + piece
                                    : plan_of().chosen[first + c].number * each + (piece - shared - c * each);
      const uint64_t* from = handed.words + static_cast<int64_t>(at) * 4;
      ulonglong2 low, high;
      do low = look(from), high = look(from + 2);
      while (!arrived(low, tag) || !arrived(high, tag));
      __syncwarp(quad);
      const uint4 v = make_uint4(static_cast<uint32_t>(low.x), static_cast<uint32_t>(low.y),
                                 static_cast<uint32_t>(high.x), static_cast<uint32_t>(high.y));
      *reinterpret_cast<uint4*>(memory(a.xs) + piece * 16) = raised(v, RAISED / 16);
      float sum = total(v);
      sum += __shfl_xor_sync(quad, sum, 1);
      sum += __shfl_xor_sync(quad, sum, 2);
      if (piece % 4 == 0 && piece >= shared) {
        reinterpret_cast<float*>(memory(a.starts))[(piece - shared) / 4] = sum * (-8 * UNIT * RAISED);
      }
    }
    Up::meet_all();
  }

  static __device__ void consume(const Shape& s, const Handed& handed, Range up_shared, Range down_shared) {
    const Args &up = s.up, &down = s.down;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const uint32_t tag = barriers().tag;
    const int shared_pieces = down_shared.first < down_shared.end ? down.shared.row / (down.shared.factor ? 8 : 16) : 0;
    int from = 0, phase = 0, buffer = 0, turn = 0;
    typename Up::Window window{0, 0};

    // Sums of a tile's rows over the warps, which meet here once: the buffers of sums alternate. Results go to the words
    // from value `at` of h on.
    const auto finish = [&](float upper, float lower, int at) {
      float* sums = reinterpret_cast<float*>(memory(up.sums)) + turn % 2 * WARPS * 16;
      if (t == 0) sums[warp * 16 + g] = upper, sums[warp * 16 + g + 8] = lower;
      named_sync(2, CONSUMERS);
      if (warp == turn % WARPS) {
        const float* own = sums + lane % 8;
        float v = 0, more = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) v += own[w * 16], more += own[w * 16 + 8];
        const uint32_t mine = __bfloat16_as_ushort(__float2bfloat16(v / (1 + __expf(-v)) * more));
        const uint32_t pair = mine | __shfl_down_sync(~0u, mine, 1) << 16;
        if (lane < 8 && lane % 2 == 0) {
          asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(handed.words + (at + lane) / 2),
                       "l"(static_cast<uint64_t>(tag) << 32 | pair)
                       : "memory");
        }
      }
      turn++;
    };

    if (up.launch && up.fresh != nullptr) {
      Up::stage_fresh(up);
      window.end = up.K / 8;
    } else if (up.launch) {
      mailbox::wait_for_x(up.mailbox, up.launch);
    } else {
      wait_for_predecessor();
    }
    for (int u = up_shared.first; u < up_shared.end; u++) {
      float sums[4];
      if (up.shared.factor == nullptr) {
        Up::template dense_tile<false>(up, buffer, window, from, phase, sums);
      } else {
        Up::template dense_tile<true>(up, buffer, window, from, phase, sums);
      }
      if (++buffer == up.scale_buffers) buffer = 0;
      finish(sums[0], sums[2], up.k * down.K + u * Up::ROWS);
    }

    barrier_wait(&barriers().planned, 0);
    const Plan& p = plan_of();
    const int near_up = Up::place(up, warp, 0, lane % 16, lane / 16), far_up = Up::other_half(up, near_up);
#pragma unroll 1
    for (int done = 0;; done++) {
      int u;
      for (;;) {  // the next unit, or that there is none
        if (__any_sync(~0u, barrier_passed(&barriers().full[from], phase))) {
          u = barriers().taken[from];
          break;
        }
        if (__any_sync(~0u, barrier_passed(&barriers().last, 0)) && barriers().units == done) {
          u = -1;
          break;
        }
      }
      if (u < 0) break;
      if (done == 0 && window.end != up.K / 8) {
        if (window.end > 0) Up::meet_all();  // every warp is done with the activations before
        Up::stage(up, up.in, up.K / 8);
        window.end = up.K / 8;
      }
      const int c = Up::choice_of(up, u), unit = u - c * up.routed.tiles;
      const uint8_t* held = memory(up.held) + buffer * up.block;
      if (++buffer == up.scale_buffers) buffer = 0;
      const uint8_t* factor = held + up.scales + g * 2;
      const float upper = COMPACT ? Up::bf16_at(factor) * (RESULT / 255) : RESULT;
      const float lower = COMPACT ? Up::bf16_at(factor + 16) * (RESULT / 255) : RESULT;
      const int own = warp * Up::SHARE;
      float above, below;
      Up::int4_tile(up, memory(up.xs) + own * 4 + t * 16, reinterpret_cast<float*>(memory(up.starts)) + own / 16,
                    held + g * up.scale_row + own / (COMPACT ? 16 : 8), 8, near_up, far_up, own, from, phase, above,
                    below);
      finish(above * upper, below * lower, p.chosen[c].number * down.K + unit * Up::ROWS);
    }

    wait_for_predecessor();  // the router, having chosen, has long ended: its weights are there, y may be written
    let_successor_start();   // not before: the next kernel may assume that all before this one have ended
    barrier_wait(&barriers().last, 0);
    const float all_weights = lane < down.k ? __ldcg(down.weights + lane) : 0;
    Up::meet_all();  // every warp is done with x
    const Range units = p.down;
    const int per_expert = down.routed.tiles / WARPS, each = down.K / 8;
    const int most = (up.K / 8 - shared_pieces) / each;  // choices that are staged together
    int first = 0, end = 0;
    if (units.first < units.end) {
      first = Down::choice_of(down, units.first);
      end = min(Down::choice_of(down, units.end - 1) + 1, first + most);
    }
    stage_h(down, handed, tag, shared_pieces, first, end - first);
    if (warp == WARPS - 1 && up.launch) {
      const unsigned long long before = lane == 0 ? atomicAdd(handed.counts + 1, 1ull) : 0;
      const bool last = (before + 1) % gridDim.x == 0;
      if (__shfl_sync(~0u, last, 0)) mailbox::wipe(up.mailbox);  // every CTA has read it
    }
    if (blockIdx.x == 0 && tid == 0) handed.taken[tag & 1] = 0;

    const auto write = [&](int row, int unit, float upper, float lower) {
      float* to = static_cast<float*>(down.out) + static_cast<int64_t>(row) * down.routed.tiles * 16 +
                  (unit * WARPS + warp) * 16 + g;
      if (t == 0) to[0] = upper;
      if (t == 1) to[8] = lower;
    };
    buffer = 0;
    typename Down::Window staged{0, shared_pieces};
    for (int u = down_shared.first; u < down_shared.end; u++) {
      float sums[4];
      if (down.shared.factor == nullptr) {
        Down::template dense_tile<false>(down, buffer, staged, from, phase, sums);
      } else {
        Down::template dense_tile<true>(down, buffer, staged, from, phase, sums);
      }
      if (++buffer == down.scale_buffers) buffer = 0;
      write(down.P - 1, u, sums[0], sums[2]);
    }
    const int near = Down::place(down, 0, warp, lane % 16, lane / 16), far = Down::other_half(down, near);
    int skipped = shared_pieces;  // pieces before those of choice `first`
#pragma unroll 1
    for (int u = units.first; u < units.end; u++) {
      const int c = Down::choice_of(down, u);
      if (c >= end) {
        first = c, end = min(Down::choice_of(down, units.end - 1) + 1, first + most), skipped = 0;
        Up::meet_all();  // every warp is done with the activations before
        stage_h(down, handed, tag, 0, first, end - first);
      }
      const uint8_t* held = memory(down.held) + buffer * down.block;
      if (++buffer == down.scale_buffers) buffer = 0;
      barrier_wait(&barriers().full[from], phase);
      const int row = warp * 16 + g, choice = p.chosen[c].number;
      const uint8_t* factor = held + down.scales + row * 2;
      const float weight = __shfl_sync(~0u, all_weights, choice);
      const float upper = COMPACT ? Down::bf16_at(factor) * (RESULT / 255) : RESULT;
      const float lower = COMPACT ? Down::bf16_at(factor + 16) * (RESULT / 255) : RESULT;
      float above, below;
      Down::int4_tile(down, memory(down.xs) + (skipped + (c - first) * each) * 16 + t * 16,
                      reinterpret_cast<float*>(memory(down.starts)) + (c - first) * (down.K / 32),
                      held + row * down.scale_row, 8, near, far, 0, from, phase, above, below);
      write(choice, u - c * per_expert, above * upper * weight, below * lower * weight);
    }
  }

  static __device__ void run(const Shape& s, const AllMaps& maps, const Handed& handed) {
    const int64_t G = gridDim.x, c = blockIdx.x;
    const auto part = [&](int64_t all) {
      return Range{static_cast<int>(c * all / G), static_cast<int>((c + 1) * all / G)};
    };
    const Range up_shared = part(s.up.shared.tiles), down_shared = part(s.down.shared.tiles / WARPS);
    if (threadIdx.x < s.up.slots) {
      barrier_init(&barriers().full[threadIdx.x], 1);
      barrier_init(&barriers().empty[threadIdx.x], WARPS);
    }
    if (threadIdx.x == 31) barrier_init(&barriers().planned, 1), barrier_init(&barriers().last, 1);
    barriers_visible();
    if (threadIdx.x == 0) {
      barriers().tag = static_cast<uint32_t>(atomicAdd(handed.counts, 1ull) / gridDim.x) + 1;
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
      produce(s, maps, up_shared, down_shared, handed.taken + (barriers().tag & 1 ^ 1));
    } else {
      consume(s, handed, up_shared, down_shared);
    }
  }
};

template <bool COMPACT>
__global__ __maxnreg__(88) void moe_int4_t1_once_kernel(const __grid_constant__ Shape s,
                                                        const __grid_constant__ AllMaps maps,
                                                        const __grid_constant__ Handed handed) {
  Kernel<COMPACT>::run(s, maps, handed);
}

template <bool COMPACT>
int start(Shape s, const Handed& handed, int sms, void* stream) {
  using K = Kernel<COMPACT>;
  constexpr int FIXED = 3072;  // more than the kernel's own shared memory and what the driver takes
  constexpr int MOST = 228 * 1024 / CTAS - FIXED;
  Args &up = s.up, &down = s.down;
  const bool shares = up.shared.tiles > 0;
  if (!shares) up.shared.row = up.routed.row, down.shared.row = down.routed.row;
  if (up.routed.row % 128 || up.shared.row % 128 || down.routed.row % 128 || down.shared.row % 128 || up.K % 32 ||
      down.routed.tiles % K::WARPS || down.K > up.K / 2 || up.k > MAX_CHOICES) {
    return -1;
  }
  up.chunk = down.chunk = 128;
  up.reciprocal = reciprocal_of(up.routed.tiles), down.reciprocal = reciprocal_of(down.routed.tiles / K::WARPS);
  // A unit's scales may be overwritten when the slot that the new ones come with was the old unit's last, or later.
  const auto buffers = [](const Args& a, int piece) {
    return divide_up(a.slots - 1, divide_up(min(a.routed.row, a.shared.row), piece)) + 1;
  };
  up.slots = down.slots = SLOTS;
  up.scale_buffers = buffers(up, K::Up::PIECE), down.scale_buffers = buffers(down, K::Down::PIECE);
  int bytes = K::Up::arrange(up);
  K::Down::arrange(down);
  // The same ring and the same memory for activations; scales of its own: those of gate_up may still be read.
  down.starts = up.starts, down.xs = up.xs, down.xs_bytes = up.xs_bytes;
  down.held = up.held + up.scale_buffers * up.block;
  bytes += down.scale_buffers * down.block;
  if (bytes > MOST) return -1;
  AllMaps maps = {};
  if (!describe<typename K::Up>(&maps.up.routed, up.routed, up.routed_rows, 128) ||
      !describe<typename K::Down>(&maps.down.routed, down.routed, down.routed_rows, 128) ||
      (shares && (!describe<typename K::Up>(&maps.up.shared, up.shared, up.shared_rows, 128) ||
                  !describe<typename K::Down>(&maps.down.shared, down.shared, down.shared_rows, 128)))) {
    return -1;
  }
  auto kernel = moe_int4_t1_once_kernel<COMPACT>;
  // Else a processor may be set up with less shared memory than a neighbour's CTA needs beside these.
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return launch(kernel, dim3(CTAS * sms), dim3(K::THREADS), bytes, stream, 1, s, maps, handed);
}

}  // namespace

// y [P, D] from x [D], P = k + 1 with a row for the shared expert if S > 0. Weights as in moe_int4_t1.cu. words, counts
// [2], taken [2]: of `Handed`, zero at first, of this stream and these sizes. mailbox, launch, fresh, norm, eps: as
// moe_int4_t1_gate_up has them. Returns -1 for sizes it cannot take.
API int moe_int4_t1_once(const void* x, const void* ids, const void* weights, const void* packed, const void* scale,
                         const void* row, const void* shared, const void* shared_scale, const void* down_packed,
                         const void* down_scale, const void* down_row, const void* down_shared,
                         const void* down_shared_scale, void* y, void* words, void* counts, void* taken, void* mailbox,
                         int64_t launch, const void* fresh, const void* norm, float eps, int64_t k, int64_t E, int64_t D,
                         int64_t I, int64_t S, int64_t P, int64_t sms, void* stream) {
  Shape s = {gate_up_of(packed, scale, row, shared, shared_scale, k, E, D, I, S),
             down_of(down_packed, down_scale, down_row, down_shared, down_shared_scale, k, E, D, I, S, P)};
  Args &up = s.up, &down = s.down;
  up.fresh = static_cast<const uint32_t*>(fresh), up.norm = static_cast<const bf16*>(norm), up.eps = eps;
  up.in = up.in_shared = static_cast<const bf16*>(x);
  up.ids = static_cast<const int*>(ids);
  up.mailbox = static_cast<uint32_t*>(mailbox), up.launch = static_cast<uint32_t>(launch);
  down.weights = static_cast<const float*>(weights);
  down.out = y;
  const Handed handed{static_cast<uint64_t*>(words), static_cast<unsigned long long*>(counts),
                      static_cast<uint32_t*>(taken)};
  return row == nullptr ? start<false>(s, handed, static_cast<int>(sms), stream)
                        : start<true>(s, handed, static_cast<int>(sms), stream);
}
