// Who runs next: launches of streams, CTAs on SMs, ready warps; and what happens when no thread can go on.
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>

#include "machine.h"

namespace emu {

size_t& shared_limit(const void* kernel);
uint8_t* take_stack();
void prepare(Thread* thread, void (*entry)());

Machine machine;
Thread* running = nullptr;
View* view = nullptr;

uint64_t Machine::next() {  // xorshift64*
  random ^= random >> 12, random ^= random << 25, random ^= random >> 27;
  return random * 0x2545f4914f6cdd1dull >> 16;
}

namespace {

constexpr int POISON = 0xff;  // of shared memory: nan as float, bf16, fp16 and e4m3
constexpr uint64_t MOST_STUCK = 400;  // jumps of the clock, by JUMP_NS, without progress: more are a deadlock
constexpr uint64_t JUMP_NS = 20'000'000;

void enqueue(Warp* warp) {
  if (!warp->queued) warp->queued = true, machine.queue.push_back(warp);
}

std::string where(Thread* t) {  // return addresses of a waiting fiber, as library+offset
  std::string text;
#ifdef __x86_64__
  auto* frame = reinterpret_cast<void**>(static_cast<void**>(t->stack_pointer)[5]);
  for (int i = 0; i < 12; i++) {
    auto* at = reinterpret_cast<uint8_t*>(frame);
    if (at < t->stack || at > t->stack + STACK - 80) break;
    Dl_info info;
    if (frame[1] && dladdr(frame[1], &info) && info.dli_fname) {
      char line[512];
      snprintf(line, sizeof line, " @%s+0x%lx@", info.dli_fname,
               static_cast<uint8_t*>(frame[1]) - static_cast<uint8_t*>(info.dli_fbase) - 1);
      text += line;
    }
    frame = static_cast<void**>(*frame);
  }
#endif
  return text;
}

void end_thread() {
  Thread* t = running;
  complete_copies(t, t->copies.size());
  end_of_stores(t);
  t->ended = true;
  machine.stuck = machine.idle_polls = 0;
  Cta* cta = t->cta;
  t->warp->ended |= 1u << t->lane;
  leave_warp(*t->warp);
  cta->live--;
  leave_barriers(*cta);
  cta->cluster->ended++;
  check_cluster(*cta->cluster);
  if (cta->live == 0) {
    cta->ended = machine.changed = true;
    cta->launch->ended++;
    if (!cta->triggered) cta->triggered = true, cta->launch->triggered++;
  }
  emu_switch(&t->stack_pointer, machine.scheduler);
  __builtin_unreachable();
}

void entry() {
  running->cta->begun = true;
  running->cta->launch->body();
  end_thread();
}

double share(const Launch& l) {  // of an SM's resources, for one CTA
  const auto& c = l.config;
  const double threads = c.block.x * c.block.y * c.block.z;
  const double bytes = std::max<double>(l.shared_end, c.shared + SHARED_BEGIN);
  return std::max({1.0 / 32, threads / 2048, 1.0 / std::max(1.0, static_cast<double>(static_cast<int>(228 * 1024 / bytes)))});
}

void begin_cluster(Launch* l) {
  const int size = l->config.cluster;
  l->clusters.push_back(std::make_unique<Cluster>());
  Cluster* cluster = l->clusters.back().get();
  const dim3 grid = l->config.grid, block = l->config.block;
  const int threads = block.x * block.y * block.z;
  for (int rank = 0; rank < size; rank++) {
    const unsigned n = l->next++;
    l->running.push_back(std::make_unique<Cta>());
    Cta* cta = l->running.back().get();
    cta->launch = l, cta->cluster = cluster, cta->number = n, cta->rank = rank;
    cta->block = {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y};
    cta->sm = n % machine.sms;
    auto& free = machine.free_shared;
    if (free.empty()) free.push_back(static_cast<uint8_t*>(aligned_alloc(4096, SHARED_BYTES)));
    cta->shared = free.back();
    free.pop_back();
    memset(cta->shared, POISON, SHARED_BYTES);
    cta->live = threads;
    cluster->threads += threads;
    cluster->ctas.push_back(cta);
    cta->threads = std::vector<Thread>(threads);
    cta->warps = std::vector<Warp>((threads + 31) / 32);
    for (int i = 0; i < threads; i++) {
      Thread& t = cta->threads[i];
      const unsigned u = i;
      t.thread = {u % block.x, u / block.x % block.y, u / block.x / block.y};
      t.block = cta->block, t.block_dim = block, t.grid_dim = grid;
      t.lane = i % 32;
      t.cta = cta, t.warp = &cta->warps[i / 32];
      t.warp->cta = cta, t.warp->index = i / 32;
      t.warp->present |= 1u << t.lane, t.warp->ready |= 1u << t.lane;
      t.warp->lanes[t.lane] = &t;
    }
    for (Warp& w : cta->warps) enqueue(&w);
    machine.occupied[l->stream] += share(*l);
  }
}

void finish(Launch* l) {
  l->done = true;
  for (Thread* t : l->waiting) make_ready(t);
  for (auto& other : machine.pending) {
    if (other->before == l) other->before = nullptr;
  }
  machine.pending.remove_if([&](const auto& p) { return p.get() == l; });
}

// Frees CTAs whose cluster has ended and launches that have ended, which ends griddepcontrol.wait of the next launch.
void retire() {
  for (bool again = true; again;) {
    again = false;
    for (auto& p : machine.pending) {
      Launch* l = p.get();
      if (l->host && !l->before) {
        l->body();
        finish(l), again = true;
        break;
      }
      if (l->host || l->ended == 0) continue;
      for (auto it = l->running.begin(); it != l->running.end();) {
        Cta* cta = it->get();
        const bool whole = std::all_of(cta->cluster->ctas.begin(), cta->cluster->ctas.end(), [](Cta* c) { return !c || c->ended; });
        const bool busy = std::any_of(machine.asyncs.begin(), machine.asyncs.end(), [&](const Async& a) { return a.cta == cta; });
        const bool queued = std::any_of(cta->warps.begin(), cta->warps.end(), [](Warp& w) { return w.queued; });
        if (!whole || busy || queued) {
          ++it;
          continue;
        }
        for (Thread& t : cta->threads) {
          if (memcmp(t.stack, &CANARY, sizeof CANARY)) machine.error = "a thread's stack overflowed";
          machine.free_stacks.push_back(t.stack);
        }
        machine.free_shared.push_back(cta->shared);
        machine.occupied[l->stream] -= share(*l);
        for (Cta*& c : cta->cluster->ctas) {
          if (c == cta) c = nullptr;
        }
        it = l->running.erase(it);
      }
      if (l->ended == l->ctas && l->running.empty()) {
        finish(l), again = true;
        break;
      }
    }
  }
}

bool may_start(const Launch* l) {
  if (l->host || l->next == l->ctas) return false;
  const Launch* b = l->before;
  if (!b) return true;
  return machine.overlap && l->config.programmatic && !b->host && b->next == b->ctas && b->triggered == b->ctas;
}

// Starts the next cluster of a launch if there is room.
bool start_one() {
  std::vector<Launch*> can;
  for (auto& p : machine.pending) {
    if (may_start(p.get())) can.push_back(p.get());
  }
  for (size_t n = can.size(); n > 0; n--) {
    Launch* l = can[n == can.size() || machine.mode != RANDOM ? can.size() - n : machine.next() % can.size()];
    const double room = machine.sms + 1e-6;
    const double occupied = machine.occupied[l->stream];
    if (occupied > 1e-6 && occupied + share(*l) * l->config.cluster > room) continue;
    begin_cluster(l);
    return true;
  }
  return false;
}

int resident() {
  int n = 0;
  for (auto& p : machine.pending) {
    for (auto& c : p->running) n += !c->ended;
  }
  return n;
}

void run(Thread* t) {
  if (!t->stack) {
    t->stack = take_stack();
    prepare(t, entry);
  }
  running = t, view = t;
  t->waits = nullptr;
  emu_switch(&machine.scheduler, t->stack_pointer);
  running = nullptr;
}

void run_warp() {
  auto& queue = machine.queue;
  const size_t n = machine.next() % queue.size();
  Warp* warp = queue[n];
  queue[n] = queue.back();
  queue.pop_back();
  warp->queued = false;
  uint32_t lanes = warp->ready;
  warp->ready = 0;
  const int shift = machine.shuffle ? machine.next() % 32 : 0;
  for (int i = 0; i < 32 && lanes; i++) {
    const int lane = (i + shift) % 32;
    if (!(lanes >> lane & 1)) continue;
    lanes &= ~(1u << lane);
    run(warp->lanes[lane]);
    if (!machine.error.empty()) return;
  }
}

void complete_one() {
  auto& all = machine.asyncs;
  const size_t n = machine.next() % all.size();
  auto work = std::move(all[n].run);
  all.erase(all.begin() + static_cast<long>(n));
  work();
  machine.stuck = machine.idle_polls = 0;
  machine.changed = true;
}

// Whether all ready lanes have polled twice and nothing has happened.
bool only_polls() {
  const auto& queue = machine.queue;
  if (machine.idle_polls < queue.size()) return false;
  uint64_t lanes = 32;
  for (const Warp* w : queue) lanes += static_cast<uint64_t>(__builtin_popcount(w->ready));
  return machine.idle_polls > 2 * lanes;
}

// Called if threads can go on by polling only: starts CTAs, else completes copies, else moves the clock. False: all has
// ended, or a deadlock. With polling threads it takes several CTAs or copies at once: noticing takes many polls.
bool unblock() {
  machine.idle_polls = 0;
  const bool polling = !machine.queue.empty();
  const size_t copies = machine.asyncs.size();
  const bool first = copies && machine.mode == RANDOM && machine.chance();
  int begun = 0;
  if (!first) {
    for (int n = polling ? 1 + resident() / 2 : 1; n > 0 && start_one(); n--) begun++;
  }
  if (begun) return true;
  if (copies) {
    for (size_t n = polling ? 1 + copies / 8 : 1; n > 0; n--) complete_one();
    return true;
  }
  if (!polling) {
    if (!machine.pending.empty()) machine.error = "deadlock: no thread can go on\n" + report();
    return false;
  }
  machine.clock += JUMP_NS;
  if (++machine.stuck > MOST_STUCK) {
    machine.error = "deadlock: threads only poll\n" + report();
    return false;
  }
  return true;
}

void abandon() {
  machine.queue.clear();
  machine.asyncs.clear();
  for (auto& p : machine.pending) {
    for (auto& c : p->running) {
      for (Thread& t : c->threads) {
        if (t.stack) machine.free_stacks.push_back(t.stack);
      }
      machine.free_shared.push_back(c->shared);
    }
  }
  machine.pending.clear();
  machine.occupied.clear();
}

}  // namespace

void drain() {
  machine.stuck = machine.idle_polls = 0;
  machine.changed = true;
  while (machine.error.empty()) {
    if (machine.changed || machine.queue.empty()) {
      machine.changed = false;
      retire();
      if (!machine.error.empty() || machine.pending.empty()) break;
      while (resident() < machine.eager && start_one()) {
      }
    }
    if (machine.queue.empty()) {
      if (!unblock()) break;
      continue;
    }
    while (!machine.changed && !machine.queue.empty() && machine.error.empty()) {
      if (machine.mode == RANDOM && !machine.asyncs.empty() && machine.next() % 8 == 0) complete_one();
      run_warp();
      if (only_polls() && !unblock()) break;
    }
  }
  if (!machine.error.empty()) abandon();
}

void fail(const char* format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (!running) {
    machine.error = text;
    drain();
    throw std::string(text);
  }
  Thread* t = running;
  char place[160];
  snprintf(place, sizeof place, "CTA %d, thread %d: ", t->cta->number, static_cast<int>(t - t->cta->threads.data()));
  void** frame = static_cast<void**>(__builtin_frame_address(0));
  void* fake[6] = {nullptr, nullptr, nullptr, nullptr, nullptr, frame};
  t->stack_pointer = fake;
  machine.error = std::string(place) + text + "\n  " + where(t);
  emu_switch(&t->stack_pointer, machine.scheduler);
  __builtin_unreachable();
}

void wait(const char* what, const void* object, uint64_t phase) {
  Thread* t = running;
  t->waits = what, t->object = object, t->phase = phase;
  emu_switch(&t->stack_pointer, machine.scheduler);
}

void make_ready(Thread* t) {
  t->waits = nullptr;
  t->warp->ready |= 1u << t->lane;
  enqueue(t->warp);
}

void happened() { machine.stuck = machine.idle_polls = 0; }

void poll() {
  machine.idle_polls++;
  machine.clock++;
  make_ready(running);
  running->waits = "polls";
  emu_switch(&running->stack_pointer, machine.scheduler);
}

uint64_t clock_ns() {
  poll();
  return ++machine.clock;
}

void later(Cta* cta, std::function<void()> run) {
  if (machine.mode == EARLY || (machine.mode == RANDOM && machine.next() % 4 == 0)) {
    run();
    happened();
  } else {
    machine.asyncs.push_back({cta, std::move(run)});
  }
}

std::string report() {
  std::map<std::string, std::string> places;  // what is waited for and where: which CTAs and threads
  std::map<std::string, int> counts;
  for (auto& p : machine.pending) {
    Launch* l = p.get();
    for (auto& c : l->running) {
      for (Thread& t : c->threads) {
        if (t.ended || !t.stack) continue;
        char line[256];
        if (t.object >= c->shared && t.object < c->shared + SHARED_BYTES) {
          uint64_t word;
          memcpy(&word, t.object, 8);
          snprintf(line, sizeof line, "launch %lu, %s at 0x%lx, parity %lu (of %u arrivals %u are missing, %d bytes)", l->number,
                   t.waits ? t.waits : "ready", static_cast<const uint8_t*>(t.object) - c->shared, t.phase,
                   static_cast<unsigned>(word & 0x1fff), static_cast<unsigned>(word >> 13 & 0x1fff),
                   static_cast<int>(static_cast<int64_t>(word) >> 40));
        } else {
          snprintf(line, sizeof line, "launch %lu, %s %lu", l->number, t.waits ? t.waits : "ready", t.phase);
        }
        const std::string key = line + where(&t);
        if (counts[key]++ < 8) {
          char who[64];
          snprintf(who, sizeof who, " %d:%d", c->number, static_cast<int>(&t - c->threads.data()));
          places[key] += who;
        }
      }
    }
    if (l->next < l->ctas) places["launch " + std::to_string(l->number)] = " " + std::to_string(l->ctas - l->next) + " CTAs have not begun";
  }
  std::string text;
  int lines = 0;
  for (auto& [what, who] : places) {
    if (++lines > 40) break;
    text += "  " + what + "\n    " + std::to_string(counts[what]) + " threads (CTA:thread):" + who + "\n";
  }
  return text;
}

int launch(const Config& config, std::function<void()> body) {
  const uint64_t threads = static_cast<uint64_t>(config.block.x) * config.block.y * config.block.z;
  const uint64_t ctas = static_cast<uint64_t>(config.grid.x) * config.grid.y * config.grid.z;
  if (!threads || threads > 1024 || !ctas || config.grid.x % config.cluster || config.cluster > 16) return 9;
  if (config.shared > shared_limit(config.kernel)) return 1;
  auto l = std::make_unique<Launch>();
  l->config = config, l->body = std::move(body), l->number = ++machine.launches, l->stream = config.stream;
  l->ctas = static_cast<int>(ctas);
  for (auto& p : machine.pending) {
    if (p->stream == l->stream) l->before = p.get();
  }
  machine.pending.push_back(std::move(l));
  return 0;
}

void on_stream(uint64_t stream, std::function<void()> work) {
  auto l = std::make_unique<Launch>();
  l->body = std::move(work), l->number = ++machine.launches, l->stream = stream, l->host = true;
  for (auto& p : machine.pending) {
    if (p->stream == stream) l->before = p.get();
  }
  machine.pending.push_back(std::move(l));
}

void wait_for_predecessor() {
  Launch* l = running->cta->launch;
  if (!l->before || !l->config.programmatic) return;
  l->before->waiting.push_back(running);
  wait("griddepcontrol.wait");
}

void launch_dependents() {
  Cta* cta = running->cta;
  if (cta->triggered) return;
  cta->triggered = machine.changed = true;
  cta->launch->triggered++;
  happened();
}

uint32_t cluster_rank() { return running->cta->rank; }
uint32_t cluster_size() { return running->cta->launch->config.cluster; }
uint32_t sm() { return running->cta->sm; }

}  // namespace emu

extern "C" {
void emu_configure(int sms, int mode, uint64_t seed, int overlap, int eager, int shuffle) {
  auto& m = emu::machine;
  m.sms = sms, m.mode = static_cast<emu::Mode>(mode), m.overlap = overlap, m.eager = eager, m.shuffle = shuffle;
  m.random = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
}
const char* emu_drain() {  // runs all launches; returns "" or what went wrong
  static std::string said;
  emu::drain();
  said = std::move(emu::machine.error);
  emu::machine.error.clear();
  return said.c_str();
}
}
