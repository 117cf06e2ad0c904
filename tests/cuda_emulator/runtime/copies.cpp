// Asynchronous copies: of threads (cp.async), bulk copies, tensor maps, stores to other CTAs.
#include <algorithm>

#include "../include/cuda.h"
#include "machine.h"

namespace emu {

// ---- cp.async ----

namespace {

void perform(Copy& c) {
  if (c.done) return;
  c.done = true;
  memcpy(c.to, c.from, c.valid);
  memset(c.to + c.valid, 0, c.bytes - c.valid);
}

}  // namespace

void cp_async(uint32_t to, const void* from, uint32_t bytes, uint32_t valid) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async of %u bytes", bytes);
  if (valid > bytes) fail("cp.async of %u bytes, %u of them valid", bytes, valid);
  if (to % bytes || (valid && reinterpret_cast<uintptr_t>(from) % bytes)) fail("cp.async: a misaligned address");
  Thread* t = running;
  Copy c{static_cast<uint8_t*>(from_shared(to, bytes, true)), static_cast<const uint8_t*>(from), bytes, valid, false};
  if (machine.mode == EARLY || (machine.mode == RANDOM && machine.chance())) perform(c);
  t->copies.push_back(c);
  t->ungrouped++;
}

void cp_async_commit() {
  running->groups.push_back(running->ungrouped);
  running->ungrouped = 0;
}

void complete_copies(Thread* t, size_t count) {
  for (size_t i = 0; i < count; i++) perform(t->copies[i]);
  t->copies.erase(t->copies.begin(), t->copies.begin() + static_cast<long>(count));
}

void cp_async_wait(int pending) {
  Thread* t = running;
  size_t count = 0;
  if (pending < 0) {
    count = t->copies.size();
    t->groups.clear();
    t->ungrouped = 0;
  }
  while (pending >= 0 && t->groups.size() > static_cast<size_t>(pending)) {
    count += t->groups.front();
    t->groups.pop_front();
  }
  complete_copies(t, count);
}

void cp_async_arrive(uint32_t barrier, bool counted) {  // counted: the arrival raises what the barrier expects
  Thread* t = running;
  complete_copies(t, t->copies.size());
  for (size_t& n : t->groups) n = 0;
  t->ungrouped = 0;
  if (!counted) return mbarrier_arrive(barrier, 1, 0);
}

// ---- bulk copies ----

namespace {

void check_bulk(uint32_t shared, const void* global, uint32_t bytes) {
  if (bytes % 16 || shared % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
    fail("a bulk copy of %u bytes, shared address 0x%x, global %p: multiples of 16 are needed", bytes, shared & PLACE,
         global);
  }
}

// The CTAs that a copy goes to.
std::vector<Cta*> receivers(uint32_t to, uint32_t barrier, uint32_t mask) {
  const auto& ctas = running->cta->cluster->ctas;
  std::vector<Cta*> found;
  const uint32_t rank = to >> RANK_SHIFT;
  if (rank != barrier >> RANK_SHIFT) fail("a bulk copy to CTA %u with a barrier of another", rank);
  if (!mask) mask = 1u << rank;
  for (uint32_t i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    if (i >= ctas.size() || !ctas[i] || ctas[i]->ended) fail("a bulk copy to CTA %u, which is not there", i);
    if (!ctas[i]->begun) fail("a bulk copy to CTA %u, which has not begun", i);
    found.push_back(ctas[i]);
  }
  return found;
}

}  // namespace

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t mask) {
  check_bulk(to, from, bytes);
  for (Cta* cta : receivers(to, barrier, mask)) {
    uint8_t* at = shared_of(cta, to, bytes);
    later(cta, [=] {
      memcpy(at, from, bytes);
      complete_bytes(cta, barrier, bytes);
    });
  }
}

void bulk_share(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  auto* source = static_cast<uint8_t*>(from_shared(from, bytes, true));
  check_bulk(to, source, bytes);
  Cta* cta = receivers(to, barrier, 0)[0];
  uint8_t* at = shared_of(cta, to, bytes);
  later(cta, [=] {
    memcpy(at, source, bytes);
    complete_bytes(cta, barrier, bytes);
  });
}

