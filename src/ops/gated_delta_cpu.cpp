#include "ops/gated_delta_cpu.h"

#include <algorithm>
#include <cmath>

#include "ops/gated_delta_chunks.h"

// One body, compiled three times: every function that is not an entry is inlined into the entries,
// which say what instructions they may use.
#define ZORRO_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__)
#define ZORRO_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define ZORRO_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace zorro::gated_delta {
namespace {

constexpr int64_t kC = kChunk;
constexpr int64_t kDecayBlock = 16;

/// c [m, n] (+)= sign * a b; a(i, k) at a[i * a_row + k * a_col], b and c row-major.
template <int kRows, typename T>
ZORRO_INLINE void multiply_tile(int64_t depth, const T* a, int64_t a_row, int64_t a_col, const T* b,
                                int64_t b_row, T* c, int64_t c_row, T sign, bool add) {
  using Vector __attribute__((vector_size(64), aligned(sizeof(T)), may_alias)) = T;
  constexpr int64_t kLanes = 64 / static_cast<int64_t>(sizeof(T));
  Vector low[kRows] = {}, high[kRows] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Vector right_low = *reinterpret_cast<const Vector*>(b + k * b_row);
    const Vector right_high = *reinterpret_cast<const Vector*>(b + k * b_row + kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const T left = a[i * a_row + k * a_col];
      low[i] += left * right_low;
      high[i] += left * right_high;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    auto* to = reinterpret_cast<Vector*>(c + i * c_row);
    auto* next = reinterpret_cast<Vector*>(c + i * c_row + kLanes);
    *to = add ? *to + sign * low[i] : sign * low[i];
    *next = add ? *next + sign * high[i] : sign * high[i];
  }
}

template <typename T>
ZORRO_INLINE void multiply_body(int64_t m, int64_t n, int64_t depth, const T* a, int64_t a_row,
                                int64_t a_col, const T* b, int64_t b_row, T* c, int64_t c_row,
                                T sign, bool add) {
  constexpr int64_t kTile = 128 / static_cast<int64_t>(sizeof(T));
  constexpr int kRows = 6;
  int64_t column = 0;
  for (; column + kTile <= n; column += kTile) {
    int64_t row = 0;
    for (; row + kRows <= m; row += kRows)
      multiply_tile<kRows>(depth, a + row * a_row, a_row, a_col, b + column, b_row,
                           c + row * c_row + column, c_row, sign, add);
    for (; row < m; ++row)
      multiply_tile<1>(depth, a + row * a_row, a_row, a_col, b + column, b_row,
                       c + row * c_row + column, c_row, sign, add);
  }
  const int64_t left_over = std::min(n - column, kTile);  // columns that fill no tile
  if (left_over == 0) return;
  for (int64_t row = 0; row < m; ++row) {
    T sum[kTile] = {};
    for (int64_t k = 0; k < depth; ++k) {
      const T left = a[row * a_row + k * a_col];
      for (int64_t j = 0; j < left_over; ++j) sum[j] += left * b[k * b_row + column + j];
    }
    T* to = c + row * c_row + column;
    for (int64_t j = 0; j < left_over; ++j) to[j] = (add ? to[j] : T{0}) + sign * sum[j];
  }
}

// The product is a function of its own for each instruction set; what stands around it is inlined
// into the entries.
#define ZORRO_MULTIPLY(Name, target)                                                            \
  struct Name {                                                                                 \
    template <typename T>                                                                       \
    target static void multiply(int64_t m, int64_t n, int64_t depth, const T* a, int64_t a_row, \
                                int64_t a_col, const T* b, int64_t b_row, T* c, int64_t c_row,  \
                                T sign, bool add) {                                             \
      multiply_body(m, n, depth, a, a_row, a_col, b, b_row, c, c_row, sign, add);               \
    }                                                                                           \
  };
ZORRO_MULTIPLY(Baseline, )
#if defined(__x86_64__)
ZORRO_MULTIPLY(Avx2, ZORRO_TARGET_AVX2)
ZORRO_MULTIPLY(Avx512, ZORRO_TARGET_AVX512)
#endif
#undef ZORRO_MULTIPLY

/// x <- (I + A)^-1 x, A [n, n] strictly lower with rows of kC; by blocks of rows from above.
template <typename Kernel, typename T>
ZORRO_INLINE void solve_lower(int64_t n, int64_t columns, const T* a, T* x) {
  constexpr int64_t kBlock = 8;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(first + kBlock, n);
    if (first > 0)
      Kernel::template multiply<T>(last - first, columns, first, a + first * kC, kC, 1, x, columns,
                                   x + first * columns, columns, T{-1}, true);
    for (int64_t i = first + 1; i < last; ++i)
      for (int64_t j = first; j < i; ++j) {
        const T weight = a[i * kC + j];
        for (int64_t c = 0; c < columns; ++c) x[i * columns + c] -= weight * x[j * columns + c];
      }
  }
}

