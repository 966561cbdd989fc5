#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

enum class NormKind {
  kPlain,        ///< weight * cast(n(x))
  kZeroCentered  ///< cast(n(x) * (1 + weight)), the product in float32
};

/// Root-mean-square norm, n(x) = x * rsqrt(mean(x^2) + eps).
///
/// Shapes    x [..., size] · weight [size] · returns the shape and dtype of x.
/// Types     statistics in float32 (float64 for float64); cast to x's dtype before the multiply, as
/// the families do. Gradients x and weight. Saves x and one number a row. Source    Zhang and
/// Sennrich, arXiv 1910.07467; docs/math.md#norm.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    NormKind kind = NormKind::kPlain);

/// The norm of a gated delta net: rms_norm(x, weight) * silu(gate), the product in float32, norm
/// first. Shapes as rms_norm, gate like x.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                          double eps);

}  // namespace zorro