void st_async(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier) {
  Cta* cta = receivers(to, barrier, 0)[0];
  if (to % bytes) fail("st.async: a misaligned address");
  uint8_t* at = shared_of(cta, to, bytes);
  uint8_t held[16];
  memcpy(held, value, bytes);
  later(cta, [=] {
    memcpy(at, held, bytes);
    complete_bytes(cta, barrier, bytes);
  });
}

// ---- from shared to global memory ----

namespace {

void advance(Store& s, int state) {
  if (s.state < 1 && state >= 1) s.read(s.held);
  if (s.state < 2 && state >= 2) s.write(s.held);
  s.state = std::max(s.state, state);
}

void ask(std::function<void(std::vector<uint8_t>&)> read, std::function<void(const std::vector<uint8_t>&)> write) {
  Thread* t = running;
  Store s{std::move(read), std::move(write), {}, 0, t->store_groups};
  if (machine.mode == EARLY) advance(s, 2);
  if (machine.mode == RANDOM) advance(s, static_cast<int>(machine.next() % 3));
  t->stores.push_back(std::move(s));
}

}  // namespace

void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  check_bulk(from, to, bytes);
  auto* source = static_cast<uint8_t*>(from_shared(from, bytes, true));
  ask([=](std::vector<uint8_t>& held) { held.assign(source, source + bytes); },
      [=](const std::vector<uint8_t>& held) { memcpy(to, held.data(), bytes); });
}

void bulk_commit() { running->store_groups++; }

void bulk_wait(int pending, bool read) {
  Thread* t = running;
  for (Store& s : t->stores) {
    if (s.group < t->store_groups - pending) advance(s, read ? 1 : 2);
  }
  t->stores.erase(std::remove_if(t->stores.begin(), t->stores.end(), [](const Store& s) { return s.state == 2; }),
                  t->stores.end());
}

void end_of_stores(Thread* t) {
  for (Store& s : t->stores) advance(s, 2);
  t->stores.clear();
}

// ---- tensor maps ----

