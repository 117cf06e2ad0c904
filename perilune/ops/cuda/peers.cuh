// Mailboxes: a buffer in each rank's GPU memory, which all ranks' GPUs can write to, for kernels that exchange partial
// sums. exchange_add_rmsnorm.cu describes lines of 128 bytes, which it and two_shots.cuh send.
//
// The kernels before and after attention send words of 16 bytes: {pair, epoch, pair, epoch}, a pair being two bf16. A
// word with both epochs is complete: no fence, no clearing. For one CTA and its counterparts on the peers:
//   1. The CTA reads its launch counter in `control` (before attention: one per token); epoch e = counter + 1.
//   2. After its predecessor's end, and before it waits, it writes its words into half e % 2 of each peer's mailbox.
//   3. It polls its own mailbox for the peers' words of epoch e, and ends only when it has all of them.
//   Reuse: epoch e + 1 overwrites epoch e - 1. By then the peer has sent epoch e, so its launch of epoch e - 1 has
//   ended: the peer has read the overwritten words.
#pragma once
#include "cuda/hopper.cuh"

namespace hopper {

constexpr int MAX_RANKS = 8;
// Layout of half a mailbox for one sender, in words of 16 bytes. First: lines of exchange_add_rmsnorm.cu.
constexpr int CLUSTER = 8;         // max CTAs that share a token: a width of up to 7,168
constexpr int REGIONS = 128;       // max clusters, each with its own region
constexpr int LINE_THREADS = 128;  // threads per CTA, one word each
constexpr int LINE_WORDS = REGIONS * CLUSTER * LINE_THREADS;
// Next: words of the kernels before attention (up to four tokens) and after it (one token).
constexpr int TOKEN_WORDS = 7168 / 4, BEFORE_WORDS = LINE_WORDS, AFTER_WORDS = BEFORE_WORDS + 4 * TOKEN_WORDS;
// Last: lines of two_shots.cuh, one row per CTA.
constexpr int ROWS = 264, ROW_WORDS = CLUSTER * LINE_THREADS, ROWS_AT = AFTER_WORDS + TOKEN_WORDS;
constexpr int64_t HALF = ROWS_AT + ROWS * ROW_WORDS;
constexpr int MAX_CTAS = 160;  // max CTAs of the kernels before and after attention
// `control`: first counter of each kernel; number of all words.
constexpr int BEFORE_COUNTS = 1 + REGIONS * CLUSTER, AFTER_COUNTS = BEFORE_COUNTS + 4 * MAX_CTAS;
constexpr int ROW_COUNTS = AFTER_COUNTS + MAX_CTAS, CONTROL = ROW_COUNTS + ROWS;
constexpr int POLLS = 256;              // polls between two reads of the clock
constexpr int HOST_POLLS = 64 * POLLS;  // polls between two reads of host memory (1 us each): about 10 ms
constexpr uint32_t NAN_PAIR = 0x7fff7fff;

// Filled in by the host, one for each rank.
struct Peers {
  int64_t rank, ranks;
  int64_t limit_ns;           // timeout of one wait for a peer
  uint32_t* control;          // [CONTROL]: word 0 is not 0 after a failure; the others are epoch counters of CTAs
  uint32_t* failed;           // in host memory: 1 + the rank that timed out, or the host's value that ends all waits
  uint4* mailbox[MAX_RANKS];  // by rank, each [2 halves, senders, HALF]

  // Address of word `at` from `sender` in the mailbox of `receiver`, in the epoch's half.
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

// Whether a wait must give up after `polls` polls: limit_ns since `begin` (0: set here), or the host has written to
// `failed`. patient: false once any wait has failed; then every wait gives up after its first poll.
__device__ __forceinline__ bool too_long(const Peers& peers, int polls, uint64_t& begin, bool patient) {
  if (!patient) return true;
  if (polls % POLLS) return false;
  const uint64_t now = now_ns();
  if (!begin) begin = now;
  if (polls % HOST_POLLS == 0 && *reinterpret_cast<volatile uint32_t*>(peers.failed) != 0) return true;
  return now - begin > static_cast<uint64_t>(peers.limit_ns);
}

}  // namespace hopper
