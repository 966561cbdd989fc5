#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "zorro/io/rollouts.h"
#include "zorro/models/causal_lm.h"
#include "zorro/plan/micro_batches.h"

namespace zorro {

/// Called between micro-batches with the rollout tokens done so far and all of them. May throw to
/// stop the work.
using TokenProgress = std::function<void(int64_t done, int64_t all)>;

struct ScoreOptions {
  ForwardOptions forward;
  ForestOptions forest;
  MicroBatchOptions micro_batches{8192, 0};
  double temperature = 1.0;  ///< a rollout's own value wins
  bool logits = false;       ///< also return the logits
};

/// What a model says about one rollout.
struct RolloutScore {
  at::Tensor logprob, entropy;  ///< [scored tokens], float32 (float64 for float64 models)
  at::Tensor logits;  ///< [scored tokens, V] before the temperature, the model's dtype; undefined
                      ///< unless asked for
};

/// Scores in the caller's order, and what the work came to.
struct ScoreResult {
  std::vector<RolloutScore> rollouts;
  int64_t num_prompts = 0, num_micro_batches = 0;
  int64_t packed_tokens = 0, replicated_tokens = 0;
};

/// Scores rollouts without gradients. Micro-batches bound the memory.
///
/// Throws  InvalidArgument naming the rollout: over the cap, token id outside the vocabulary,
/// temperature not > 0.
ScoreResult score_rollouts(const CausalLM& model, std::span<const Rollout> rollouts,
                           const ScoreOptions& options, const TokenProgress& progress = {});

/// Plans micro-batches of rollouts: equal prompts are one group (under Sharing::kNone every rollout
/// is its own). Indices into `rollouts`; every rollout exactly once.
///
/// Throws  InvalidArgument naming the rollout that alone exceeds the cap.
std::vector<std::vector<int64_t>> plan_rollouts(std::span<const Rollout> rollouts, Sharing sharing,
                                                const MicroBatchOptions& options);

/// The number of each rollout's prompt, in first-seen order: equal prompts have equal numbers.
std::vector<int64_t> prompt_numbers(std::span<const Rollout> rollouts);

/// Throws InvalidArgument naming the rollout and token when a token id lies outside [0,
/// vocab_size).
void check_token_ids(std::span<const Rollout> rollouts, int64_t vocab_size);

/// The temperature of every scored token of some rollouts: [M], or [] when all agree.
///
/// Throws  InvalidArgument when `otherwise` (for rollouts without their own) is not > 0.
at::Tensor temperatures(std::span<const Rollout> rollouts, std::span<const int64_t> members,
                        double otherwise);

}  // namespace zorro
