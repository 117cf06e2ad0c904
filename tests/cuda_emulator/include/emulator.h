// What translated kernels see of the emulator: threads, shared memory, and the functions behind PTX instructions.
// The functions are in runtime/*.cpp, one library for all kernels, so that launches of several libraries share streams.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emu {

// Built-in variables of the running thread.
struct View {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  int lane;
};
extern View* view;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- shared memory ----
// A 32-bit address: the CTA's rank in the cluster in bits 24 and up, the place in its memory below.

struct Slot {  // a static __shared__ variable: one object per instantiation of its function
  uint64_t launch;
  uint32_t at;
};
void* place(Slot& slot, size_t bytes, size_t align);
void* dynamic(size_t align);
template <typename T>
T& shared(Slot& slot, size_t align = alignof(T)) {
  return *reinterpret_cast<T*>(place(slot, sizeof(T), align));
}
uint32_t to_shared(const void* p);
void* from_shared(uint32_t address, size_t bytes, bool own = false);  // own: it must be in this CTA's memory
uint32_t mapa(uint32_t address, uint32_t rank);
void* map_rank(const void* p, uint32_t rank);

// ---- order of threads ----

// Waits for all lanes of `mask`; the last one runs `act` with all lanes' arguments (null for lanes that have ended).
using Act = void (*)(void** arguments, uint32_t lanes);
void meet(uint32_t mask, void* argument, Act act, const char* what);
void bar_sync(int id, int threads);  // threads < 0: all of the CTA
void bar_arrive(int id, int threads);
void cluster_arrive();
void cluster_wait();
uint32_t cluster_rank(), cluster_size(), sm(), active_lanes();
void poll();  // lets others run: called by loads that a loop may repeat until others have written
void happened();  // progress that may end others' polling
template <typename T>
volatile T* polled(const volatile void* p) {
  poll();
  return const_cast<volatile T*>(static_cast<const volatile T*>(p));
}
uint64_t clock_ns();
void wait_for_predecessor();
void launch_dependents();

// ---- barriers in shared memory ----

void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_arrive(uint32_t address, uint32_t count, uint32_t expected_bytes);
void mbarrier_expect(uint32_t address, uint32_t bytes);
bool mbarrier_wait(uint32_t address, uint32_t parity);  // returns when it is passed
bool mbarrier_test(uint32_t address, uint32_t parity);

// ---- asynchronous copies ----

void cp_async(uint32_t to, const void* from, uint32_t bytes, uint32_t valid);
void cp_async_commit();
void cp_async_wait(int pending);
void cp_async_arrive(uint32_t barrier, bool counted);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t mask);  // mask 0: own CTA
void bulk_share(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier);
void bulk_store(void* to, uint32_t from, uint32_t bytes);
void bulk_commit();
void bulk_wait(int pending, bool read);
void tensor_load(uint32_t to, const void* map, const int* at, int dims, uint32_t barrier, uint32_t mask);
void tensor_store(const void* map, const int* at, int dims, uint32_t from);
void st_async(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier);

// Bit 4 a + 2 b + c of `table` for the bits a, b, c of each place.
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t v = 0;
  for (uint32_t n = 0; n < 8; n++) {
    if (table >> n & 1) v |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
  }
  return v;
}

// ---- tensor cores ----

enum Type { BF16, F16, E4M3, E5M2, S8 };
void mma(Type type, int k, float& d0, float& d1, float& d2, float& d3, const uint32_t* a, const uint32_t* b,
         const float* c);
void ldmatrix(uint32_t* to, int count, bool transposed, uint32_t address);
void stmatrix(const uint32_t* from, int count, bool transposed, uint32_t address);
struct Wgmma {
  Type type;
  int n, k;  // k: of one instruction
  bool a_shared, add, negate_a, negate_b, a_transposed, b_transposed;
};
// Of S8, sums are int32.
void wgmma(const Wgmma& product, float* first, float* last, const uint32_t* a, uint64_t a_descriptor,
           uint64_t b_descriptor);
void wgmma_commit();
void wgmma_wait(int pending);

// ---- numbers ----

uint16_t e4m3x2(float high, float low);
uint32_t f16x2_of_e4m3x2(uint16_t pair);
uint32_t mul_bf16x2(uint32_t a, uint32_t b);
uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c);
template <typename To, typename From>
To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}

bool elect(uint32_t mask);
constexpr size_t largest(size_t a, size_t b) { return a > b ? a : b; }

// ---- operands, loads and stores of inline assembly ----

// A register's value as another type of its size: bits of floats are kept, pointers become numbers.
template <typename To, typename From>
To as(From v) {
  if constexpr (std::is_pointer_v<From>) {
    return static_cast<To>(reinterpret_cast<uint64_t>(v));
  } else if constexpr (sizeof(To) == sizeof(From) && std::is_floating_point_v<To> != std::is_floating_point_v<From>) {
    return bits<To>(v);
  } else {
    return static_cast<To>(v);
  }
}
template <typename To, typename From>
To operand(From v) {
  return as<To>(v);
}
template <typename To, typename From>
void set(To& to, From v) {
  to = as<To>(v);
}

template <typename T>
T load(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T)) fail("a load from a misaligned address");
  return *static_cast<const volatile T*>(p);
}
template <typename T>
void store(void* p, T v) {
  *static_cast<volatile T*>(p) = v;
}

// ---- launches ----

struct Config {
  dim3 grid, block;
  size_t shared;
  uint64_t stream;
  int cluster;
  bool programmatic;
  const void* kernel;
};
int launch(const Config& config, std::function<void()> body);
void on_stream(uint64_t stream, std::function<void()> work);

}  // namespace emu

constexpr int warpSize = 32;
