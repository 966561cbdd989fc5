#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// The chosen experts of every token, weighted and summed.
///
/// y[t] = sum_s weight[t, s] down[e] (silu(gate) * up), (gate, up) = halves of gate_up[e] x[t],
/// e = expert[t, s].
///
/// Shapes    x [T, H] · gate_up [E, 2I, H], rows 0..I-1 the gate · down [E, H, I] · expert [T, K]
///           int64, distinct in a row · weight [T, K]
/// Types     float64, float32 or bfloat16; weight of x's dtype.
/// Gradients x, gate_up, down, weight; an expert without tokens gets zeros. Saves the inputs and
/// the
///           hidden rows [T K, 2I].
/// Cost      tokens sorted by expert, then one product an expert and matrix: 6 H I multiply-adds a
///           slot forward, twice that backward. The sort order is fixed, so runs repeat bit for
///           bit.
/// Throws    InvalidArgument when a shape or dtype disagrees or an expert is out of range.
/// Source    Shazeer et al., arXiv 1701.06538; docs/math.md#experts.
at::Tensor expert_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                      const at::Tensor& expert, const at::Tensor& weight);

}  // namespace zorro
