// A pool of helper threads, which share the work of the thread that calls a kernel.
//
// Caller and helpers claim pieces one by one. The caller waits for pieces that a helper has begun, never for a helper
// to start: if other processes use the machine, a helper that is not scheduled costs nothing, but a barrier would cost
// a time slice. The result must not depend on which thread computes a piece.
#pragma once
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "cpp/vec.h"

INLINE void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  typedef void (*Call)(const void* what, int64_t piece, int worker);

  // One pool for all kernel libraries of the process: GCC exports a static local of an inline function as a unique
  // symbol, which the loader resolves to the same object everywhere. Never destroyed: helpers outlive main.
  static Pool& instance() {
    static Pool* const pool = new Pool;
    return *pool;
  }

  // call(what, piece, worker) for each piece, worker < threads; false if the pool is at work for another thread.
  bool run(Call call, const void* what, int64_t pieces, int threads) {
    if (taken.exchange(true, std::memory_order_acquire)) return false;
    while (helpers < threads - 1) std::thread(&Pool::help, this, ++helpers).detach();
    this->call.store(call, std::memory_order_release);
    this->what.store(what, std::memory_order_release);
    this->threads.store(threads, std::memory_order_release);
    this->pieces.store(uint32_t(pieces), std::memory_order_release);
    done.store(0, std::memory_order_release);
    turn++;
    ticket.store(turn << 32, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> guard(mutex); }
      wake.notify_all();
    }
    work(0);
    for (int spins = 0; done.load(std::memory_order_acquire) < pieces; spins++)
      if (spins < SPINS)
        relax();
      else
        sched_yield();
    ticket.store(turn << 32 | CLOSED, std::memory_order_release);  // before anything of the next run is written
    taken.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr int SPINS = 1000, YIELDS = 1000;  // tens of microseconds, then of the order of a millisecond
  static constexpr uint64_t CLOSED = 0xffffffff;

  alignas(64) std::atomic<uint64_t> ticket{CLOSED};  // number of the run << 32 | next piece
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) std::atomic<Call> call{nullptr};
  std::atomic<const void*> what{nullptr};
  std::atomic<uint32_t> pieces{0};
  std::atomic<int> threads{0};
  std::atomic<int> sleepers{0};
  std::atomic<bool> taken{false};
  uint64_t turn = 0;
  int helpers = 0;
  std::mutex mutex;
  std::condition_variable wake;

  bool open(uint64_t at, int worker) const {
    return uint32_t(at) < pieces.load(std::memory_order_acquire) && worker < threads.load(std::memory_order_acquire);
  }

  // Claims pieces until none is left; true if there were any. A claim that succeeds belongs to the run that wrote
  // `call`: the ticket has not moved since, and a run writes its call only while the ticket is closed.
  bool work(int worker) {
    bool any = false;
    uint64_t at = ticket.load(std::memory_order_acquire);
    while (open(at, worker)) {
      const Call function = call.load(std::memory_order_acquire);
      const void* const argument = what.load(std::memory_order_acquire);
      if (!ticket.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      function(argument, uint32_t(at), worker);
      done.fetch_add(1, std::memory_order_release);
      any = true;
      at = ticket.load(std::memory_order_acquire);
    }
    return any;
  }

  void help(int worker) {
    for (int idle = 0;; idle++) {
      if (work(worker)) {
        idle = 0;
      } else if (idle < SPINS) {
        relax();
      } else if (idle < SPINS + YIELDS) {
        sched_yield();
      } else {
        std::unique_lock<std::mutex> guard(mutex);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (!open(ticket.load(std::memory_order_seq_cst), worker)) wake.wait(guard);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
        idle = 0;
      }
    }
  }
};

// f(piece, worker) for pieces 0 .. pieces - 1 in any order, on up to `threads` threads; worker < threads.
template <class F>
INLINE void share(int64_t pieces, int64_t threads, const F& f) {
  const auto call = [](const void* what, int64_t piece, int worker) { (*static_cast<const F*>(what))(piece, worker); };
  if (threads > 1 && pieces > 1 && pieces < 0xffffffff && Pool::instance().run(call, &f, pieces, int(threads))) return;
  for (int64_t piece = 0; piece < pieces; piece++) f(piece, 0);
}