/// x <- (I + A)^-T x, from below.
template <typename Kernel, typename T>
ZORRO_INLINE void solve_upper(int64_t n, int64_t columns, const T* a, T* x) {
  constexpr int64_t kBlock = 8;
  for (int64_t first = (n - 1) / kBlock * kBlock; first >= 0; first -= kBlock) {
    const int64_t last = std::min(first + kBlock, n);
    if (last < n)
      Kernel::template multiply<T>(last - first, columns, n - last, a + last * kC + first, 1, kC,
                                   x + last * columns, columns, x + first * columns, columns, T{-1},
                                   true);
    for (int64_t i = last - 2; i >= first; --i)
      for (int64_t j = i + 1; j < last; ++j) {
        const T weight = a[j * kC + i];
        for (int64_t c = 0; c < columns; ++c) x[i * columns + c] -= weight * x[j * columns + c];
      }
  }
}

template <typename T>
ZORRO_INLINE void transpose(const T* from, int64_t rows, int64_t columns, int64_t from_row, T* to,
                            int64_t to_row) {
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) to[j * to_row + i] = from[i * from_row + j];
}

/// Takes memory from a thread's scratch; without one it only counts.
template <typename T>
struct Arena {
  T* base;
  int64_t used = 0;
  ZORRO_INLINE T* take(int64_t count) {
    T* mine = base == nullptr ? nullptr : base + used;
    used += (count + 15) / 16 * 16;
    return mine;
  }
};

/// What both passes compute of a chunk before they know the state.
template <typename T>
struct Chunk {
  int64_t n = 0;
  T *q, *k, *v;                    // [n, dk], [n, dk], [n, dv]
  T *beta, *gamma, *grown, *rest;  // [kC]
  T *decay, *gram, *scores, *a;    // [kC, kC]
  T* x;                            // [n, dv + dk] U and W
  T* k_transposed;                 // [dk, kC], zero past n
  T* delta;                        // [n, dv]

  ZORRO_INLINE void allocate(Arena<T>& arena, int64_t dk, int64_t dv) {
    q = arena.take(kC * dk), k = arena.take(kC * dk), v = arena.take(kC * dv);
    beta = arena.take(kC), gamma = arena.take(kC), grown = arena.take(kC), rest = arena.take(kC);
    decay = arena.take(kC * kC), gram = arena.take(kC * kC), scores = arena.take(kC * kC);
    a = arena.take(kC * kC);
    x = arena.take(kC * (dv + dk));
    k_transposed = arena.take(dk * kC);
    delta = arena.take(kC * dv);
  }

