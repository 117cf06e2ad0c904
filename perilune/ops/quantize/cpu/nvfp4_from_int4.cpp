// The search of nvfp4_from_int4.py: 32 candidate scales for every block of 16, four vectors of eight errors each.
#include "cpp/vec.h"

namespace {

typedef uint8_t b16 __attribute__((vector_size(16)));

constexpr int LOWEST = -11, HIGHEST = 6, LANES = 32;
constexpr double UNIT = 1.0 / (1 << 14);

struct Tables {
  const float* cost;     // [128][9][32], or the coarse one
  const float* error;    // [128][9][32]
  const uint8_t* codes;  // [128][32][16]
  const float* price;    // [18][32]
  const uint8_t* byte;   // [18][32]
};

// For each byte (two INT4 values), which of the levels 1..8 it adds to: one count per byte of the word.
struct Counts {
  uint64_t of[256];
  Counts() {
    for (int b = 0; b < 256; b++) {
      const int low = abs((b & 15) - 8), high = abs((b >> 4) - 8);
      of[b] = (low ? uint64_t(1) << 8 * (low - 1) : 0) + (high ? uint64_t(1) << 8 * (high - 1) : 0);
    }
  }
};
const Counts counts;

// The same for a block in which weight i counts `often[i]` times.
INLINE uint64_t weighed(const uint8_t* from, const uint8_t* often) {
  uint64_t sum = 0;
  for (int b = 0; b < 8; b++)
    sum += counts.of[(from[b] & 15) | 0x80] * often[2 * b] + counts.of[(from[b] & 0xf0) | 8] * often[2 * b + 1];
  return sum;
}

// The candidate with the least cost.
INLINE int search(const float* cost, const float* price, uint64_t levels) {
  f8 e[4];
  for (int v = 0; v < 4; v++) e[v] = load(price + 8 * v);
  for (int level = 1; level <= 8; level++, levels >>= 8) {
    const f8 n = splat(float(int32_t(levels & 255)));
    const float* row = cost + level * LANES;
    for (int v = 0; v < 4; v++) e[v] += n * load(row + 8 * v);
  }
  const i8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  i8 least = (__builtin_convertvector(e[0], i8) << 5) + lane;
  for (int v = 1; v < 4; v++) {
    const i8 next = (__builtin_convertvector(e[v], i8) << 5) + (lane + 8 * v);
    least = next < least ? next : least;
  }
  int32_t best = least[0];
  for (int k = 1; k < 8; k++) best = least[k] < best ? least[k] : best;
  return best & 31;
}

INLINE b16 mapped(const uint8_t* codes, b16 low, b16 high) {
  b16 table;
  memcpy(&table, codes, sizeof table);
  return __builtin_shuffle(table, low) | (__builtin_shuffle(table, high) << 4);
}

// One row; false if a scale is beyond the exponent. `often` may be null.
bool convert(const uint8_t* packed, const uint16_t* scale, const uint8_t* often, int64_t inputs, int64_t exponent, const Tables& t,
             uint8_t* values, uint8_t* steps, double* energy) {
  double signal = 0, lost = 0;
  for (int64_t g = 0; g < inputs / 32; g++) {
    const uint8_t* from = packed + 16 * g;
    uint8_t* to = values + 16 * g;
    const int64_t power = (scale[g] >> 7) - 127 - exponent;  // a sign makes it too large
    if (power > HIGHEST) return false;
    const double s = widen(scale[g]), square = s * s;
    uint64_t levels[2] = {};
    for (int b = 0; b < 16; b++) levels[b / 8] += counts.of[from[b]];
    double here[2];
    for (int h = 0; h < 2; h++) {
      int64_t sum = 0;
      for (int level = 1; level <= 8; level++) sum += int64_t(levels[h] >> 8 * (level - 1) & 255) * level * level;
      here[h] = double(sum) * square;
      signal += here[h];
    }
    if (power < LOWEST) {
      memset(to, 0, 16);
      steps[2 * g] = steps[2 * g + 1] = 0;
      lost += here[0] + here[1];
      continue;
    }
    const int mantissa = scale[g] & 127;
    const int64_t row = (power - LOWEST) * LANES;
    b16 raw, out[2];
    memcpy(&raw, from, sizeof raw);
    const b16 low = raw & 15, high = raw >> 4;
    for (int h = 0; h < 2; h++) {
      const uint64_t judged = often ? weighed(from + 8 * h, often + 32 * g + 16 * h) : levels[h];
      const int k = search(t.cost + mantissa * 9 * LANES, t.price + row, judged);
      steps[2 * g + h] = t.byte[row + k];
      const float* error = t.error + mantissa * 9 * LANES + k;
      float units = 0;
      for (int level = 1; level <= 8; level++) units += float(levels[h] >> 8 * (level - 1) & 255) * error[level * LANES];
      lost += double(units) * UNIT * square;
      out[h] = mapped(t.codes + (mantissa * LANES + k) * 16, low, high);
    }
    memcpy(to, &out[0], 8);
    memcpy(to + 8, reinterpret_cast<uint8_t*>(&out[1]) + 8, 8);
  }
  energy[0] = signal;
  energy[1] = lost;
  return true;
}

}  // namespace

API nvfp4_from_int4(const uint8_t* packed, const uint16_t* scale, const uint8_t* often, int64_t o, int64_t inputs, int64_t exponent,
                    const float* cost, const float* error, const uint8_t* codes, const float* price,
                    const uint8_t* byte, uint8_t* values, uint8_t* steps, double* energy, int64_t threads) {
  const Tables t = {cost, error, codes, price, byte};
  int beyond = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : beyond) if (o * inputs > 1 << 16)
  for (int64_t r = 0; r < o; r++)
    beyond |= !convert(packed + r * (inputs / 2), scale + r * (inputs / 32), often, inputs, exponent, t,
                       values + r * (inputs / 2), steps + r * (inputs / 16), energy + 2 * r);
  return beyond;
}
