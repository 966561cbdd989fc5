#include "ops/linear_logprob_rows.h"

#include <cmath>
#include <numbers>

// Without this GCC keeps a branch for every comparison that may raise a floating-point exception
// flag, and then does not vectorise. Nobody reads the flags; values are unchanged.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

namespace zorro::head {
namespace {

// The bodies are inlined into one function per instruction set, so that each is vectorised for its
// own; they call no inline function of the standard library or ATen, of which the linker might keep
// a copy for the wrong machine.
#define ZORRO_INLINE inline __attribute__((always_inline))
#define ZORRO_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define ZORRO_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

constexpr int64_t kBlock =
    512;  // logits a pass, so that the passes of a block find it in the first cache

template <typename T>
struct Exp;

template <>
struct Exp<float> {
  using Bits = uint32_t;
  static constexpr int kDegree = 7;
  static constexpr int kMantissa = 23;
  static constexpr float kLowest = -87.0F;         // below: 0, above: a normal number
  static constexpr float kRounder = 12582912.0F;   // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 355.0F / 512;  // few bits, so that n * kLn2High is exact
  static constexpr float kLn2Low = -2.12194440e-4F;
};

template <>
struct Exp<double> {
  using Bits = uint64_t;
  static constexpr int kDegree = 13;
  static constexpr int kMantissa = 52;
  static constexpr double kLowest = -708.0;
  static constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 22713.0 / 32768;
  static constexpr double kLn2Low = 1.42860682030941723212e-6;
};

constexpr double inverse_factorial(int k) { return k < 2 ? 1.0 : inverse_factorial(k - 1) / k; }

template <typename T, int k>
ZORRO_INLINE T series(T r) {
  constexpr T kCoefficient = static_cast<T>(inverse_factorial(k));
  if constexpr (k == Exp<T>::kDegree) {
    return kCoefficient;
  } else {
    return kCoefficient + r * series<T, k + 1>(r);
  }
}

// e^x for x <= 0 to about 1 ulp; 0 where the result would not be a normal number; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; the exponent bits of 2^n are the low bits of the rounded
// sum.
template <typename T>
ZORRO_INLINE T exp_nonpositive(T x) {
  using Bits = typename Exp<T>::Bits;
  const T clamped = x < Exp<T>::kLowest ? Exp<T>::kLowest : x;
  const T shifted = clamped * std::numbers::log2e_v<T> + Exp<T>::kRounder;
  const T n = shifted - Exp<T>::kRounder;
  const T r = (clamped - n * Exp<T>::kLn2High) - n * Exp<T>::kLn2Low;
  const auto power = __builtin_bit_cast(Bits, shifted) << Exp<T>::kMantissa;
  const auto one = __builtin_bit_cast(Bits, T{1});
  const T scale = __builtin_bit_cast(T, power + one);
  const T value = series<T, 0>(r) * scale;
  return x < Exp<T>::kLowest ? T{0} : value;
}

// ln p where p is 0 is -inf and 0 * -inf is NaN: any finite stand-in for which e^s is 0 gives the
// limit, 0.
template <typename T>
constexpr T kNoProbability = T{-10000};

template <typename T>
ZORRO_INLINE T block_maximum(const T* x, int64_t count, T start) {
  T maximum = start;
#pragma omp simd reduction(max : maximum)
  for (int64_t j = 0; j < count; ++j) maximum = x[j] > maximum ? x[j] : maximum;
  return maximum;
}

template <typename T>
ZORRO_INLINE void rescale(T old_maximum, T maximum, T inverse_temperature, double* exp_sum,
                          double* weighted_sum) {
  if (*exp_sum == 0) return;
  const double shift = (static_cast<double>(old_maximum) - static_cast<double>(maximum)) *
                       static_cast<double>(inverse_temperature);
  const double scale = std::exp(shift);
  *weighted_sum = scale == 0 ? 0 : scale * (*weighted_sum + shift * *exp_sum);
  *exp_sum *= scale;
}

template <typename T>
ZORRO_INLINE void statistics_body(const T* logits, int64_t count, int64_t pairs,
                                  const T* inverse_temperature, T* running_maximum, double* exp_sum,
                                  double* weighted_sum) {
  T maximum = *running_maximum;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const T* x = logits + begin;
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    const T old_maximum = maximum;
    maximum = block_maximum(x, size, old_maximum);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const T inverse = inverse_temperature[pair];
      if (maximum != old_maximum) {
        rescale(old_maximum, maximum, inverse, exp_sum + pair, weighted_sum + pair);
      }
      T sum{0};
      T weighted{0};
#pragma omp simd reduction(+ : sum, weighted)
      for (int64_t j = 0; j < size; ++j) {
        T s = (x[j] - maximum) * inverse;
        s = s < kNoProbability<T> ? kNoProbability<T> : s;
        const T e = exp_nonpositive(s);
        sum += e;
        weighted += e * s;
      }
      exp_sum[pair] += static_cast<double>(sum);
      weighted_sum[pair] += static_cast<double>(weighted);
    }
  }
  *running_maximum = maximum;
}

