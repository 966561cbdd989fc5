#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zorro {

/// Estimator of KL(policy || reference) from one sampled token. docs/math.md#loss.
enum class KlKind {
  kNone,
  kK1,  ///< logprob - reference
  kK3   ///< exp(d) - 1 - d with d = reference - logprob; exp is bounded as policy_loss says
};

struct PolicyLossOptions {
  double clip_low = 0.2;  ///< ratio is clipped to [1 - clip_low, 1 + clip_high]
  double clip_high = 0.2;
  KlKind kl = KlKind::kK3;
  double kl_coef = 0.001;
  double entropy_coef = 0.0;  ///< loss -= entropy_coef * mean entropy
};

/// Per scored token, all [M] on one device. mask tells which tokens enter the loss; others add
/// exactly 0 whatever they hold.
struct PolicyLossInput {
  at::Tensor logprob, entropy;  ///< from the model, with gradient
  at::Tensor old_logprob;       ///< behaviour policy
  at::Tensor ref_logprob;       ///< undefined: no KL term
  at::Tensor advantage;
  at::Tensor mask;  ///< bool
};

struct PolicyLossResult {
  at::Tensor loss;  ///< scalar with gradient: sum over masked tokens / denominator
  /// Sums over masked tokens (not means), float64 on the host, so that micro-batches add up.
  /// kl: the chosen estimator against the reference; approx_kl: old_logprob - logprob; clipped:
  /// tokens where the clipped term is the larger one.
  double policy_sum = 0, kl_sum = 0, entropy_sum = 0, clipped_sum = 0, approx_kl_sum = 0,
         ratio_sum = 0;
  int64_t num_tokens = 0;
};

/// Token-mean PPO clip loss with KL and entropy bonus (GRPO when advantages are group-normalised).
///
/// With ratio = exp(logprob - old_logprob) a token of the mask adds
///   max(-advantage ratio, -advantage clip(ratio, 1 - clip_low, 1 + clip_high))
///   + kl_coef kl - entropy_coef entropy,
/// and loss is the sum / denominator, so that the micro-batches of one update simply add up.
/// denominator: masked tokens of the whole update, not of this micro-batch; 0 gives loss 0 with
/// zero gradients. Above an argument of 20 exp is continued by its tangent: value and gradient stay
/// finite and the gradient keeps its sign.
///
/// Shapes    all [M] on one device; ref_logprob may be undefined.
/// Types     float dtypes, computed in float32 (float64 where an input is float64), summed in
///           float64; loss is a float64 scalar.
/// Gradients logprob and, if entropy_coef != 0, entropy; exactly 0 for a token outside the mask,
///           whatever any input holds there. loss depends on logprob even when no token is in the
///           mask, so that a backward pass reaches every parameter.
/// Cost      O(M); the metrics are read on the host.
/// Throws    InvalidArgument: a shape, dtype or device disagrees; denominator < 0; a clip range or
///           coefficient is out of range or not finite.
/// Source    PPO arXiv 1707.06347 (eq. 7), GRPO arXiv 2402.03300 (k3).
PolicyLossResult policy_loss(const PolicyLossInput& input, int64_t denominator,
                             const PolicyLossOptions& options = {});

}  // namespace zorro
