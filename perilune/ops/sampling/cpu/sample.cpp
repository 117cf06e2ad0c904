// sample on CPU, row by row. Contract in sample.py.
//
// Top-k and top-p need no sorted row: ids are counted in buckets by the leading bits of their logits' distance below
// the largest (the bits of positive floats order like their values). Only the bucket that contains the bound is sorted.
#include <algorithm>

#include "cpp/vec.h"

// Weights must have the bits of the other implementations: every operation is rounded by itself.
#pragma GCC optimize("fp-contract=off")

namespace {

constexpr int64_t BUCKETS = 2048;
constexpr int SHIFT = 17;
constexpr uint32_t NEAR = 0x32000000;  // bits of 2^-27: bucket 0 reaches from 0 to here
constexpr uint32_t FAR = 0x41e00000;   // bits of 28
constexpr int32_t ONE = 36;            // the largest logit weighs 2^36
constexpr float INFINITE = __builtin_inff();

// floor(2^36 e^z) for z in [-28, 0], as floats.
INLINE f8 weigh(f8 z) {
  const f8 t = z * 1.44269502f + 12582912.0f, n = t - 12582912.0f;
  const f8 r = (z - n * 0.693359375f) + n * 2.12194442e-4f;
  f8 p = splat(1.38888892e-3f);
  p = p * r + 8.33333377e-3f;
  p = p * r + 4.16666679e-2f;
  p = p * r + 1.66666672e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * bits<f8>((__builtin_convertvector(n, i8) + (127 + ONE)) << 23);
}

INLINE int64_t bucket(uint32_t distance) { return distance < NEAR ? 0 : (distance - NEAR) >> SHIFT; }

// Keeps the ids with a distance below `bound`, and the first `ties` with distance `bound`. mass: sum of their weights.
struct Cut {
  uint32_t bound;
  int64_t ties, mass;
};

struct Token {
  uint32_t distance;
  int64_t weight;
};

struct Row {
  const uint32_t* distances;
  const int64_t* weights;
  int64_t V;
  Token* sorted;  // scratch [V]
  int64_t counts[BUCKETS] = {}, masses[BUCKETS] = {};

  Row(const uint32_t* distances, const int64_t* weights, int64_t V, Token* sorted)
      : distances(distances), weights(weights), V(V), sorted(sorted) {
    for (int64_t i = 0; i < V; i++) {
      const int64_t b = bucket(distances[i]);
      counts[b]++;
      masses[b] += weights[i];
    }
  }

  // The nearest ids up to and including the one with which enough(count, mass) becomes true.
  template <class Enough>
  Cut nearest(Enough enough) {
    int64_t count = 0, mass = 0, b = 0;
    while (b < BUCKETS - 1 && !enough(count + counts[b], mass + masses[b])) {
      count += counts[b];
      mass += masses[b++];
    }
    int64_t n = 0;
    for (int64_t i = 0; i < V; i++)
      if (bucket(distances[i]) == b) sorted[n++] = {distances[i], weights[i]};
    std::sort(sorted, sorted + n, [](const Token& one, const Token& other) { return one.distance < other.distance; });
    int64_t ties = 0;
    for (int64_t i = 0; i < n; i++) {
      mass += sorted[i].weight;
      ties = i > 0 && sorted[i].distance == sorted[i - 1].distance ? ties + 1 : 1;
      if (enough(++count, mass)) return {sorted[i].distance, ties, mass};
    }
    return {FAR, V, mass};
  }
};

// The first id of the largest of x[V]; -1 if any is nan or +inf, or all are -inf.
INLINE int64_t largest_id(const float* x, int64_t V) {
  int64_t id = 0, broken = 0;
  for (int64_t i = 0; i < V; i++) broken |= !(x[i] < INFINITE);
  for (int64_t i = 1; i < V; i++)
    if (x[i] > x[id]) id = i;
  return broken || x[id] == -INFINITE ? -1 : id;
}

}  // namespace

API argmax(const float* logits, int64_t* ids, int64_t R, int64_t V) {
  for (int64_t r = 0; r < R; r++) ids[r] = largest_id(logits + r * V, V);
  return 0;
}

API sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
           const double* u, int64_t* ids, int64_t R, int64_t V) {
  const int64_t padded = (V + 7) / 8 * 8;
  float* const z = static_cast<float*>(malloc(padded * (2 * sizeof(float) + sizeof(int64_t)) + V * sizeof(Token)));
  if (z == nullptr) abort();
  uint32_t* const distances = reinterpret_cast<uint32_t*>(z + padded);
  int64_t* const w = reinterpret_cast<int64_t*>(z + 2 * padded);
  Token* const sorted = reinterpret_cast<Token*>(w + padded);
  for (int64_t r = 0; r < R; r++) {
    const float* x = logits + r * V;
    int64_t id = ids[r] = largest_id(x, V);
    if (id < 0 || temperature[r] == 0) continue;
    const float largest = x[id];
    const float inverse = std::min(1.0f / temperature[r], 3.40282347e38f);
    for (int64_t i = 0; i < V; i++) z[i] = std::max((x[i] - largest) * inverse, -28.0f);
    std::fill(z + V, z + padded, -28.0f);
    for (int64_t i = 0; i < padded; i += 8) {
      const f8 near = load(z + i), weight = weigh(near);
      for (int n = 0; n < 8; n++) {
        distances[i + n] = bits<uint32_t>(near[n]) & 0x7fffffff;
        w[i + n] = int64_t(weight[n]);
      }
    }
    int64_t total = 0;
    for (int64_t i = 0; i < V; i++) total += w[i];
    Cut cut{FAR, V, total};
    if ((top_k[r] > 0 && top_k[r] < V) || top_p[r] < 1) {
      Row row(distances, w, V, sorted);
      const int64_t k = top_k[r];
      if (k > 0 && k < V) cut = row.nearest([=](int64_t count, int64_t) { return count >= k; });
      const double goal = double(top_p[r]) * double(cut.mass);
      if (top_p[r] < 1) cut = row.nearest([=](int64_t, int64_t mass) { return double(mass) >= goal; });
    }
    const double least = double(min_p[r]) * double(1LL << ONE);
    total = 0;
    for (int64_t i = 0; i < V; i++) {
      if (distances[i] > cut.bound || (distances[i] == cut.bound && cut.ties-- <= 0) || double(w[i]) < least) w[i] = 0;
      total += w[i];
    }
    const int64_t goal = std::min(int64_t(u[r] * double(total)), total - 1);
    int64_t reached = 0;
    for (id = 0; id < V - 1 && (reached += w[id]) <= goal; id++) {
    }
    ids[r] = id;
  }
  free(z);
  return 0;
}
