// Memory that all ranks' GPUs can write to, for kernels that exchange partial sums: exchange_add_rmsnorm.cu (which
// explains why the words need no fence and are never cleared), and kernels that exchange their own results.
//
// Such a kernel sends words of 16 bytes: four bf16 values and twice the epoch, {pair, epoch, pair, epoch}. A reader
// that sees both epochs has the values. Each CTA counts its launches (before attention, for each token) in `control`;
// epoch e uses half e % 2 of the mailbox. A CTA sends its words after the launch before has ended and before it waits;
// it ends only when it has the peers' words of the same epoch. So the words that a rank overwrites in epoch e + 1 are
// those of epoch e - 1, and the peer has read them: it has sent epoch e, so its launch of epoch e - 1 has ended.
#pragma once
#include "cuda/hopper.cuh"

namespace hopper {

constexpr int MAX_RANKS = 8;
constexpr int CLUSTER = 8;         // most CTAs that share a token: a width of up to 7,168
constexpr int REGIONS = 128;       // most clusters, each with its own region in every mailbox
constexpr int LINE_THREADS = 128;  // threads of a CTA
constexpr int LINE_WORDS = REGIONS * CLUSTER * LINE_THREADS;  // words of 16 bytes
// Behind them: words of the kernels before attention (four tokens) and after it (one).
constexpr int TOKEN_WORDS = 7168 / 4, BEFORE_WORDS = LINE_WORDS, AFTER_WORDS = BEFORE_WORDS + 4 * TOKEN_WORDS;
// Behind them: rows that have a CTA each (two_shots.cuh).
constexpr int ROWS = 264, ROW_WORDS = CLUSTER * LINE_THREADS, ROWS_AT = AFTER_WORDS + TOKEN_WORDS;
constexpr int64_t HALF = ROWS_AT + ROWS * ROW_WORDS;  // words of one half of a mailbox, for one sender
constexpr int MAX_CTAS = 160;
constexpr int BEFORE_COUNTS = 1 + REGIONS * CLUSTER, AFTER_COUNTS = BEFORE_COUNTS + 4 * MAX_CTAS;
constexpr int ROW_COUNTS = AFTER_COUNTS + MAX_CTAS, CONTROL = ROW_COUNTS + ROWS;
constexpr int POLLS = 256;              // polls between two reads of the clock
constexpr int HOST_POLLS = 64 * POLLS;  // polls between two reads of host memory (1 us each): about 10 ms
constexpr uint32_t NAN_PAIR = 0x7fff7fff;

// Filled in by the host, one for each rank.
struct Peers {
  int64_t rank, ranks;
  int64_t limit_ns;           // longest wait
  uint32_t* control;          // [CONTROL]: word 0 is not 0 after a failure; then the launch counters of CTAs
  uint32_t* failed;           // in host memory: 1 + the rank that did not answer, or what the host wrote
  uint4* mailbox[MAX_RANKS];  // of each rank: [2 halves, senders, HALF]

  // Word `at` of an epoch, from `sender` to `receiver`.
  __device__ __forceinline__ uint4* word(int receiver, int sender, uint32_t epoch, int at) const {
    return mailbox[receiver] + ((epoch & 1) * ranks + sender) * HALF + at;
  }
};

__device__ __forceinline__ void send(uint4* p, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ void report(const Peers& peers, int missing) {
  *reinterpret_cast<volatile uint32_t*>(peers.control) = 1;
  *reinterpret_cast<volatile uint32_t*>(peers.failed) = 1 + missing;
}
__device__ __forceinline__ bool arrived_word(const uint4& v, uint32_t epoch) { return v.y == epoch && v.w == epoch; }

// Whether a wait that has polled `polls` times, and began at `begin` (0: not known yet), must give up: after limit_ns,
// or when the host has written to `failed`. `patient`: false after any wait has failed; then no wait polls again.
__device__ __forceinline__ bool too_long(const Peers& peers, int polls, uint64_t& begin, bool patient) {
  if (!patient) return true;
  if (polls % POLLS) return false;
  const uint64_t now = now_ns();
  if (!begin) begin = now;
  if (polls % HOST_POLLS == 0 && *reinterpret_cast<volatile uint32_t*>(peers.failed) != 0) return true;
  return now - begin > static_cast<uint64_t>(peers.limit_ns);
}

}  // namespace hopper
