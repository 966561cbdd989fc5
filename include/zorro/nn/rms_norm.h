#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// Root-mean-square norm with a plain weight: weight * cast(x * rsqrt(mean(x^2) + eps)).
///
/// Shapes    x [..., size] · weight [size] · returns the shape and dtype of x.
/// Types     statistics in float32 (float64 for float64); cast to x's dtype before the multiply, as
/// the families do. Gradients x and weight. Saves x and one number a row. Source    Zhang and
/// Sennrich, arXiv 1910.07467; docs/math.md#norm.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

}  // namespace zorro