template <typename T, bool add>
ZORRO_INLINE void gradient_block(const T* x, int64_t count, const RowGradient<T>& row, int64_t pair,
                                 T* out) {
  const T maximum = row.maximum;
  const T inverse = row.inverse_temperature[pair];
  const T log_sum = row.log_sum[pair];
  const T constant = row.constant[pair];
  const T slope = row.slope[pair];
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    T logp = (x[j] - maximum) * inverse - log_sum;
    logp = logp < kNoProbability<T> ? kNoProbability<T> : logp;
    const T value = exp_nonpositive(logp) * (constant + slope * logp);
    out[j] = add ? out[j] + value : value;
  }
}

template <typename T>
ZORRO_INLINE void gradient_body(const T* logits, int64_t count, const RowGradient<T>& row, T* out) {
  if (row.pairs == 1) {
    gradient_block<T, false>(logits, count, row, 0, out);
    return;
  }
  T copy[kBlock];  // out may be logits, and every temperature reads them
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    for (int64_t j = 0; j < size; ++j) copy[j] = logits[begin + j];
    for (int64_t j = 0; j < size; ++j) out[begin + j] = T{0};
    for (int64_t pair = 0; pair < row.pairs; ++pair) {
      gradient_block<T, true>(copy, size, row, pair, out + begin);
    }
  }
}

template <typename T>
ZORRO_TARGET_AVX2 void statistics_avx2(const T* logits, int64_t count, int64_t pairs,
                                       const T* inverse_temperature, T* maximum, double* exp_sum,
                                       double* weighted_sum) {
  statistics_body(logits, count, pairs, inverse_temperature, maximum, exp_sum, weighted_sum);
}

template <typename T>
ZORRO_TARGET_AVX512 void statistics_avx512(const T* logits, int64_t count, int64_t pairs,
                                           const T* inverse_temperature, T* maximum,
                                           double* exp_sum, double* weighted_sum) {
  statistics_body(logits, count, pairs, inverse_temperature, maximum, exp_sum, weighted_sum);
}

template <typename T>
ZORRO_TARGET_AVX2 void gradient_avx2(const T* logits, int64_t count, const RowGradient<T>& row,
                                     T* out) {
  gradient_body(logits, count, row, out);
}

template <typename T>
ZORRO_TARGET_AVX512 void gradient_avx512(const T* logits, int64_t count, const RowGradient<T>& row,
                                         T* out) {
  gradient_body(logits, count, row, out);
}

}  // namespace

template <typename T>
void add_row_statistics(Isa isa, const T* logits, int64_t count, int64_t pairs,
                        const T* inverse_temperature, T* maximum, double* exp_sum,
                        double* weighted_sum) {
  switch (isa) {
    case Isa::kAvx512:
      return statistics_avx512(logits, count, pairs, inverse_temperature, maximum, exp_sum,
                               weighted_sum);
    case Isa::kAvx2:
      return statistics_avx2(logits, count, pairs, inverse_temperature, maximum, exp_sum,
                             weighted_sum);
    case Isa::kBaseline:
      break;
  }
  statistics_body(logits, count, pairs, inverse_temperature, maximum, exp_sum, weighted_sum);
}

template <typename T>
void row_gradient(Isa isa, const T* logits, int64_t count, const RowGradient<T>& row, T* out) {
  switch (isa) {
    case Isa::kAvx512:
      return gradient_avx512(logits, count, row, out);
    case Isa::kAvx2:
      return gradient_avx2(logits, count, row, out);
    case Isa::kBaseline:
      break;
  }
  gradient_body(logits, count, row, out);
}

template void add_row_statistics(Isa, const float*, int64_t, int64_t, const float*, float*, double*,
                                 double*);
template void add_row_statistics(Isa, const double*, int64_t, int64_t, const double*, double*,
                                 double*, double*);
template void row_gradient(Isa, const float*, int64_t, const RowGradient<float>&, float*);
template void row_gradient(Isa, const double*, int64_t, const RowGradient<double>&, double*);

}  // namespace zorro::head
