#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// Estimator of KL(policy || reference) from one sampled token. docs/math.md#loss.
enum class KlKind {
  kNone,
  kK1,  ///< logprob - reference
  kK3   ///< exp(d) - 1 - d with d = reference - logprob; exp's argument is clamped, value and gradient stay finite
};

struct PolicyLossOptions {
  double clip_low = 0.2;   ///< ratio is clipped to [1 - clip_low, 1 + clip_high]
  double clip_high = 0.2;
  KlKind kl = KlKind::kK3;
  double kl_coef = 0.001;
  double entropy_coef = 0.0;  ///< loss -= entropy_coef * mean entropy
};

/// Per scored token, all [M] on one device. mask tells which tokens enter the loss; others add exactly 0 whatever they hold.
struct PolicyLossInput {
  at::Tensor logprob, entropy;      ///< from the model, with gradient
  at::Tensor old_logprob;           ///< behaviour policy
  at::Tensor ref_logprob;           ///< undefined: no KL term
  at::Tensor advantage;
  at::Tensor mask;                  ///< bool
};

struct PolicyLossResult {
  at::Tensor loss;  ///< scalar with gradient: sum over masked tokens / denominator
  /// Sums over masked tokens (not means), float64 on the host, so that micro-batches add up.
  double policy_sum = 0, kl_sum = 0, entropy_sum = 0, clipped_sum = 0, approx_kl_sum = 0, ratio_sum = 0;
  int64_t num_tokens = 0;
};

/// Token-mean PPO clip loss with KL and entropy bonus (GRPO when advantages are group-normalised).
///
/// denominator: masked tokens of the whole update, not of this micro-batch; 0 gives loss 0 with zero gradients.
/// Throws  InvalidArgument when shapes disagree.
PolicyLossResult policy_loss(const PolicyLossInput& input, int64_t denominator, const PolicyLossOptions& options = {});

}  // namespace zorro
