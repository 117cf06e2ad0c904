// mla_absorbed and mla_decode on CPU. A context is split into at most SPLITS parts, so that one request keeps several
// threads busy; the split depends only on the context's length, so the result does not depend on the batch. A part is
// an online softmax over STEP positions at a time, so that their latents stay in the CPU's cache for all rows (token,
// head).
#include "cpp/per_head.h"

namespace {

constexpr int64_t SPLITS = 8, SHORTEST = 128;  // max parts of a request; min positions of a part
constexpr int64_t NONE = INT64_MIN;
constexpr int64_t STEP = 48;                   // a multiple of SMALL

struct Problem {
  const float *q_lat, *q_pe;
  int64_t ld_lat, ld_pe;  // floats from one (token, head) to the next
  const int32_t *tables, *query_start, *context;
  float* out;
  int64_t B, M, H, R, r, block_size;
  float scale;
  int64_t padding;  // rows of requests with this context are padding and not written; NONE: no padding
};

struct Piece {
  int64_t b, row, rows, first, last;  // request b: rows row .. row + rows - 1 at positions first .. last - 1
  float* partial;                     // [rows, R + 2]: sum, maximum, weight; null: the request has one part only
};

// A thread's part of the scratch memory.
struct Space {
  float *q, *scores, *acc, *latent;
  static int64_t floats(int64_t R, int64_t width) { return TILE * (width + STEP + R) + STEP * width; }
  Space(float* all, int64_t worker, int64_t R, int64_t width)
      : q(all + worker * floats(R, width)),
        scores(q + TILE * width),
        acc(scores + TILE * STEP),
        latent(acc + TILE * R) {}
};

template <int M, int V>
INLINE void add_values(const float* const* at, int64_t n, const float* scores, float* acc, int64_t R) {
  f8 a[M][V];
  for (int r = 0; r < M; r++)
    for (int v = 0; v < V; v++) a[r][v] = load(acc + r * R + v * 8);
  for (int64_t p = 0; p < n; p++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const f8 c = load(at[p] + v * 8);
#pragma GCC unroll 4
      for (int r = 0; r < M; r++) a[r][v] += splat(scores[r * STEP + p]) * c;
    }
  for (int r = 0; r < M; r++)
    for (int v = 0; v < V; v++) store(acc + r * R + v * 8, a[r][v]);
}

template <int M>
INLINE void add_values(const float* const* at, int64_t n, const float* scores, float* acc, int64_t R) {
  const float* moved[STEP];
  int64_t c = 0;
  for (; c + 16 <= R; c += 16) {
    for (int64_t p = 0; p < n; p++) moved[p] = at[p] + c;
    add_values<M, 2>(moved, n, scores, acc + c, R);
  }
  for (; c < R; c += 8) {
    for (int64_t p = 0; p < n; p++) moved[p] = at[p] + c;
    add_values<M, 1>(moved, n, scores, acc + c, R);
  }
}

template <class T>
void compute(const Problem& a, const T* cache, const Piece& piece, const Space& space) {
  const int64_t width = a.R + a.r, b = piece.b, rows = piece.rows;
  const int64_t begin = int64_t(a.query_start[b]) * a.H;
  const int64_t before = a.context[b] - (a.query_start[b + 1] - a.query_start[b]);  // tokens before the queries
  float* const q = space.q;
  float* const scores = space.scores;
  float* const acc = space.acc;
  float top[TILE], weight[TILE];
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = piece.row + r;
    for (int64_t k = 0; k < a.R; k += 8) store(q + r * width + k, load(a.q_lat + at * a.ld_lat + k) * a.scale);
    for (int64_t k = 0; k < a.r; k += 8) store(q + r * width + a.R + k, load(a.q_pe + at * a.ld_pe + k) * a.scale);
    top[r] = -INFINITY;
    weight[r] = 0;
  }
  memset(acc, 0, rows * a.R * sizeof(float));
  for (int64_t first = piece.first; first < piece.last; first += STEP) {
    const int64_t n = piece.last - first < STEP ? piece.last - first : STEP;
    const float* at[STEP];
    for (int64_t p = 0; p < n; p++) {
      const int64_t position = first + p, block = a.tables[b * a.M + position / a.block_size];
      const T* latent = cache + (block * a.block_size + position % a.block_size) * width;
      if constexpr (sizeof(T) == sizeof(float)) {
        at[p] = latent;
      } else {
        at[p] = space.latent + p * width;
        for (int64_t k = 0; k < width; k += 8) store(space.latent + p * width + k, load(latent + k));
      }
    }
    for (int64_t p = 0; p < n; p += SMALL) {
      float out[TILE][SMALL];
      const int64_t some = n - p < SMALL ? n - p : SMALL;
      tile_dots(Plain<float>{q, width}, 0, rows, at + p, some, out);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < some; t++) scores[r * STEP + p + t] = out[r][t];
    }
    for (int64_t r = 0; r < rows; r++) {
      float* const s = scores + r * STEP;
      const int64_t seen = before + (piece.row + r - begin) / a.H + 1 - first;  // positions this row may see
      for (int64_t p = seen < 0 ? 0 : seen; p < STEP; p++) s[p] = -INFINITY;
      for (int64_t p = n; p < STEP; p++) s[p] = -INFINITY;
      float most = top[r];
      for (int64_t p = 0; p < STEP; p++) most = s[p] > most ? s[p] : most;
      if (most == -INFINITY && seen <= 0) {  // nothing seen yet: exp(-inf - -inf) would be nan
        memset(s, 0, STEP * sizeof(float));
        continue;
      }
      const float shrink = expf(top[r] - most);
      f8 total = {};
      for (int64_t p = 0; p < STEP; p += 8) {
        const f8 e = exp8(load(s + p) - most);
        store(s + p, e);
        total += e;
      }
      weight[r] = weight[r] * shrink + sum(total);
      top[r] = most;
      if (shrink != 1.0f)
        for (int64_t k = 0; k < a.R; k += 8) store(acc + r * a.R + k, load(acc + r * a.R + k) * shrink);
    }
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) add_values<4>(at, n, scores + r * STEP, acc + r * a.R, a.R);
    for (; r < rows; r++) add_values<1>(at, n, scores + r * STEP, acc + r * a.R, a.R);
  }
  for (int64_t r = 0; r < rows; r++) {
    if (piece.partial == nullptr) {
      float* const to = a.out + (piece.row + r) * a.R;
      for (int64_t k = 0; k < a.R; k += 8) store(to + k, load(acc + r * a.R + k) / weight[r]);
    } else {
      float* const to = piece.partial + r * (a.R + 2);
      memcpy(to, acc + r * a.R, a.R * sizeof(float));
      to[a.R] = top[r];
      to[a.R + 1] = weight[r];
    }
  }
}

