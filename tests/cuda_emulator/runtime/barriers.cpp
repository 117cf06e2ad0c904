// Warp-wide instructions (Meeting), barriers of CTAs and clusters, mbarriers in shared memory.
#include <algorithm>

#include "machine.h"

namespace emu {

// ---- warps ----

namespace {

void finish(Warp& warp, size_t index) {
  auto m = std::move(warp.meetings[index]);
  warp.meetings.erase(warp.meetings.begin() + static_cast<long>(index));
  m->act(m->arguments, m->arrived);
  for (int i = 0; i < 32; i++) {
    if (m->arrived >> i & 1) make_ready(warp.lanes[i]);
  }
  warp.spare.push_back(std::move(m));
}

}  // namespace

void meet(uint32_t mask, void* argument, Act act, const char* what) {
  Thread* t = running;
  Warp& warp = *t->warp;
  mask &= warp.present;
  if (!(mask >> t->lane & 1)) fail("%s: the mask %08x lacks this lane", what, mask);
  size_t n = 0;
  for (; n < warp.meetings.size(); n++) {
    const Meeting& m = *warp.meetings[n];
    if (m.mask == mask && m.act == act) break;
    // Lanes of this mask wait for this lane elsewhere. (Other lanes may: some shuffle before an mma of all.)
    if ((m.mask >> t->lane & 1) && (m.arrived & mask)) {
      fail("lanes of a warp meet at different instructions: %s (mask %08x) and %s (mask %08x)", what, mask, m.what,
           m.mask);
    }
  }
  if (n == warp.meetings.size()) {
    if (warp.spare.empty()) warp.spare.push_back(std::make_unique<Meeting>());
    warp.meetings.push_back(std::move(warp.spare.back()));
    warp.spare.pop_back();
    Meeting& fresh = *warp.meetings.back();
    fresh.mask = mask, fresh.arrived = 0, fresh.act = act, fresh.what = what;
    std::fill(fresh.arguments, fresh.arguments + 32, nullptr);
  }
  Meeting& m = *warp.meetings[n];
  m.arrived |= 1u << t->lane;
  m.arguments[t->lane] = argument;
  if (((m.arrived | warp.ended) & mask) == mask) {
    finish(warp, n);  // this lane waits too, so that lanes run in order
  }
  wait(what, nullptr, mask);
}

void leave_warp(Warp& warp) {
  for (size_t n = 0; n < warp.meetings.size();) {
    Meeting& m = *warp.meetings[n];
    if (((m.arrived | warp.ended) & m.mask) == m.mask) {
      finish(warp, n);
    } else {
      n++;
    }
  }
}

uint32_t active_lanes() { return running->warp->present & ~running->warp->ended; }

bool elect(uint32_t mask) {
  bool chosen = false;
  meet(mask, &chosen, [](void** all, uint32_t lanes) { *static_cast<bool*>(all[__builtin_ctz(lanes)]) = true; }, "elect.sync");
  return chosen;
}

// ---- CTAs ----

namespace {

void release(NamedBarrier& b) {
  for (Thread* t : b.waiting) make_ready(t);
  b.waiting.clear();
  b.arrived = b.expected = 0;
  happened();
}

NamedBarrier& arrive(int id, int threads) {
  if (id < 0 || id > 15) fail("barrier %d: there are 16", id);
  Cta& cta = *running->cta;
  const int expected = threads < 0 ? -1 : threads;
  if (threads >= 0 && threads % 32) fail("barrier %d: %d threads are no whole warps", id, threads);
  NamedBarrier& b = cta.barriers[id];
  if (b.arrived && b.expected != expected) {
    fail("barrier %d: a thread expects %d threads, others %d (-1: all)", id, expected, b.expected);
  }
  b.expected = expected;
  b.arrived++;
  return b;
}

int needed(const Cta& cta, const NamedBarrier& b) { return b.expected < 0 ? cta.live : b.expected; }

}  // namespace

void bar_sync(int id, int threads) {
  NamedBarrier& b = arrive(id, threads);
  if (b.arrived >= needed(*running->cta, b)) return release(b);
  b.waiting.push_back(running);
  wait("barrier", nullptr, static_cast<uint64_t>(id));
}

void bar_arrive(int id, int threads) {
  NamedBarrier& b = arrive(id, threads);
  if (b.arrived >= needed(*running->cta, b)) release(b);
}

void leave_barriers(Cta& cta) {
  for (NamedBarrier& b : cta.barriers) {
    if (b.arrived && b.expected < 0 && b.arrived >= cta.live) release(b);
  }
}

// ---- clusters ----

void check_cluster(Cluster& c) {
  if (c.arrived == 0 || c.arrived + c.ended < c.threads) return;
  c.phase++;
  c.arrived = 0;
  for (Thread* t : c.waiting) make_ready(t);
  c.waiting.clear();
  happened();
}

void cluster_arrive() {
  Thread* t = running;
  Cluster& c = *t->cta->cluster;
  if (t->cluster_arrived) fail("barrier.cluster.arrive twice without a wait between");
  t->cluster_arrived = true, t->cluster_phase = c.phase;
  c.arrived++;
  check_cluster(c);
}

void cluster_wait() {
  Thread* t = running;
  Cluster& c = *t->cta->cluster;
  if (!t->cluster_arrived) fail("barrier.cluster.wait without an arrive");
  t->cluster_arrived = false;
  if (c.phase != t->cluster_phase) return;
  c.waiting.push_back(t);
  wait("cluster barrier");
}

// ---- barriers in shared memory ----
// Bits of the word: 0-12 expected arrivals, 13-25 missing ones, 26 the phase's parity, 27-39 MARK, 40-63 missing bytes.

namespace {

constexpr uint64_t MARK = 0x15a7;

struct Word {
  uint64_t* at;
  uint64_t v;
  int expected() const { return static_cast<int>(v & 0x1fff); }
  int missing() const { return static_cast<int>(v >> 13 & 0x1fff); }
  unsigned parity() const { return v >> 26 & 1; }
  int64_t bytes() const { return static_cast<int64_t>(v) >> 40; }
  void set(int expected, int missing, unsigned parity, int64_t bytes) {
    v = static_cast<uint64_t>(expected) | static_cast<uint64_t>(missing) << 13 | static_cast<uint64_t>(parity) << 26 |
        MARK << 27 | static_cast<uint64_t>(bytes) << 40;
    memcpy(at, &v, 8);
  }
};

Cta* owner(uint32_t address) {
  const auto& ctas = running->cta->cluster->ctas;
  const uint32_t rank = address >> RANK_SHIFT;
  if (rank >= ctas.size() || !ctas[rank]) fail("a barrier of CTA %u, which is not in the cluster or has ended", rank);
  return ctas[rank];
}

Word word_of(Cta* cta, uint32_t address) {
  if (address % 8) fail("a barrier at 0x%x: not a multiple of 8", address & PLACE);
  auto* at = reinterpret_cast<uint64_t*>(shared_of(cta, address, 8));
  uint64_t v;
  memcpy(&v, at, 8);
  if ((v >> 27 & 0x1fff) != MARK) fail("the barrier at 0x%x was not initialised, or was overwritten", address & PLACE);
  return {at, v};
}

void settle(Cta* cta, Word& w) {
  if (w.missing() || w.bytes()) return;
  w.set(w.expected(), w.expected(), !w.parity(), 0);
  happened();
  auto found = cta->waiting.find(w.at);
  if (found == cta->waiting.end()) return;
  auto& list = found->second;
  for (size_t i = 0; i < list.size();) {
    if (list[i]->phase == w.parity()) {  // the phase of that parity has not ended
      i++;
      continue;
    }
    make_ready(list[i]);
    list[i] = list.back();
    list.pop_back();
  }
}

}  // namespace

void mbarrier_init(uint32_t address, uint32_t arrivals) {
  if (arrivals == 0 || arrivals > 8191) fail("mbarrier.init with %u arrivals", arrivals);
  if (address % 8) fail("a barrier at 0x%x: not a multiple of 8", address & PLACE);
  Word w{reinterpret_cast<uint64_t*>(shared_of(owner(address), address, 8)), 0};
  w.set(static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0);
}

void mbarrier_arrive(uint32_t address, uint32_t count, uint32_t expected_bytes) {
  Cta* cta = owner(address);
  Word w = word_of(cta, address);
  if (w.missing() < static_cast<int>(count)) fail("more arrivals at the barrier 0x%x than it expects", address & PLACE);
  w.set(w.expected(), w.missing() - static_cast<int>(count), w.parity(), w.bytes() + expected_bytes);
  settle(cta, w);
}

void mbarrier_expect(uint32_t address, uint32_t bytes) {
  Word w = word_of(owner(address), address);
  w.set(w.expected(), w.missing(), w.parity(), w.bytes() + bytes);
}

void complete_bytes(Cta* cta, uint32_t address, uint32_t bytes) {
  Word w{reinterpret_cast<uint64_t*>(shared_of(cta, address, 8)), 0};
  memcpy(&w.v, w.at, 8);
  if ((w.v >> 27 & 0x1fff) != MARK) {
    machine.error = "a copy ends at a barrier that was not initialised";
    return;
  }
  w.set(w.expected(), w.missing(), w.parity(), w.bytes() - bytes);
  settle(cta, w);
}

bool mbarrier_wait(uint32_t address, uint32_t parity) {
  Thread* t = running;
  if (address >> RANK_SHIFT != static_cast<uint32_t>(t->cta->rank)) fail("a wait at another CTA's barrier");
  if (parity > 1) fail("a wait for parity %u", parity);
  Word w = word_of(t->cta, address);
  if (w.parity() != parity) return true;
  t->cta->waiting[w.at].push_back(t);
  wait("mbarrier", w.at, parity);
  return true;
}

bool mbarrier_test(uint32_t address, uint32_t parity) {
  Word w = word_of(running->cta, address);
  if (w.parity() != parity) return true;
  poll();
  return word_of(running->cta, address).parity() != parity;
}

}  // namespace emu
