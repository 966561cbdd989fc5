#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zorro {

/// How positions become angles. Frequencies are theta^(-2i / dims), then scaled by the kind.
struct RotaryOptions {
  enum class Scaling { kNone, kLinear, kLlama3, kYarn };
  double theta = 10000;
  Scaling scaling = Scaling::kNone;
  double factor = 1;
  double original_max_positions = 0;                 ///< llama3 and yarn
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3
  double beta_fast = 32, beta_slow = 1;              ///< yarn
  bool truncate = true;                              ///< yarn
  double attention_factor = 0;  ///< yarn, on cosines and sines; 0: 0.1 ln(factor) + 1
  /// Frequencies of each axis of interleaved multimodal positions; empty: one axis.
  std::vector<int64_t> mrope_section;
};

struct RotaryTable {
  at::Tensor cos;  ///< [T, dims], first half equal to the second
  at::Tensor sin;
};

/// Cosines and sines of positions times frequencies, dims / 2 of them.
///
/// Angles are float32 for float32 and bfloat16 models and float64 for float64 ones, then cast to
/// dtype. positions [T] or [axes, T] int64, 3 axes with mrope_section, else 1; dims even.
/// Source: Peng et al., arXiv 2309.00071 (yarn).
RotaryTable rotary_table(const at::Tensor& positions, int64_t dims, const RotaryOptions& options,
                         at::ScalarType dtype);

/// Rotates the pairs (i, i + dims / 2) of the first dims entries of each head; the rest passes
/// through.
///
/// Shapes    x [T, heads, head_dim] · table [T, dims], dims <= head_dim.
/// Gradients x: the same rotation backwards; saves only the table.
/// Source    Su et al., arXiv 2104.09864 (rotate-half form).
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace zorro
