#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

struct GatedDeltaOptions {
  /// Final states of the first nodes of the table, which are computed elsewhere: [nodes before,
  /// Hv, dk, dv]; undefined: none. The tokens given are then those of the nodes after them.
  at::Tensor initial;
  /// Also return the state after every node.
  bool want_states = false;
  /// Compute levels as batches of ATen products, as on other devices, in place of the CPU kernel.
  bool batched = false;
};

struct GatedDeltaResult {
  at::Tensor out;     ///< [T, Hv, dv], dtype of v
  at::Tensor states;  ///< [N, Hv, dk, dv] state after each node, float32 (float64); [0, ...] unless
                      ///< wanted
};

/// The gated delta rule along every path of a forest. A child goes on from its parent's last state.
///
/// S <- exp(g_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  out_t = S^T q_t, with q and k scaled
/// by the caller. Value head h reads key head h / (Hv / Hk).
///
/// Shapes    q, k [T, Hk, dk] · v [T, Hv, dv] · g, beta [T, Hv], g <= 0 · nodes [N, 5] int64 on the
///           CPU as in ForestTensors
/// Types     float64, float32, bfloat16 (q, k, v of one dtype, g and beta any); state and
/// arithmetic
///           in float32, float64 for float64.
/// Gradients q, k, v, g, beta, initial; a state's gradient is the sum over its children in their
///           order. Once differentiable. Saves the inputs and one state a chunk of 64 tokens.
/// Cost      level by level, all nodes of a level and all heads side by side, in chunks of 64: per
///           token and head about 64 (3 dk + 2 dv) + 6 dk dv multiply-adds. Batched, a node shorter
///           than 64 pays a whole chunk.
/// Throws    InvalidArgument when a shape, dtype or device disagrees.
/// Source    Yang et al., arXiv 2412.06464; docs/math.md#gated-delta-rule.
GatedDeltaResult forest_gated_delta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& g, const at::Tensor& beta,
                                    const at::Tensor& nodes, const GatedDeltaOptions& options = {});

/// The same by its definition, token by token: `previous` [T] int64 on the CPU. Differentiable by
/// plain autograd; T small operations, for tests.
at::Tensor gated_delta_composed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& g, const at::Tensor& beta,
                                const at::Tensor& previous);

/// q and k scaled to length 1 (y * rsqrt(sum y^2 + 1e-6), in float32 or better), q by dk^-1/2 on
/// top, then forest_gated_delta: the rule as the Qwen families use it.
GatedDeltaResult normalized_gated_delta(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const at::Tensor& g,
                                        const at::Tensor& beta, const at::Tensor& nodes,
                                        const GatedDeltaOptions& options = {});

}  // namespace zorro
