// The emulated GPU: launches, CTAs, warps and threads, and who may run. One host thread runs all of it.
//
// Every CUDA thread is a fiber. A fiber runs until it waits and then switches to the scheduler. It takes a ready warp
// at random (seeded) and runs its ready lanes. When no warp can go on except by polling, the scheduler starts CTAs,
// completes asynchronous copies or moves the clock. If nothing helps, it reports what each thread waits for.
#pragma once
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../include/emulator.h"

namespace emu {

// Bytes: shared memory of a CTA, its host buffer. PLACE: bits of a shared address that are the offset in the buffer.
constexpr size_t SHARED_ROOM = 227 * 1024, SHARED_BYTES = 256 * 1024;
constexpr uint32_t SHARED_BEGIN = 1024, RANK_SHIFT = 24, PLACE = (1u << RANK_SHIFT) - 1;
constexpr size_t STACK = 128 * 1024;
constexpr uint64_t CANARY = 0x5afe57ac5afe57ac;

struct Warp;
struct Cta;
struct Launch;

struct Copy {  // one cp.async
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes, valid;
  bool done;
};
struct Store {  // one bulk store from shared to global memory
  std::function<void(std::vector<uint8_t>&)> read;  // copies the source
  std::function<void(const std::vector<uint8_t>&)> write;
  std::vector<uint8_t> held;
  int state;  // 0: issued, 1: source read, 2: written
  int group;
};

struct Thread : View {
  void* stack_pointer = nullptr;
  uint8_t* stack = nullptr;
  Warp* warp = nullptr;
  Cta* cta = nullptr;
  const char* waits = nullptr;  // null: it runs or is ready
  const void* object = nullptr;
  uint64_t phase = 0;
  bool ended = false, cluster_arrived = false;
  uint64_t cluster_phase = 0;
  std::vector<Copy> copies;
  std::deque<size_t> groups;  // copies of each committed group
  size_t ungrouped = 0;
  std::vector<Store> stores;
  int store_groups = 0;
  size_t products = 0;  // wgmma and commits that it issued
};

struct Meeting {  // lanes that wait for each other in a warp-wide instruction (shuffle, mma.sync, ...)
  uint32_t mask, arrived;
  Act act;
  const char* what;
  void* arguments[32];
};

struct Product {  // a wgmma of a warp, or a commit of a group
  Wgmma kind;
  bool commit, done;
  uint32_t arrived;
  int count;  // floats of a lane
  float* d[32];
  uint32_t a[32][4];
  uint64_t a_descriptor, b_descriptor;
};

struct Warp {
  Cta* cta;
  int index;
  uint32_t present = 0, ended = 0, ready = 0;
  bool queued = false;
  std::vector<std::unique_ptr<Meeting>> meetings, spare;
  Thread* lanes[32] = {};
  std::deque<Product> products;
  size_t gone = 0;  // products that were removed from the front
};

struct NamedBarrier {
  int arrived = 0, expected = 0;
  std::vector<Thread*> waiting;
};

struct Cluster {
  std::vector<Cta*> ctas;
  int arrived = 0, threads = 0, ended = 0;
  uint64_t phase = 0;
  std::vector<Thread*> waiting;
};

struct Cta {
  Launch* launch;
  Cluster* cluster;
  uint3 block;
  int number, rank, sm;
  uint8_t* shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::unordered_map<const void*, std::vector<Thread*>> waiting;  // at barriers in shared memory
  int live = 0;
  bool begun = false, triggered = false, ended = false;
};

struct Launch {
  Config config;
  std::function<void()> body;
  uint64_t number, stream;
  Launch* before = nullptr;  // in the stream; null once it has ended
  int ctas = 0, next = 0, ended = 0, triggered = 0;
  bool done = false, host = false;
  std::unordered_map<Slot*, uint32_t> places;
  uint32_t dynamic_at = 0, shared_end = 0;
  std::vector<Thread*> waiting;  // threads of the next launch in griddepcontrol.wait
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Cta>> running;
};

enum Mode { EARLY, LATE, RANDOM };

struct Async {
  Cta* cta;  // whose shared memory it reads or writes
  std::function<void()> run;
};

struct Machine {
  int sms = 132, eager = 1;
  Mode mode = EARLY;
  bool overlap = false, shuffle = false;
  bool changed = true;  // CTAs may have ended, or others may begin
  uint64_t random = 1, clock = 1, launches = 0;
  std::list<std::unique_ptr<Launch>> pending;
  std::vector<Warp*> queue;
  std::vector<Async> asyncs;
  std::map<uint64_t, double> occupied;  // SMs in use, by stream: each stream is one rank's GPU
  uint64_t idle_polls = 0, stuck = 0;
  std::string error;
  void* scheduler = nullptr;
  std::vector<uint8_t*> free_shared, free_stacks;
  uint64_t next();  // random bits
  bool chance() { return next() & 1; }
};
extern Machine machine;
extern Thread* running;

void wait(const char* what, const void* object = nullptr, uint64_t phase = 0);
void make_ready(Thread* thread);
void later(Cta* cta, std::function<void()> run);  // a copy: now, at a random time, or last, by the mode
void complete_copies(Thread* thread, size_t count);
void end_of_stores(Thread* thread);
void leave_warp(Warp& warp);     // after a lane has ended: others may wait for it no more
void leave_barriers(Cta& cta);   // after a thread has ended
void check_cluster(Cluster& cluster);
uint8_t* shared_of(Cta* cta, uint32_t address, size_t bytes);
void complete_bytes(Cta* cta, uint32_t barrier, uint32_t bytes);
std::string report();
void drain();

}  // namespace emu

extern "C" void emu_switch(void** save, void* to);