  template <typename Head>
  ZORRO_INLINE void load(const Head& head, int64_t begin) {
    n = std::min(kC, head.end - begin);
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t t = begin + i;
      std::copy_n(head.q.data + t * head.q.stride, head.dk, q + i * head.dk);
      std::copy_n(head.k.data + t * head.k.stride, head.dk, k + i * head.dk);
      std::copy_n(head.v.data + t * head.v.stride, head.dv, v + i * head.dv);
      beta[i] = head.beta.data[t * head.beta.stride];
      sum += head.g.data[t * head.g.stride];
      gamma[i] = sum;
    }
    for (int64_t i = 0; i < n; ++i) {
      grown[i] = std::exp(gamma[i]);
      rest[i] = std::exp(gamma[n - 1] - gamma[i]);
    }
  }

  /// exp(gamma_i - gamma_j) for j <= i, else 0. Far from the diagonal the product of two factors
  /// that are at most 1, so that it needs few exponentials and none overflows.
  ZORRO_INLINE void fill_decay() {
    T left[kC];
    for (int64_t block = 0; block < kC / kDecayBlock; ++block) {
      const int64_t first = block * kDecayBlock, last = std::min(first + kDecayBlock, n);
      if (first >= n) break;
      const T base = first > 0 ? gamma[first - 1] : T{0};
      for (int64_t j = 0; j < first; ++j) left[j] = std::exp(base - gamma[j]);
      for (int64_t i = first; i < last; ++i) {
        T* row = decay + i * kC;
        const T right = std::exp(gamma[i] - base);
        for (int64_t j = 0; j < first; ++j) row[j] = right * left[j];
        for (int64_t j = first; j <= i; ++j) row[j] = std::exp(gamma[i] - gamma[j]);
        for (int64_t j = i + 1; j < kC; ++j) row[j] = 0;
      }
    }
  }

  template <typename Kernel, typename Head>
  ZORRO_INLINE void prepare(const Head& head) {
    const int64_t dk = head.dk, dv = head.dv, columns = dv + dk;
    fill_decay();
    for (int64_t j = 0; j < dk; ++j) {
      T* row = k_transposed + j * kC;
      for (int64_t i = 0; i < n; ++i) row[i] = k[i * dk + j];
      for (int64_t i = n; i < kC; ++i) row[i] = 0;
    }
    Kernel::template multiply<T>(n, kC, dk, k, dk, 1, k_transposed, kC, gram, kC, T{1}, false);
    Kernel::template multiply<T>(n, kC, dk, q, dk, 1, k_transposed, kC, scores, kC, T{1}, false);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < kC; ++j) {
        const int64_t at = i * kC + j;
        scores[at] *= decay[at];
        a[at] = j < i ? beta[i] * gram[at] * decay[at] : T{0};
      }
    for (int64_t i = 0; i < n; ++i) {
      T* row = x + i * columns;
      for (int64_t j = 0; j < dv; ++j) row[j] = beta[i] * v[i * dv + j];
      const T scale = beta[i] * grown[i];
      for (int64_t j = 0; j < dk; ++j) row[dv + j] = scale * k[i * dk + j];
    }
    solve_lower<Kernel, T>(n, columns, a, x);
  }

  /// delta = U - W S
  template <typename Kernel, typename Head>
  ZORRO_INLINE void correct(const Head& head, const T* state) {
    const int64_t columns = head.dv + head.dk;
    for (int64_t i = 0; i < n; ++i) std::copy_n(x + i * columns, head.dv, delta + i * head.dv);
    Kernel::template multiply<T>(n, head.dv, head.dk, x + head.dv, columns, 1, state, head.dv,
                                 delta, head.dv, T{-1}, true);
  }
};

template <typename Kernel, typename T>
ZORRO_INLINE void forward_body(const HeadForward<T>& head, T* scratch) {
  const int64_t dk = head.dk, dv = head.dv;
  Arena<T> arena{scratch};
  Chunk<T> chunk;
  chunk.allocate(arena, dk, dv);
  T* rows = arena.take(kC * dk);
  T* out = arena.take(kC * dv);
  int64_t index = 0;
  for (int64_t begin = head.begin; begin < head.end; begin += kC, ++index) {
    chunk.load(head, begin);
    chunk.template prepare<Kernel>(head);
    std::copy_n(head.state, dk * dv, head.chunk_states + head.chunk_offset[index]);
    chunk.template correct<Kernel>(head, head.state);
    const int64_t n = chunk.n;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < dk; ++j) rows[i * dk + j] = chunk.grown[i] * chunk.q[i * dk + j];
    Kernel::template multiply<T>(n, dv, dk, rows, dk, 1, head.state, dv, out, dv, T{1}, false);
    Kernel::template multiply<T>(n, dv, n, chunk.scores, kC, 1, chunk.delta, dv, out, dv, T{1},
                                 true);
    for (int64_t i = 0; i < n; ++i) {
      std::copy_n(out + i * dv, dv, head.out.data + (begin + i) * head.out.stride);
      for (int64_t j = 0; j < dk; ++j) rows[i * dk + j] = chunk.rest[i] * chunk.k[i * dk + j];
    }
    const T last = chunk.grown[n - 1];
    for (int64_t i = 0; i < dk * dv; ++i) head.state[i] *= last;
    Kernel::template multiply<T>(dk, dv, n, rows, 1, dk, chunk.delta, dv, head.state, dv, T{1},
                                 true);
  }
}

