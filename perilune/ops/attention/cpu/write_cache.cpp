// write_cache on CPU. All slots are checked before anything is written.
#include "cpp/vec.h"

API write_cache(char* cache, int64_t rows, const char* c, const char* k_pe, const int64_t* slots, int64_t T,
             int64_t c_bytes, int64_t k_bytes) {
  for (int64_t t = 0; t < T; t++)
    if (slots[t] < 0 || slots[t] >= rows) return 1;
  for (int64_t t = 0; t < T; t++) {
    char* const to = cache + slots[t] * (c_bytes + k_bytes);
    memcpy(to, c + t * c_bytes, c_bytes);
    memcpy(to + c_bytes, k_pe + t * k_bytes, k_bytes);
  }
  return 0;
}
