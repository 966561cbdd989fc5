#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// Causal depthwise convolution along every path of a forest.
///
/// y[t] = sum_j weight[:, K - 1 - j] u[j-th token before t on its path], 0 where the path begins.
///
/// Shapes    u [T, C] · weight [C, K], K >= 1 · previous [T] int64, each below its own index, -1 at
///           a root · q_begin: only tokens from there on are computed, u still has them all.
///           Returns [T - q_begin, C].
/// Types     float64, float32 or bfloat16, one dtype and device; sums in float32 or better, rounded
///           once.
/// Gradients u and weight; a shared token receives the sum over those that read it, in packed
///           order. Saves u, weight and previous.
/// Cost      K multiply-adds a token and channel, no matrices.
/// Throws    InvalidArgument when a shape, dtype or device disagrees.
/// Source    docs/math.md#short-convolution.
at::Tensor forest_short_conv(const at::Tensor& u, const at::Tensor& weight,
                             const at::Tensor& previous, int64_t q_begin = 0);

}  // namespace zorro