template <typename T>
ZORRO_INLINE T dot(const T* a, const T* b, int64_t count) {
  constexpr int64_t kParts = 16;  // independent sums, so that they may run side by side
  T parts[kParts] = {};
  int64_t i = 0;
  for (; i + kParts <= count; i += kParts)
    for (int64_t lane = 0; lane < kParts; ++lane) parts[lane] += a[i + lane] * b[i + lane];
  T sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (const T part : parts) sum += part;
  return sum;
}

/// The gradients of one chunk on their way out.
template <typename T>
struct ChunkGradients {
  T *kept, *asked, *d_out;  // rest o k, grown o q, upstream
  T* y;                     // [n, dv + dk] of delta and W, then solved
  T* flipped;               // a transposed operand
  T *d_asked, *d_kept;
  T *d_scores, *d_a, *d_log;  // [kC, kC]
  T *d_q, *d_k, *d_gamma;
  T through_last;  // of exp(gamma of the last row)

  ZORRO_INLINE void allocate(Arena<T>& arena, int64_t dk, int64_t dv) {
    const int64_t columns = dv + dk;
    kept = arena.take(kC * dk), asked = arena.take(kC * dk), d_out = arena.take(kC * dv);
    y = arena.take(kC * columns);
    flipped = arena.take(columns * std::max({kC, dk, dv}));
    d_asked = arena.take(kC * dk), d_kept = arena.take(kC * dk);
    d_scores = arena.take(kC * kC), d_a = arena.take(kC * kC), d_log = arena.take(kC * kC);
    d_q = arena.take(kC * dk), d_k = arena.take(kC * dk), d_gamma = arena.take(kC);
  }

  ZORRO_INLINE void load(const HeadBackward<T>& head, const Chunk<T>& c, int64_t begin) {
    for (int64_t i = 0; i < c.n; ++i) {
      std::copy_n(head.d_out.data + (begin + i) * head.d_out.stride, head.dv, d_out + i * head.dv);
      for (int64_t j = i * head.dk; j < (i + 1) * head.dk; ++j) {
        kept[j] = c.rest[i] * c.k[j];
        asked[j] = c.grown[i] * c.q[j];
      }
    }
  }

  /// y = [d_delta | d_w], what reaches q and k through the states, and the state before the chunk.
  template <typename Kernel>
  ZORRO_INLINE void against_time(const HeadBackward<T>& head, const Chunk<T>& c, const T* state) {
    const int64_t dk = head.dk, dv = head.dv, columns = dv + dk, n = c.n;
    Kernel::template multiply<T>(n, dv, n, c.scores, 1, kC, d_out, dv, y, columns, T{1}, false);
    Kernel::template multiply<T>(n, dv, dk, kept, dk, 1, head.d_state, dv, y, columns, T{1}, true);
    transpose(state, dk, dv, dv, flipped, dk);  // [dv, dk]
    Kernel::template multiply<T>(n, dk, dv, y, columns, 1, flipped, dk, y + dv, columns, T{-1},
                                 false);
    Kernel::template multiply<T>(n, dk, dv, d_out, dv, 1, flipped, dk, d_asked, dk, T{1}, false);
    transpose(head.d_state, dk, dv, dv, flipped, dk);
    Kernel::template multiply<T>(n, dk, dv, c.delta, dv, 1, flipped, dk, d_kept, dk, T{1}, false);
    const T last = c.grown[n - 1];
    through_last = dot<T>(state, head.d_state, dk * dv) * last;
    for (int64_t i = 0; i < dk * dv; ++i) head.d_state[i] *= last;
    Kernel::template multiply<T>(dk, dv, n, asked, 1, dk, d_out, dv, head.d_state, dv, T{1}, true);
    Kernel::template multiply<T>(dk, dv, n, c.x + dv, 1, columns, y, columns, head.d_state, dv,
                                 T{-1}, true);
  }

