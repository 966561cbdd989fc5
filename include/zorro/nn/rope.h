#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

struct RotaryTable {
  at::Tensor cos;  ///< [T, dims], first half equal to the second
  at::Tensor sin;
};

/// Cosines and sines of positions times theta^(-2i / dims), i < dims / 2.
///
/// Angles are float32 for float32 and bfloat16 models and float64 for float64 ones, then cast to
/// dtype. positions [T] int64; dims even.
RotaryTable rotary_table(const at::Tensor& positions, int64_t dims, double theta,
                         at::ScalarType dtype);

/// Rotates the pairs (i, i + dims / 2) of the first dims entries of each head; the rest passes
/// through.
///
/// Shapes    x [T, heads, head_dim] · table [T, dims], dims <= head_dim.
/// Gradients x: the same rotation backwards; saves only the table.
/// Source    Su et al., arXiv 2104.09864 (rotate-half form).
at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace zorro
