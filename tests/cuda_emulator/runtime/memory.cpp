// Shared memory: places of variables, and addresses.
#include "machine.h"

namespace emu {

// Static variables follow each other from SHARED_BEGIN + the dynamic part's end on; a launch has one place for each.
// The dynamic part has no larger alignment than its declaration asks for.
void* place(Slot& slot, size_t bytes, size_t align) {
  Cta* cta = running->cta;
  Launch* l = cta->launch;
  if (slot.launch != l->number) {
    auto found = l->places.find(&slot);
    if (found == l->places.end()) {
      if (!l->shared_end) l->shared_end = SHARED_BEGIN + 1024 + (static_cast<uint32_t>(l->config.shared) + 1023) / 1024 * 1024;
      const uint32_t at = (l->shared_end + align - 1) / align * align;
      l->shared_end = at + bytes;
      if (l->shared_end > SHARED_BEGIN + 2048 + SHARED_ROOM) {
        fail("%u bytes of shared memory: there are %zu", l->shared_end - SHARED_BEGIN, SHARED_ROOM);
      }
      found = l->places.emplace(&slot, at).first;
    }
    slot.launch = l->number, slot.at = found->second;
  }
  return cta->shared + slot.at;
}

void* dynamic(size_t align) {
  Cta* cta = running->cta;
  Launch* l = cta->launch;
  if (!l->dynamic_at) {
    const uint32_t from = SHARED_BEGIN + 16;
    l->dynamic_at = (from + align - 1) / align * align;
  }
  if (l->dynamic_at % align) fail("declarations of dynamic shared memory with different alignments");
  return cta->shared + l->dynamic_at;
}

uint32_t to_shared(const void* p) {
  Cta* cta = running->cta;
  const auto* at = static_cast<const uint8_t*>(p);
  if (at < cta->shared || at > cta->shared + SHARED_BYTES) fail("%p is not in this CTA's shared memory", p);
  return static_cast<uint32_t>(at - cta->shared) | static_cast<uint32_t>(cta->rank) << RANK_SHIFT;
}

uint8_t* shared_of(Cta* cta, uint32_t address, size_t bytes) {
  const uint32_t at = address & PLACE;
  Launch* l = cta->launch;
  const bool dynamic = l->dynamic_at && at >= l->dynamic_at && at + bytes <= l->dynamic_at + l->config.shared;
  const bool fixed = l->shared_end && at >= SHARED_BEGIN + 1024 + l->config.shared && at + bytes <= l->shared_end;
  if (!dynamic && !fixed) {
    if (!running) {
      machine.error = "a copy outside of the CTA's shared memory";
      return cta->shared;
    }
    fail("%zu bytes at shared address 0x%x: outside of the CTA's shared memory (dynamic 0x%x + %zu, static to 0x%x)",
         bytes, at, l->dynamic_at, l->config.shared, l->shared_end);
  }
  return cta->shared + at;
}

void* from_shared(uint32_t address, size_t bytes, bool own) {
  const auto& ctas = running->cta->cluster->ctas;
  const uint32_t rank = address >> RANK_SHIFT;
  if (rank >= ctas.size() || !ctas[rank]) fail("a shared address of CTA %u of a cluster of %zu", rank, ctas.size());
  Cta* cta = ctas[rank];
  if (cta != running->cta) {
    if (own) fail("an address in the shared memory of CTA %u of the cluster: must be this CTA's", rank);
    if (!cta->begun || cta->ended) {
      fail("the shared memory of CTA %u of the cluster, which has %s", rank, cta->ended ? "ended" : "not begun");
    }
  }
  return shared_of(cta, address, bytes);
}

uint32_t mapa(uint32_t address, uint32_t rank) {
  if (rank >= running->cta->cluster->ctas.size()) fail("mapa to CTA %u: the cluster has %zu", rank, running->cta->cluster->ctas.size());
  return (address & PLACE) | rank << RANK_SHIFT;
}

void* map_rank(const void* p, uint32_t rank) { return from_shared(mapa(to_shared(p), rank), 1); }

}  // namespace emu
