// Rows of pinned host memory: checksums of many rows, and copies of many blocks, in one call that needs no Python.
// Contract in host_rows.py.
#include <time.h>

#include <cstddef>
#include <cstdint>

namespace {

// CUDA_MEMCPY2D of the driver's interface, written out: this file compiles without CUDA's headers.
struct Copy2D {
  struct Side {
    size_t x_bytes, y;
    unsigned memory_type;
    const void* host;
    uint64_t device;
    void* array;
    size_t pitch;
  } source, target;
  size_t width_bytes, height;
};
static_assert(sizeof(Copy2D) == 128, "the driver's layout");

constexpr unsigned UNIFIED = 4;  // CU_MEMORYTYPE_UNIFIED: the address says where it is
constexpr int64_t LANE = 512;    // words of 8 bytes that are added up before they are multiplied
constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15u;

constexpr int64_t NAP_NS = 50'000;  // Shorter sleeps end late: that is the kernel's timer slack.

struct Pages {
  int64_t address, layers, block_bytes, pitch_bytes;
};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

void sleep_until(int64_t ns) {
  const timespec t = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
}

}  // namespace

// sums[n] of rows[n], addresses of `lanes` * 4,096 bytes each; named[n] is what a row's digest adds.
extern "C" int checksum_rows(int64_t n, int64_t lanes, const int64_t* rows, const uint64_t* named, uint64_t* sums) {
  for (int64_t r = 0; r < n; r++) {
    const uint64_t* at = reinterpret_cast<const uint64_t*>(rows[r]);
    uint64_t sum = 0;
    for (int64_t lane = 0; lane < lanes; lane++, at += LANE) {
      uint64_t part = 0;
      for (int64_t i = 0; i < LANE; i++) part += at[i];
      sum += part * (uint64_t(2 * lane + 1) * FACTOR);
    }
    sums[r] = sum ^ named[r];
  }
  return 0;
}

// Queues copies between block blocks[n] of all caches and the row at rows[n], one each `block_ns` on average; the
// driver's error, or 0.
extern "C" int copy_rows(int (*copy_2d)(const Copy2D*, void*), void* stream, int64_t n, const int64_t* blocks,
                         const int64_t* rows, int64_t caches, const Pages* pages, int64_t largest_pitch, int64_t out,
                         int64_t block_ns) {
  const int64_t begin = block_ns ? now_ns() : 0;
  for (int64_t k = 0; k < n; k++) {
    int64_t host = rows[k];
    for (int64_t c = 0; c < caches; c++) {
      const Pages& p = pages[c];
      // Beyond the largest pitch a copy is as high as one layer.
      const bool whole = p.pitch_bytes <= largest_pitch;
      const int64_t height = whole ? p.layers : 1, pitch = whole ? p.pitch_bytes : largest_pitch;
      for (int64_t layer = 0; layer < p.layers; layer += height) {
        const uint64_t there = p.address + layer * p.pitch_bytes + blocks[k] * p.block_bytes;
        const uint64_t here = host + layer * p.block_bytes;
        Copy2D copy = {};
        copy.source.memory_type = copy.target.memory_type = UNIFIED;
        copy.source.device = out ? there : here;
        copy.source.pitch = out ? pitch : p.block_bytes;
        copy.target.device = out ? here : there;
        copy.target.pitch = out ? p.block_bytes : pitch;
        copy.width_bytes = p.block_bytes;
        copy.height = height;
        if (const int status = copy_2d(&copy, stream)) return status;
      }
      host += p.layers * p.block_bytes;
    }
    if (block_ns) {
      const int64_t due = begin + (k + 1) * block_ns;
      if (due - now_ns() > NAP_NS || k + 1 == n) sleep_until(due);
    }
  }
  return 0;
}
