// Many rows of host memory, or a file, in one call that needs no Python. Contract in host_rows.py.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
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

constexpr unsigned UNIFIED = 4;  // CU_MEMORYTYPE_UNIFIED
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

enum Found : int64_t { SHORTER = -1, NOT_REGULAR = -2 };  // instead of a file's size

// Whether the file's first page is in the page cache. A non-blocking read would start readahead, and O_DIRECT would
// then read the same data again.
bool begins_in_cache(int file) {
  void* page = mmap(nullptr, 1, PROT_READ, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) return false;
  unsigned char resident = 0;
  const bool known = mincore(page, 1, &resident) == 0;
  munmap(page, 1);
  return known && (resident & 1);
}

// Reads `total` bytes of the file into both ranges. Returns 0, an error number, or SHORTER. Bypasses the page cache, if
// the file system and the addresses allow it, unless the cache has the whole file.
int64_t fill(int file, const iovec (&ranges)[2], int64_t total) {
  if (begins_in_cache(file) && preadv2(file, ranges, 2, 0, RWF_NOWAIT) == total) return 0;
  const int flags = fcntl(file, F_GETFL);
  for (int way = 0; way < 2; way++) {
    const bool direct = way == 0;
    if (fcntl(file, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT)) {
      if (direct && errno == EINVAL) continue;
      return errno;
    }
    for (int64_t done = 0; done < total;) {
      iovec rest[2] = {ranges[0], ranges[1]};
      const bool begun = done >= static_cast<int64_t>(ranges[0].iov_len);
      iovec& first = rest[begun];
      const int64_t skip = done - (begun ? ranges[0].iov_len : 0);
      first = {static_cast<char*>(first.iov_base) + skip, first.iov_len - skip};
      const ssize_t count = preadv(file, &first, begun ? 1 : 2, done);
      if (count > 0) {
        done += count;
      } else if (!count) {
        return SHORTER;
      } else if (direct && errno == EINVAL) {
        break;
      } else if (errno != EINTR) {
        return errno;
      }
      if (done == total) return 0;
    }
  }
  return EIO;  // not reached: the second way returns
}

}  // namespace

// Reads a regular file that is as long as header and payload together into both, and sets its modification time to now.
// Returns an error number, or 0: then *size is the file's size or a `Found`.
extern "C" int read_file(const char* path, void* header, int64_t header_bytes, void* payload, int64_t payload_bytes,
                         int64_t* size) {
  struct stat status;
  *size = NOT_REGULAR;
  if (stat(path, &status)) return errno;
  if (!S_ISREG(status.st_mode)) return 0;  // opening a device may act
  // Something else may have taken the name since: O_NONBLOCK keeps the open of a FIFO from waiting.
  const int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return errno;
  int error = fstat(file, &status) ? errno : 0;
  if (!error && S_ISREG(status.st_mode)) {
    *size = status.st_size;
    const int64_t total = header_bytes + payload_bytes;
    if (*size == total) {
      const iovec ranges[2] = {{header, static_cast<size_t>(header_bytes)}, {payload, static_cast<size_t>(payload_bytes)}};
      const int64_t found = fill(file, ranges, total);
      if (found == SHORTER) *size = SHORTER;
      error = found > 0 ? static_cast<int>(found) : 0;
      if (!found) futimens(file, nullptr);  // an error only leaves the block's age wrong
    }
  }
  close(file);
  return error;
}

// sums[n] = named[n] ^ the checksum of the `lanes` * 4,096 bytes at address rows[n]. named[n]: from the block's digest.
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

// Queues copies between block blocks[n] of all caches and the row at rows[n], one block per `block_ns` on average.
// Returns the driver's error, or 0.
extern "C" int copy_rows(int (*copy_2d)(const Copy2D*, void*), void* stream, int64_t n, const int64_t* blocks,
                         const int64_t* rows, int64_t caches, const Pages* pages, int64_t largest_pitch, int64_t out,
                         int64_t block_ns) {
  const int64_t begin = block_ns ? now_ns() : 0;
  for (int64_t k = 0; k < n; k++) {
    int64_t host = rows[k];
    for (int64_t c = 0; c < caches; c++) {
      const Pages& p = pages[c];
      // Above the largest pitch, a copy has one layer.
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
