// sample on CPU, after the softmax: integer weights, thresholds and the draw, row by row. Rows of temperature 0 are left.
#include <algorithm>
#include <functional>

#include "vec.h"

namespace {

// Lets `heavy`, a copy of w, hold its n largest in descending order.
void order(int64_t* heavy, const int64_t* w, int64_t V, int64_t n) {
  memcpy(heavy, w, V * sizeof(int64_t));
  if (n < V) std::nth_element(heavy, heavy + n, heavy + V, std::greater<int64_t>());
  std::sort(heavy, heavy + n, std::greater<int64_t>());
}

// How many of the heaviest stay; those of them are the first in `heavy`.
int64_t kept(int64_t* heavy, const int64_t* w, int64_t V, int64_t total, int64_t top_k, double top_p) {
  const int64_t k = top_k > 0 && top_k < V ? top_k : V;
  for (int64_t look = k < V ? k : std::min<int64_t>(V, 128);; look = std::min(V, look * 8)) {
    order(heavy, w, V, look);
    if (top_p >= 1) return k;
    if (k < V) {
      total = 0;
      for (int64_t i = 0; i < k; i++) total += heavy[i];
    }
    const double goal = top_p * double(total);
    int64_t reached = 0;
    for (int64_t i = 0; i < look; i++) {
      reached += heavy[i];
      if (double(reached) >= goal) return i + 1;
    }
    if (look >= k) return k;
  }
}

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
    int64_t threshold = 0, ties = V;  // weights above stay, and the first `ties` of equal ones
    if (top_k[r] > 0 || top_p[r] < 1) {
      int64_t* const heavy = w + V;
      const int64_t n = kept(heavy, w, V, total, top_k[r], top_p[r]);
      if (n < V) {
        threshold = heavy[n - 1];
        ties = n - (std::lower_bound(heavy, heavy + n, threshold, std::greater<int64_t>()) - heavy);
      }
    }
    const double least = double(min_p[r]) * double(largest);
    total = 0;
    for (int64_t i = 0; i < V; i++) {
      if (w[i] < threshold || (w[i] == threshold && ties-- <= 0) || double(w[i]) < least) w[i] = 0;
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
