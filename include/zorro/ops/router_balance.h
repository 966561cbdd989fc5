#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zorro {

/// How often each expert was among the chosen ones, and of how many choices' tokens.
struct RouterCounts {
  at::Tensor counts;  ///< [E] float32 (float64): tokens that chose the expert, summed over layers
  at::Tensor total;   ///< [] the same dtype: tokens times layers
};

/// Counts by the logits of the sparse layers, each token weighted by `multiplicity` [T]: as often
/// as the naive batch has it. No gradient.
RouterCounts router_counts(const std::vector<at::Tensor>& logits, const at::Tensor& multiplicity,
                           int64_t choices);

/// The load-balancing loss of sparse layers: E sum_i f_i P_i, f the share of tokens that chose
/// expert i, P the mean probability of it, both over all layers and tokens of the naive batch.
///
/// logits [T, E] of each layer before the softmax. With `given` (the counts of all micro-batches
/// and ranks together) f and the divisor are those, and the losses of the parts add up to that of
/// the whole; without, the loss is that of this micro-batch.
/// Gradients logits, through P alone. Perfect balance gives `choices`.
/// Throws    InvalidArgument when there is no layer or a shape disagrees.
/// Source    Fedus et al., arXiv 2101.03961; docs/math.md#experts.
at::Tensor router_balance_loss(const std::vector<at::Tensor>& logits,
                               const at::Tensor& multiplicity, int64_t choices,
                               const RouterCounts& given = {});

}  // namespace zorro
