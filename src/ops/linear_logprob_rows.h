#pragma once

#include <cstdint>

#include "ops/isa.h"

namespace zorro::head {

/// What a vocabulary row's softmax needs for each temperature that the row is read at.
template <typename T>
struct RowGradient {
  int64_t pairs;                 ///< temperatures of this row
  T maximum;                     ///< largest logit of the whole row
  const T* inverse_temperature;  ///< [pairs]
  const T* log_sum;              ///< [pairs], ln sum exp((x - maximum) / T)
  const T* constant;             ///< [pairs]
  const T* slope;                ///< [pairs]
};

/// Adds `count` more logits of one row to its running statistics.
///
/// With s = (x - maximum) / T: exp_sum = sum e^s and weighted_sum = sum e^s s for each of `pairs`
/// temperatures. `maximum` starts at the lowest finite number and the sums at 0. A logit of -inf
/// adds nothing; NaN or +inf makes the sums NaN. Shifting by the maximum before dividing keeps
/// small temperatures exact and finite. Block sums are in T and added up in double, in the order of
/// the logits.
template <typename T>
void add_row_statistics(Isa isa, const T* logits, int64_t count, int64_t pairs,
                        const T* inverse_temperature, T* maximum, double* exp_sum,
                        double* weighted_sum);

/// out[j] = sum over pairs of p (constant + slope ln p), p the softmax of logit j. `out` may be
/// `logits`.
template <typename T>
void row_gradient(Isa isa, const T* logits, int64_t count, const RowGradient<T>& row, T* out);

}  // namespace zorro::head
