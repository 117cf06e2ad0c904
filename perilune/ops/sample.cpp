// sample on CPU, after the softmax: integer weights, thresholds and the draw, row by row. Rows of temperature 0 are left.
//
// Top-k and top-p need no sorted row: weights are counted into buckets a quarter of an octave wide, and only the bucket
// in which the bound falls is sorted.
#include <algorithm>
#include <functional>

#include "vec.h"

namespace {

constexpr int64_t BUCKETS = 53 * 4;  // weights are at most 2^52

INLINE int64_t bucket(int64_t w) {
  const int64_t octave = 63 - __builtin_clzll(w | 1);
  return octave * 4 + ((w << 2 >> octave) & 3);
}

// Kept are the weights above `threshold`, and of equal ones the first `ties`; `mass` is their sum.
struct Cut {
  int64_t threshold, ties, mass;
};

struct Row {
  const int64_t* w;
  int64_t V;
  int64_t* sorted;  // scratch [V]
  int64_t counts[BUCKETS + 1] = {}, masses[BUCKETS + 1] = {};

  Row(const int64_t* w, int64_t V, int64_t* sorted) : w(w), V(V), sorted(sorted) {
    for (int64_t i = 0; i < V; i++) {
      const int64_t b = bucket(w[i]);
      counts[b]++;
      masses[b] += w[i];
    }
  }

  // The heaviest weights up to and including the one with which enough(count, mass) becomes true.
  template <class Enough>
  Cut heaviest(Enough enough) {
    int64_t count = 0, mass = 0, b = BUCKETS;
    while (b > 0 && !enough(count + counts[b], mass + masses[b])) {
      count += counts[b];
      mass += masses[b--];
    }
    int64_t n = 0;
    for (int64_t i = 0; i < V; i++)
      if (bucket(w[i]) == b) sorted[n++] = w[i];
    std::sort(sorted, sorted + n, std::greater<int64_t>());
    int64_t ties = 0;
    for (int64_t i = 0; i < n; i++) {
      mass += sorted[i];
      ties = i > 0 && sorted[i] == sorted[i - 1] ? ties + 1 : 1;
      if (enough(++count, mass)) return {sorted[i], ties, mass};
    }
    return {0, V, mass};
  }
};

}  // namespace

API sample(const float* p, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
           const double* u, int64_t* ids, int64_t R, int64_t V) {
  int64_t* const w = static_cast<int64_t*>(malloc(2 * V * sizeof(int64_t)));
  if (w == nullptr) abort();
  for (int64_t r = 0; r < R; r++) {
    if (temperature[r] == 0) continue;
    int64_t total = 0, largest = 0;
    for (int64_t i = 0; i < V; i++) {
      const float x = p[r * V + i];
      w[i] = x > 0 ? int64_t(double(x) * 4503599627370496.0) : 0;  // nan weighs nothing
      total += w[i];
      largest = std::max(largest, w[i]);
    }
    Cut cut{0, V, total};
    if ((top_k[r] > 0 && top_k[r] < V) || top_p[r] < 1) {
      Row row(w, V, w + V);
      const int64_t k = top_k[r];
      if (k > 0 && k < V) cut = row.heaviest([=](int64_t count, int64_t) { return count >= k; });
      const double goal = double(top_p[r]) * double(cut.mass);
      if (top_p[r] < 1) cut = row.heaviest([=](int64_t, int64_t mass) { return double(mass) >= goal; });
    }
    const double least = double(min_p[r]) * double(largest);
    total = 0;
    for (int64_t i = 0; i < V; i++) {
      if (w[i] < cut.threshold || (w[i] == cut.threshold && cut.ties-- <= 0) || double(w[i]) < least) w[i] = 0;
      total += w[i];
    }
    const int64_t goal = std::min(int64_t(u[r] * double(total)), total - 1);
    int64_t id = 0, reached = 0;
    while (id < V - 1 && (reached += w[id]) <= goal) id++;
    ids[r] = id;
  }
  free(w);
  return 0;
}
