#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "zorro/io/rollouts.h"
#include "zorro/models/causal_lm.h"
#include "zorro/plan/micro_batches.h"
#include "zorro/train/adamw.h"
#include "zorro/train/policy_loss.h"

namespace zorro {

struct UpdateOptions {
  PolicyLossOptions loss;
  ForwardOptions forward;
  ForestOptions forest;
  MicroBatchOptions micro_batches{8192, 0};
  double temperature = 1.0;    ///< a rollout's own value wins
  double max_grad_norm = 1.0;  ///< 0: no clipping
  /// Weight of the router balance loss of sparse models, each micro-batch's by its share of the
  /// naive batch's tokens. 0: not computed.
  double router_coef = 0;
};

/// A micro-batch of rollouts with the per-token tensors that a loss reads.
struct RolloutBatch {
  Batch batch;
  at::Tensor temperature;  ///< [] or [M]
  PolicyLossInput inputs;  ///< logprob and entropy undefined; old_logprob may be undefined (then:
                           ///< on-policy, detached)
  std::vector<int64_t> members;  ///< rollout indices, in the order of the forest's samples
};

/// Builds the micro-batches of an update. `members` are ascending inside each; every rollout
/// exactly once.
///
/// Throws  InvalidArgument naming the rollout: over the cap, token id outside the vocabulary, no
/// advantage.
std::vector<RolloutBatch> make_micro_batches(std::span<const Rollout> rollouts,
                                             const ModelConfig& config,
                                             const UpdateOptions& options);

struct UpdateMetrics {
  double loss = 0, policy_loss = 0, kl = 0, entropy = 0, clip_fraction = 0, approx_kl = 0,
         mean_ratio = 0, router_loss = 0;
  double grad_norm = 0;
  int64_t loss_tokens = 0, scored_tokens = 0, packed_tokens = 0, replicated_tokens = 0;
  int64_t num_micro_batches = 0, num_prompts = 0, num_samples = 0;
  double seconds_plan = 0, seconds_forward = 0, seconds_backward = 0, seconds_optimizer = 0;
};

/// Forward and backward of all micro-batches: adds to the parameters' gradients (every parameter
/// has one afterwards, zero if nothing reached it). No optimizer step.
UpdateMetrics accumulate_gradients(
    CausalLM& model, std::span<const Rollout> rollouts, const UpdateOptions& options,
    const std::function<void(int64_t done, int64_t all)>& progress = {});

/// One update: zero gradients, accumulate, clip, step.
UpdateMetrics policy_update(CausalLM& model, AdamW& optimizer, std::span<const Rollout> rollouts,
                            const UpdateOptions& options,
                            const std::function<void(int64_t done, int64_t all)>& progress = {});

}  // namespace zorro