  /// d_scores before the decay, y solved, d_a.
  template <typename Kernel>
  ZORRO_INLINE void through_solve(const HeadBackward<T>& head, const Chunk<T>& c) {
    const int64_t dv = head.dv, columns = dv + head.dk, n = c.n;
    flip(c.delta, dv, n);
    Kernel::template multiply<T>(n, kC, dv, d_out, dv, 1, flipped, kC, d_scores, kC, T{1}, false);
    solve_upper<Kernel, T>(n, columns, c.a, y);
    flip(c.x, columns, n);
    Kernel::template multiply<T>(n, kC, columns, y, columns, 1, flipped, kC, d_a, kC, T{-1}, false);
  }

  /// flipped = from^T [columns, kC], zero past n.
  ZORRO_INLINE void flip(const T* from, int64_t columns, int64_t n) {
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = 0; i < n; ++i) flipped[j * kC + i] = from[i * columns + j];
      for (int64_t i = n; i < kC; ++i) flipped[j * kC + i] = 0;
    }
  }

  /// Row i of the triangles: d_a becomes that of the Gram matrix, d_scores that of Q K^T. Returns
  /// what reaches beta.
  ZORRO_INLINE T triangle_row(const Chunk<T>& c, int64_t i) {
    T of_beta = 0, row_sum = 0;
    for (int64_t j = 0; j < kC; ++j) {
      const int64_t at = i * kC + j;
      const T decayed = j < i ? d_a[at] * c.decay[at] : T{0};
      of_beta += decayed * c.gram[at];
      d_a[at] = decayed * c.beta[i];
      d_log[at] = d_scores[at] * c.scores[at] + d_a[at] * c.gram[at];
      d_scores[at] *= c.decay[at];
    }
    for (int64_t j = 0; j <= i; ++j) {
      row_sum += d_log[i * kC + j];
      d_gamma[j] -= d_log[i * kC + j];
    }
    d_gamma[i] += row_sum;
    return of_beta;
  }

  ZORRO_INLINE void rows(const HeadBackward<T>& head, const Chunk<T>& c, int64_t begin) {
    const int64_t dk = head.dk, dv = head.dv, columns = dv + dk, n = c.n;
    std::fill_n(d_gamma, n, T{0});
    for (int64_t i = 0; i < n; ++i) {
      const T of_beta = triangle_row(c, i);
      const T *y_u = y + i * columns, *y_w = y_u + dv;
      const T of_w = dot<T>(c.k + i * dk, y_w, dk);
      const T of_rest = dot<T>(c.k + i * dk, d_kept + i * dk, dk) * c.rest[i];
      const T of_asked = dot<T>(c.q + i * dk, d_asked + i * dk, dk);
      const int64_t t = begin + i;
      head.d_beta.data[t * head.d_beta.stride] =
          dot<T>(c.v + i * dv, y_u, dv) + of_w * c.grown[i] + of_beta;
      d_gamma[i] += (of_asked + of_w * c.beta[i]) * c.grown[i] - of_rest;
      d_gamma[n - 1] += of_rest;
      T* d_v = head.d_v.data + t * head.d_v.stride;
      for (int64_t j = 0; j < dv; ++j) d_v[j] = c.beta[i] * y_u[j];
      const T scale = c.beta[i] * c.grown[i];
      for (int64_t j = 0; j < dk; ++j) {
        d_q[i * dk + j] = d_asked[i * dk + j] * c.grown[i];
        d_k[i * dk + j] = d_kept[i * dk + j] * c.rest[i] + scale * y_w[j];
      }
    }
    d_gamma[n - 1] += through_last;
  }

  template <typename Kernel>
  ZORRO_INLINE void store(const HeadBackward<T>& head, const Chunk<T>& c, int64_t begin) {
    const int64_t dk = head.dk, n = c.n;
    Kernel::template multiply<T>(n, dk, n, d_scores, kC, 1, c.k, dk, d_q, dk, T{1}, true);
    Kernel::template multiply<T>(n, dk, n, d_scores, 1, kC, c.q, dk, d_k, dk, T{1}, true);
    Kernel::template multiply<T>(n, dk, n, d_a, kC, 1, c.k, dk, d_k, dk, T{1}, true);
    Kernel::template multiply<T>(n, dk, n, d_a, 1, kC, c.k, dk, d_k, dk, T{1}, true);
    T sum = 0;
    for (int64_t i = n; i-- > 0;) {
      const int64_t t = begin + i;
      sum += d_gamma[i];
      head.d_g.data[t * head.d_g.stride] = sum;
      std::copy_n(d_q + i * dk, dk, head.d_q.data + t * head.d_q.stride);
      std::copy_n(d_k + i * dk, dk, head.d_k.data + t * head.d_k.stride);
    }
  }
};

