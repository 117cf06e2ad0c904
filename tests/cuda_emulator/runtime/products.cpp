// Tensor cores: mma.sync, ldmatrix, stmatrix and wgmma. Products are exact, sums are fp32.
#include <cmath>

#include "machine.h"

namespace emu {

float of_e4m3(uint8_t v);
float of_e5m2(uint8_t v);

namespace {

float of_bf16(uint16_t v) { return bits<float>(static_cast<uint32_t>(v) << 16); }
float of_f16(uint16_t v) { return static_cast<float>(bits<_Float16>(v)); }

int bytes_of(Type type) { return type == BF16 || type == F16 ? 2 : 1; }

float number(Type type, const uint8_t* p) {
  uint16_t v = 0;
  memcpy(&v, p, static_cast<size_t>(bytes_of(type)));
  switch (type) {
    case BF16: return of_bf16(v);
    case F16: return of_f16(v);
    case E4M3: return of_e4m3(static_cast<uint8_t>(v));
    case S8: return static_cast<float>(static_cast<int8_t>(v));
    default: return of_e5m2(static_cast<uint8_t>(v));
  }
}

// Matrix A, 16 rows, from the lanes' registers: to[row][k]; k = 16 for 16-bit types, 32 for 8-bit types.
void gather_a(Type type, int k, const uint32_t* const* lanes, float (*to)[32]) {
  const int each = 4 / bytes_of(type);  // values of a register
  for (int lane = 0; lane < 32; lane++) {
    for (int r = 0; r < 4; r++) {
      const int row = lane / 4 + r % 2 * 8, from = lane % 4 * each + r / 2 * k / 2;
      if (r / 2 * k / 2 >= k) continue;
      const auto* p = reinterpret_cast<const uint8_t*>(&lanes[lane][r]);
      for (int i = 0; i < each; i++) to[row][from + i] = number(type, p + i * bytes_of(type));
    }
  }
}

template <int N>
void add_products(int n, int k, const float (*a)[32], const float* b, float* sums, float sign) {
  const int columns = N ? N : n;
  for (int row = 0; row < 16; row++) {
    float* to = sums + row * 256;
    for (int i = 0; i < k; i++) {
      const float f = a[row][i] * sign;
      const float* from = b + i * 256;
      for (int c = 0; c < columns; c++) to[c] += f * from[c];
    }
  }
}

}  // namespace

// ---- mma.sync ----

namespace {

struct Mma {
  Type type;
  int k;
  float* d[4];
  const uint32_t *a, *b;
  const float* c;
};

}  // namespace

void mma(Type type, int k, float& d0, float& d1, float& d2, float& d3, const uint32_t* a, const uint32_t* b,
         const float* c) {
  Mma own{type, k, {&d0, &d1, &d2, &d3}, a, b, c};
  meet(~0u, &own, [](void** all, uint32_t lanes) {
    if (lanes != ~0u) {
      machine.error = "mma.sync without all lanes of the warp";
      return;
    }
    const Mma& first = *static_cast<Mma*>(all[0]);
    const int bytes = bytes_of(first.type), each = 4 / bytes, k = first.k;
    float a[16][32], b[32][8], sums[16][8];
    const uint32_t* registers[32];
    for (int i = 0; i < 32; i++) registers[i] = static_cast<Mma*>(all[i])->a;
    gather_a(first.type, k, registers, a);
    for (int lane = 0; lane < 32; lane++) {
      const Mma& m = *static_cast<Mma*>(all[lane]);
      for (int r = 0; r < 2; r++) {
        const auto* p = reinterpret_cast<const uint8_t*>(&m.b[r]);
        for (int i = 0; i < each; i++) b[lane % 4 * each + r * k / 2 + i][lane / 4] = number(first.type, p + i * bytes);
      }
      for (int i = 0; i < 4; i++) sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = m.c[i];
    }
    for (int row = 0; row < 16; row++) {
      for (int i = 0; i < k; i++) {
        for (int n = 0; n < 8; n++) sums[row][n] += a[row][i] * b[i][n];
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      const Mma& m = *static_cast<Mma*>(all[lane]);
      for (int i = 0; i < 4; i++) *m.d[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
  }, "mma.sync");
}

// ---- ldmatrix, stmatrix ----

namespace {

struct Matrices {
  uint32_t* registers;
  uint8_t* row;
  int count;
  bool transposed, store;
};

void move(void** all, uint32_t lanes) {
  if (lanes != ~0u) {
    machine.error = "ldmatrix or stmatrix without all lanes of the warp";
    return;
  }
  const Matrices& first = *static_cast<Matrices*>(all[0]);
  uint32_t held[4][32];
  if (first.store) {
    for (int lane = 0; lane < 32; lane++) {
      for (int m = 0; m < first.count; m++) held[m][lane] = static_cast<Matrices*>(all[lane])->registers[m];
    }
  }
  for (int m = 0; m < first.count; m++) {
    for (int lane = 0; lane < 32; lane++) {
      auto* to = reinterpret_cast<uint8_t*>(first.store ? &held[m][lane] : &static_cast<Matrices*>(all[lane])->registers[m]);
      for (int i = 0; i < 2; i++) {
        const int row = first.transposed ? lane % 4 * 2 + i : lane / 4;
        const int column = first.transposed ? lane / 4 : lane % 4 * 2 + i;
        uint8_t* at = static_cast<Matrices*>(all[m * 8 + row])->row + column * 2;
        if (first.store) {
          memcpy(at, to + i * 2, 2);
        } else {
          memcpy(to + i * 2, at, 2);
        }
      }
    }
  }
}

void matrices(uint32_t* registers, int count, bool transposed, bool store, uint32_t address) {
  // Lanes from 8 x count on give addresses that are not used.
  const bool used = running->lane < 8 * count;
  if (used && address % 16) fail("ldmatrix or stmatrix: a row at 0x%x, not a multiple of 16", address & PLACE);
  Matrices own{registers, used ? static_cast<uint8_t*>(from_shared(address, 16, true)) : nullptr, count, transposed, store};
  meet(~0u, &own, move, store ? "stmatrix" : "ldmatrix");
}

}  // namespace

void ldmatrix(uint32_t* to, int count, bool transposed, uint32_t address) {
  matrices(to, count, transposed, false, address);
}
void stmatrix(const uint32_t* from, int count, bool transposed, uint32_t address) {
  uint32_t copy[4] = {};
  memcpy(copy, from, 4 * static_cast<size_t>(count));
  matrices(copy, count, transposed, true, address);
}

// ---- wgmma ----
// Each warp of a warpgroup computes its 16 rows by itself.

namespace {

struct Operand {  // of wgmma, in shared memory, by its descriptor
  const uint8_t* shared;
  uint32_t start, lead, stride, swizzle;
  Operand(Cta* cta, uint64_t d)
      : shared(cta->shared), start(static_cast<uint32_t>(d & 0x3fff) << 4),
        lead(static_cast<uint32_t>(d >> 16 & 0x3fff) << 4), stride(static_cast<uint32_t>(d >> 32 & 0x3fff) << 4) {
    const uint32_t mode = d >> 62;  // 1: 128 bytes, 2: 64, 3: 32
    swizzle = mode == 0 ? 0 : 4 - mode;
  }
  // The value of row r (of M or N) and column k; transposed: rows are adjacent.
  const uint8_t* at(uint32_t row, uint32_t k, uint32_t bytes, bool transposed) const {
    static const uint32_t MASKS[] = {0, 1, 3, 7};
    const uint32_t width = 16u << swizzle;  // bytes of a row of the swizzled pattern
    uint32_t place = start;
    if (transposed) {
      const uint32_t each = width / bytes;
      place += row / each * lead + k / 8 * stride + k % 8 * width + row % each * bytes;
    } else if (swizzle) {
      place += row / 8 * stride + row % 8 * width + k * bytes;
    } else {
      place += row / 8 * stride + k * bytes / 16 * lead + row % 8 * 16 + k * bytes % 16;
    }
    place ^= (place >> 7 & MASKS[swizzle]) << 4;
    return shared + (place & (SHARED_BYTES - 1));
  }
};

void compute(Warp& warp, Product& p) {
  if (p.done) return;
  p.done = true;
  if (p.commit) return;
  const Wgmma& w = p.kind;
  static float a[16][32], b[32 * 256], sums[16 * 256];
  const auto size = static_cast<uint32_t>(bytes_of(w.type));
  if (w.a_shared) {
    const Operand from(warp.cta, p.a_descriptor);
    for (int row = 0; row < 16; row++) {
      for (int k = 0; k < w.k; k++) {
        a[row][k] = number(w.type, from.at(static_cast<uint32_t>(warp.index % 4 * 16 + row), static_cast<uint32_t>(k), size, w.a_transposed));
      }
    }
  } else {
    const uint32_t* registers[32];
    for (int i = 0; i < 32; i++) registers[i] = p.a[i];
    gather_a(w.type, w.k, registers, a);
  }
  const Operand from(warp.cta, p.b_descriptor);
  for (int n = 0; n < w.n; n++) {
    for (int k = 0; k < w.k; k++) {
      b[k * 256 + n] = number(w.type, from.at(static_cast<uint32_t>(n), static_cast<uint32_t>(k), size, w.b_transposed));
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < p.count; i++) {
      float& to = sums[(lane / 4 + i / 2 % 2 * 8) * 256 + i / 4 * 8 + lane % 4 * 2 + i % 2];
      to = w.add && w.type != S8 ? p.d[lane][i] : 0.0f;
    }
  }
  const float sign = w.negate_a != w.negate_b ? -1.0f : 1.0f;
  w.n == 128 ? add_products<128>(w.n, w.k, a, b, sums, sign)
  : w.n == 256 ? add_products<256>(w.n, w.k, a, b, sums, sign) : add_products<0>(w.n, w.k, a, b, sums, sign);
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < p.count; i++) {
      float& to = p.d[lane][i];
      const float sum = sums[(lane / 4 + i / 2 % 2 * 8) * 256 + i / 4 * 8 + lane % 4 * 2 + i % 2];
      // Sums of 32 products of whole numbers of 8 bits are exact as floats.
      to = w.type == S8 ? bits<float>(static_cast<int>(sum) + (w.add ? bits<int>(to) : 0)) : sum;
    }
  }
}

bool same(const Wgmma& a, const Wgmma& b) {
  return a.type == b.type && a.n == b.n && a.k == b.k && a.a_shared == b.a_shared && a.add == b.add;
}

Product& ask(bool commit, const Wgmma& kind) {
  Thread* t = running;
  Warp& warp = *t->warp;
  const size_t at = t->products++ - warp.gone;
  if (at == warp.products.size()) {
    warp.products.emplace_back();
    Product& p = warp.products.back();
    p.kind = kind, p.commit = commit, p.done = false, p.arrived = 0;
  }
  Product& p = warp.products[at];
  if (p.commit != commit || (!commit && !same(p.kind, kind))) fail("lanes of a warp ask for different wgmma");
  p.arrived |= 1u << t->lane;
  return p;
}

void asked(const Product& p) {
  Warp& warp = *running->warp;
  if (p.arrived != ~0u || machine.mode == LATE || (machine.mode == RANDOM && machine.chance())) return;
  for (Product& q : warp.products) {
    compute(warp, q);
    if (&q == &p) break;
  }
}

}  // namespace

void wgmma(const Wgmma& kind, float* first, float* last, const uint32_t* a, uint64_t a_descriptor,
           uint64_t b_descriptor) {
  Product& p = ask(false, kind);
  const int lane = running->lane, count = kind.n / 2;
  if (last - first != count - 1) fail("wgmma: sums are not adjacent in memory");
  p.count = count, p.d[lane] = first;
  if (a) memcpy(p.a[lane], a, 16);
  if (lane && p.arrived != 1u << lane && (p.b_descriptor != b_descriptor || p.a_descriptor != a_descriptor)) {
    fail("wgmma: lanes give different descriptors");
  }
  p.a_descriptor = a_descriptor, p.b_descriptor = b_descriptor;
  asked(p);
}

void wgmma_commit() {
  const Wgmma none{};
  asked(ask(true, none));
}

void wgmma_wait(int pending) {
  struct Argument { Warp* warp; int pending; } own{running->warp, pending};
  meet(~0u, &own, [](void** all, uint32_t lanes) {
    const auto& one = *static_cast<Argument*>(all[0]);
    Warp& warp = *one.warp;
    int groups = 0;
    for (const Product& p : warp.products) groups += p.commit;
    // Products after the last commit belong to a group that is still open.
    for (int keep = one.pending; groups > keep;) {
      Product& p = warp.products.front();
      compute(warp, p);
      groups -= p.commit;
      warp.products.pop_front();
      warp.gone++;
    }
  }, "wgmma.wait_group");
}

}  // namespace emu
