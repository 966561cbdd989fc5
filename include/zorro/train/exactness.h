#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zorro/io/rollouts.h"
#include "zorro/io/safetensors.h"
#include "zorro/models/causal_lm.h"
#include "zorro/plan/micro_batches.h"
#include "zorro/train/policy_loss.h"
#include "zorro/train/score.h"

namespace zorro {

/// How the rollouts are handed to the forest builder.
enum class Layout {
  kRagged,  ///< the tokens of each rollout
  kLeft,    ///< a rectangular batch, pads before the tokens of the prompt and of the response block
  kRight,   ///< pads after the tokens of each block
  kBoth     ///< pads before the prompts and after the responses
};

/// One way to run the forward and backward pass of an exactness check.
struct ArmOptions {
  ForwardOptions forward;
  ForestOptions forest;
  MicroBatchOptions micro_batches{8192, 0};
  Layout layout = Layout::kRagged;
  std::optional<uint64_t> permute_seed;  ///< shuffles the order of the rollouts
  double temperature = 1.0;              ///< a rollout's own value wins
  uint64_t loss_seed = 0;                ///< draws w and u of the loss
  /// Adds the training loss: token mean over the whole file.
  std::optional<PolicyLossOptions> policy_loss;
  /// Changes each forest before the model sees it (tests of the check itself).
  std::function<void(PrefixForest&)> edit_forest;
};

/// Everything one arm computes. Per-token values stand in the order of the rollouts given.
struct ArmNumbers {
  at::Tensor logprob, entropy;  ///< [scored tokens] float64
  NamedTensors gradients;  ///< every weight by checkpoint name; float32 when the model is bfloat16
  double loss = 0;
  int64_t packed_tokens = 0, replicated_tokens = 0, num_micro_batches = 0;

  double token_ratio() const;  ///< rho
};

/// Forward and backward of loss = sum w logprob + 0.1 sum u entropy over all rollouts, with w, u ~
/// N(0, 1) drawn in their order: no symmetry hides a wrong token. Gradients of a bfloat16 model are
/// summed over micro-batches in float32.
///
/// Leaves no gradients on the model.
/// Throws  InvalidArgument: over the cap, token id outside the vocabulary, policy_loss without
/// advantages.
ArmNumbers run_arm(CausalLM& model, std::span<const Rollout> rollouts, const ArmOptions& options,
                   const TokenProgress& progress = {});

/// A measured value and the most it may be.
struct Measure {
  double value = 0, tolerance = 0;
  bool within() const { return value <= tolerance; }  // false for NaN
};

/// What a comparison found. docs/testing.md#exactness.
///
/// float32 and float64: errors. Of logprob and entropy max |x - y| / max(|y|, 1); of a parameter's
/// gradient ||x - y|| / max(||y||, 1e-3 ||g||), g = all gradients of its layer.
/// bfloat16: errors against the float32 truth as a multiple of the naive arm's own.
struct ExactnessReport {
  Measure logprob, entropy;
  Measure gradient;                      ///< of the worst parameter
  std::optional<Measure> all_gradients;  ///< bfloat16 only: the norm over all parameters together
  std::string worst_parameter;
  std::string smallest_parameter;  ///< the smallest gradient norm of the reference: flat ones test
                                   ///< nothing
  double smallest_norm = 0;
  double token_ratio = 1;

  bool passed() const;
};

/// Compares an arm with the naive arm in the same dtype, float32 or float64.
ExactnessReport compare(const ArmNumbers& arm, const ArmNumbers& naive, at::ScalarType dtype,
                        double tolerance_scale = 1);

/// Compares a bfloat16 arm and the bfloat16 naive arm with the float32 truth of the same weights.
ExactnessReport compare_to_truth(const ArmNumbers& arm, const ArmNumbers& naive,
                                 const ArmNumbers& truth, double tolerance_scale = 1);

/// Rounds every weight to bfloat16 in place: a float32 model then has the weights of a bfloat16
/// run.
void round_weights_to_bfloat16(CausalLM& model);

/// Name of the group that a parameter's gradient is measured in: its layer ("model.layers.3."),
/// else its own name.
std::string gradient_group(const std::string& parameter);

}  // namespace zorro