template <typename Kernel, typename T>
ZORRO_INLINE void backward_body(const HeadBackward<T>& head, T* scratch) {
  Arena<T> arena{scratch};
  Chunk<T> chunk;
  chunk.allocate(arena, head.dk, head.dv);
  ChunkGradients<T> d;
  d.allocate(arena, head.dk, head.dv);
  for (int64_t index = (head.end - head.begin - 1) / kC; index >= 0; --index) {
    const int64_t begin = head.begin + index * kC;
    const T* state = head.chunk_states + head.chunk_offset[index];
    chunk.load(head, begin);
    chunk.template prepare<Kernel>(head);
    chunk.template correct<Kernel>(head, state);
    d.load(head, chunk, begin);
    d.template against_time<Kernel>(head, chunk, state);
    d.template through_solve<Kernel>(head, chunk);
    d.rows(head, chunk, begin);
    d.template store<Kernel>(head, chunk, begin);
  }
}

#if defined(__x86_64__)
template <typename T>
ZORRO_TARGET_AVX2 void forward_avx2(const HeadForward<T>& head, T* scratch) {
  forward_body<Avx2>(head, scratch);
}
template <typename T>
ZORRO_TARGET_AVX512 void forward_avx512(const HeadForward<T>& head, T* scratch) {
  forward_body<Avx512>(head, scratch);
}
template <typename T>
ZORRO_TARGET_AVX2 void backward_avx2(const HeadBackward<T>& head, T* scratch) {
  backward_body<Avx2>(head, scratch);
}
template <typename T>
ZORRO_TARGET_AVX512 void backward_avx512(const HeadBackward<T>& head, T* scratch) {
  backward_body<Avx512>(head, scratch);
}
#endif

}  // namespace

int64_t scratch_size(int64_t dk, int64_t dv) {
  Arena<float> arena{nullptr};  // the backward pass takes more than the forward one
  Chunk<float>().allocate(arena, dk, dv);
  ChunkGradients<float>().allocate(arena, dk, dv);
  return arena.used;
}

template <typename T>
void forward_head(const HeadForward<T>& head, T* scratch, Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return forward_avx512(head, scratch);
  if (isa == Isa::kAvx2) return forward_avx2(head, scratch);
#endif
  forward_body<Baseline>(head, scratch);
}

template <typename T>
void backward_head(const HeadBackward<T>& head, T* scratch, Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return backward_avx512(head, scratch);
  if (isa == Isa::kAvx2) return backward_avx2(head, scratch);
#endif
  backward_body<Baseline>(head, scratch);
}

template void forward_head(const HeadForward<float>&, float*, Isa);
template void forward_head(const HeadForward<double>&, double*, Isa);
template void backward_head(const HeadBackward<float>&, float*, Isa);
template void backward_head(const HeadBackward<double>&, double*, Isa);

}  // namespace zorro::gated_delta