// Combines the parts of row `row`, which are `apart` floats apart, to its output.
void combine(const Problem& a, int64_t row, const float* parts, int64_t count, int64_t apart) {
  float top = -INFINITY, weight = 0;
  for (int64_t i = 0; i < count; i++) top = parts[i * apart + a.R] > top ? parts[i * apart + a.R] : top;
  float* const to = a.out + row * a.R;
  memset(to, 0, a.R * sizeof(float));
  for (int64_t i = 0; i < count; i++) {
    const float* const part = parts + i * apart;
    // A part without a visible position has maximum -inf and share 0. NaN propagates.
    const float share = expf(part[a.R] - top);
    weight += part[a.R + 1] * share;
    for (int64_t k = 0; k < a.R; k += 8) store(to + k, load(to + k) + load(part + k) * share);
  }
  for (int64_t k = 0; k < a.R; k += 8) store(to + k, load(to + k) / weight);
}

int64_t part_length(int64_t context) {
  const int64_t even = (context + SPLITS - 1) / SPLITS;
  return even < SHORTEST ? SHORTEST : even;
}

template <class T>
int run(const Problem& a, const T* cache, int64_t blocks, int64_t threads) {
  int64_t pieces = 0, partials = 0;
  for (int64_t b = 0; b < a.B; b++) {
    const int64_t count = a.query_start[b + 1] - a.query_start[b], context = a.context[b];
    if (count < 0 || (count > 0 && context != a.padding && (context < count || context > a.M * a.block_size))) return 2;
    if (count == 0 || context == a.padding) continue;
    for (int64_t i = 0; i * a.block_size < context; i++)
      if (a.tables[b * a.M + i] < 0 || a.tables[b * a.M + i] >= blocks) return 1;
    const int64_t parts = (context + part_length(context) - 1) / part_length(context);
    pieces += parts * ((count * a.H + TILE - 1) / TILE);
    if (parts > 1) partials += parts * count * a.H;
  }
  Piece* const work = static_cast<Piece*>(malloc(pieces * sizeof(Piece) + 1));
  if (work == nullptr) abort();
  Scratch partial(partials * (a.R + 2));
  float* next = partial.data;
  int64_t filled = 0, cost = 0;
  for (int64_t b = 0; b < a.B; b++) {
    const int64_t rows = (a.query_start[b + 1] - a.query_start[b]) * a.H, context = a.context[b];
    if (rows == 0 || context == a.padding) continue;
    const int64_t length = part_length(context);
    cost += rows * context * (2 * a.R + a.r);
    for (int64_t first = 0; first < context; first += length) {
      const int64_t last = first + length < context ? first + length : context;
      for (int64_t row = 0; row < rows; row += TILE)
        work[filled++] = {b, a.query_start[b] * a.H + row, rows - row < TILE ? rows - row : TILE, first, last,
                          length < context ? next + row * (a.R + 2) : nullptr};
      if (length < context) next += rows * (a.R + 2);
    }
  }
  if (cost <= PARALLEL) threads = 1;
  const Scratch space(threads * Space::floats(a.R, a.R + a.r));
  share(pieces, threads, [&](int64_t i, int worker) {
    compute(a, cache, work[i], Space(space.data, worker, a.R, a.R + a.r));
  });
  // The pieces of a request are adjacent, those of its first part first.
  for (int64_t i = 0; i < pieces; i++) {
    const Piece& p = work[i];
    if (p.partial == nullptr || p.first != 0) continue;
    const int64_t rows = (a.query_start[p.b + 1] - a.query_start[p.b]) * a.H, length = p.last;
    const int64_t parts = (a.context[p.b] + length - 1) / length;
    for (int64_t r = 0; r < p.rows; r++)
      combine(a, p.row + r, p.partial + r * (a.R + 2), parts, rows * (a.R + 2));
  }
  free(work);
  return 0;
}