namespace {

constexpr uint32_t MAP_MARK = 0x7e25a9u;

struct Map {  // what a CUtensorMap holds
  const uint8_t* base;
  uint64_t strides[4];  // bytes
  uint32_t sizes[5];
  uint16_t box[5];
  uint8_t element, dims, swizzle;
  uint32_t mark;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

int encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t dims, void* base, const cuuint64_t* sizes,
           const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  static const uint8_t BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  Map m{};
  if (dims < 1 || dims > 5 || reinterpret_cast<uintptr_t>(base) % 16 || !base) return CUDA_ERROR_INVALID_VALUE;
  m.base = static_cast<uint8_t*>(base), m.element = BYTES[type], m.dims = static_cast<uint8_t>(dims);
  m.swizzle = swizzle, m.mark = MAP_MARK;
  for (cuuint32_t i = 0; i < dims; i++) {
    if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    m.sizes[i] = static_cast<uint32_t>(sizes[i]), m.box[i] = static_cast<uint16_t>(box[i]);
    if (i + 1 < dims) {
      if (strides[i] % 16 || strides[i] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
      m.strides[i] = strides[i];
    }
  }
  const uint32_t inner = box[0] * m.element;
  const uint32_t most[] = {1u << 30, 32, 64, 128};
  if (inner % 16 || inner > most[swizzle]) return CUDA_ERROR_INVALID_VALUE;
  memset(to, 0, sizeof *to);
  memcpy(to, &m, sizeof m);
  return CUDA_SUCCESS;
}

uint32_t swizzled(uint32_t at, int swizzle) {
  const uint32_t bits[] = {0, 1, 3, 7};
  return at ^ ((at >> 7 & bits[swizzle]) << 4);
}

Map map_of(const void* p) {
  Map m;
  if (reinterpret_cast<uintptr_t>(p) % 64) fail("a tensor map at %p: not a multiple of 64", p);
  memcpy(&m, p, sizeof m);
  if (m.mark != MAP_MARK) fail("not a tensor map at %p", p);
  return m;
}

uint32_t box_bytes(const Map& m) {
  uint32_t n = m.element;
  for (int i = 0; i < m.dims; i++) n *= m.box[i];
  return n;
}

// Calls f(offset in the box, global address or null, bytes) for each 16 bytes of a box, or less at an edge.
template <typename F>
void each_piece(const Map& m, const int* at, F f) {
  const uint32_t inner = m.box[0] * m.element;
  uint32_t rows = 1;
  for (int i = 1; i < m.dims; i++) rows *= m.box[i];
  for (uint32_t row = 0; row < rows; row++) {
    const uint8_t* from = m.base;
    bool inside = true;
    uint32_t rest = row;
    for (int i = 1; i < m.dims; i++) {
      const int64_t p = at[i] + static_cast<int64_t>(rest % m.box[i]);
      rest /= m.box[i];
      inside = inside && p >= 0 && p < static_cast<int64_t>(m.sizes[i]);
      from += p * static_cast<int64_t>(m.strides[i - 1]);
    }
    const int64_t first = static_cast<int64_t>(at[0]) * m.element, end = static_cast<int64_t>(m.sizes[0]) * m.element;
    for (uint32_t b = 0; b < inner; b += 16) {
      const int64_t x = first + b;
      if (inside && x >= 0 && x + 16 <= end) {
        f(row * inner + b, from + x, 16u);
      } else {
        for (uint32_t i = 0; i < 16; i += m.element) {
          const bool held = inside && x + i >= 0 && x + i < end;
          f(row * inner + b + i, held ? from + x + i : nullptr, m.element);
        }
      }
    }
  }
}

}  // namespace

void tensor_load(uint32_t to, const void* map, const int* at, int dims, uint32_t barrier, uint32_t mask) {
  const Map m = map_of(map);
  if (dims != m.dims) fail("a %dd copy with a map of %d dimensions", dims, m.dims);
  if (to % 128) fail("a tensor copy to shared address 0x%x: not a multiple of 128", to & PLACE);
  const uint32_t bytes = box_bytes(m);
  std::vector<int> place(at, at + dims);
  for (Cta* cta : receivers(to, barrier, mask)) {
    uint8_t* shared = shared_of(cta, to, bytes) - (to & PLACE);
    later(cta, [=] {
      each_piece(m, place.data(), [&](uint32_t offset, const uint8_t* from, uint32_t n) {
        uint8_t* there = shared + swizzled((to & PLACE) + offset, m.swizzle);
        if (from) {
          memcpy(there, from, n);
        } else {
          memset(there, 0, n);
        }
      });
      complete_bytes(cta, barrier, bytes);
    });
  }
}

void tensor_store(const void* map, const int* at, int dims, uint32_t from) {
  const Map m = map_of(map);
  if (dims != m.dims) fail("a %dd copy with a map of %d dimensions", dims, m.dims);
  if (from % 128) fail("a tensor copy from shared address 0x%x: not a multiple of 128", from & PLACE);
  const uint32_t bytes = box_bytes(m), place = from & PLACE;
  const uint8_t* shared = static_cast<uint8_t*>(from_shared(from, bytes, true)) - place;
  std::vector<int> where(at, at + dims);
  ask(
      [=](std::vector<uint8_t>& held) {
        held.resize(bytes);
        for (uint32_t i = 0; i < bytes; i += 16) memcpy(&held[i], shared + swizzled(place + i, m.swizzle), 16);
      },
      [=](const std::vector<uint8_t>& held) {
        each_piece(m, where.data(), [&](uint32_t offset, const uint8_t* to, uint32_t n) {
          if (to) memcpy(const_cast<uint8_t*>(to), &held[offset], n);
        });
      });
}

}  // namespace emu

extern "C" int emu_driver_entry_point(const char* name, void** f) {
  if (strcmp(name, "cuTensorMapEncodeTiled")) return 1;
  *f = reinterpret_cast<void*>(emu::encode);
  return 0;
}