template <class C>
int decode(const float* q_full, const C* cache, const int32_t* tables, const int32_t* query_start,
           const int32_t* context, const float* w_uv, float* out, int64_t T, int64_t B, int64_t M, int64_t H, int64_t R,
           int64_t r, int64_t v, int64_t blocks, int64_t block_size, int64_t threads, float scale) {
  if (query_start[0] != 0 || query_start[B] > T) return 2;
  const Scratch latent(T * H * R);
  const int failed = run(Problem{q_full, q_full + R, R + r, R + r, tables, query_start, context, latent.data, B, M, H,
                                 R, r, block_size, scale, 0},
                         cache, blocks, threads);
  if (failed) return failed;
  bool whole = query_start[B] == T;
  for (int64_t b = 0; b < B; b++) whole = whole && context[b] > 0;
  if (!whole) {  // write zeros to padding rows: a product with NaN weights would be NaN
    memset(out, 0, T * H * v * sizeof(float));
    for (int64_t b = 0; b < B; b++) {
      const int64_t first = query_start[b] * H, count = query_start[b + 1] - query_start[b];
      if (context[b] > 0)
        heads_matmul(latent.data + first * R, H * R, R, w_uv, out + first * v, v, count, H, R, v, threads);
    }
    return 0;
  }
  heads_matmul(latent.data, H * R, R, w_uv, out, v, T, H, R, v, threads);
  return 0;
}

}  // namespace

API mla_absorbed_f32(const float* q_lat, const float* q_pe, const float* cache, const int32_t* tables,
                     const int32_t* query_start, const int32_t* context, float* out, int64_t B, int64_t M, int64_t H,
                     int64_t R, int64_t r, int64_t blocks, int64_t block_size, int64_t threads, float scale) {
  return run(Problem{q_lat, q_pe, R, r, tables, query_start, context, out, B, M, H, R, r, block_size, scale, NONE},
             cache, blocks, threads);
}

API mla_absorbed_bf16(const float* q_lat, const float* q_pe, const bf16* cache, const int32_t* tables,
                      const int32_t* query_start, const int32_t* context, float* out, int64_t B, int64_t M, int64_t H,
                      int64_t R, int64_t r, int64_t blocks, int64_t block_size, int64_t threads, float scale) {
  return run(Problem{q_lat, q_pe, R, r, tables, query_start, context, out, B, M, H, R, r, block_size, scale, NONE},
             cache, blocks, threads);
}

API mla_decode_f32(const float* q_full, const float* cache, const int32_t* tables, const int32_t* query_start,
                   const int32_t* context, const float* w_uv, float* out, int64_t T, int64_t B, int64_t M, int64_t H,
                   int64_t R, int64_t r, int64_t v, int64_t blocks, int64_t block_size, int64_t threads, float scale) {
  return decode(q_full, cache, tables, query_start, context, w_uv, out, T, B, M, H, R, r, v, blocks, block_size,
                threads, scale);
}

API mla_decode_bf16(const float* q_full, const bf16* cache, const int32_t* tables, const int32_t* query_start,
                    const int32_t* context, const float* w_uv, float* out, int64_t T, int64_t B, int64_t M, int64_t H,
                    int64_t R, int64_t r, int64_t v, int64_t blocks, int64_t block_size, int64_t threads, float scale) {
  return decode(q_full, cache, tables, query_start, context, w_uv, out, T, B, M, H, R, r, v, blocks, block_size,
                threads, scale);
}
