#include "zorro/train/policy_update.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "zorro/core/error.h"
#include "zorro/ops/router_balance.h"
#include "zorro/train/score.h"

namespace zorro {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<at::Tensor> trainable(CausalLM& model) {
  std::vector<at::Tensor> parameters;
  for (const Weight& weight : model.weights())
    if (weight.slot->requires_grad()) parameters.push_back(*weight.slot);
  return parameters;
}

int64_t count_loss_tokens(std::span<const RolloutBatch> batches) {
  int64_t count = 0;
  for (const RolloutBatch& batch : batches) count += batch.inputs.mask.sum().item<int64_t>();
  return count;
}

int64_t count_prompts(std::span<const Rollout> rollouts) {
  const std::vector<int64_t> numbers = prompt_numbers(rollouts);
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end()) + 1;
}

/// Sums of the micro-batches, divided once by the update's number of loss tokens.
void fill_means(UpdateMetrics& metrics, const PolicyLossResult& sums,
                const UpdateOptions& options) {
  if (metrics.loss_tokens == 0) return;
  const auto tokens = static_cast<double>(metrics.loss_tokens);
  metrics.policy_loss = sums.policy_sum / tokens;
  metrics.kl = sums.kl_sum / tokens;
  metrics.entropy = sums.entropy_sum / tokens;
  metrics.clip_fraction = sums.clipped_sum / tokens;
  metrics.approx_kl = sums.approx_kl_sum / tokens;
  metrics.mean_ratio = sums.ratio_sum / tokens;
  metrics.loss = metrics.policy_loss + options.loss.kl_coef * metrics.kl -
                 options.loss.entropy_coef * metrics.entropy +
                 options.router_coef * metrics.router_loss;
}

void add(PolicyLossResult& sums, const PolicyLossResult& part) {
  sums.policy_sum += part.policy_sum;
  sums.kl_sum += part.kl_sum;
  sums.entropy_sum += part.entropy_sum;
  sums.clipped_sum += part.clipped_sum;
  sums.approx_kl_sum += part.approx_kl_sum;
  sums.ratio_sum += part.ratio_sum;
}

struct BatchLoss {
  PolicyLossResult policy;
  at::Tensor total;        ///< to differentiate
  double router_loss = 0;  ///< times its share
};

BatchLoss loss_of(CausalLM& model, RolloutBatch& batch, int64_t denominator,
                  int64_t replicated_tokens, const UpdateOptions& options) {
  const ForwardResult forward = model.forward(batch.batch, options.forward);
  const LogprobResult scores =
      model.score_hidden(forward.hidden, batch.batch, batch.temperature, options.forward.head);
  PolicyLossInput inputs = batch.inputs;
  inputs.logprob = scores.logprob;
  inputs.entropy = scores.entropy;
  if (!inputs.old_logprob.defined()) inputs.old_logprob = scores.logprob.detach();
  BatchLoss result{policy_loss(inputs, denominator, options.loss), {}, 0};
  result.total = result.policy.loss;
  if (options.router_coef == 0 || forward.router_logits.empty()) return result;
  const double share = static_cast<double>(batch.batch.forest.num_replicated_tokens()) /
                       static_cast<double>(replicated_tokens);
  const at::Tensor router =
      router_balance_loss(forward.router_logits, batch.batch.tensors.multiplicity,
                          model.config().moe.choices) *
      share;
  result.total = result.total + router * options.router_coef;
  result.router_loss = router.item<double>();
  return result;
}

}  // namespace

UpdateMetrics accumulate_gradients(CausalLM& model, std::span<const Rollout> rollouts,
                                   const UpdateOptions& options,
                                   const std::function<void(int64_t done, int64_t all)>& progress) {
  UpdateMetrics metrics;
  auto start = Clock::now();
  std::vector<RolloutBatch> batches = make_micro_batches(rollouts, model.config(), options);
  metrics.loss_tokens = count_loss_tokens(batches);
  metrics.num_prompts = count_prompts(rollouts);
  metrics.num_samples = static_cast<int64_t>(rollouts.size());
  metrics.num_micro_batches = static_cast<int64_t>(batches.size());
  metrics.seconds_plan = seconds_since(start);

  int64_t all_tokens = 0;
  for (const RolloutBatch& batch : batches)
    all_tokens += batch.batch.forest.num_replicated_tokens();
  PolicyLossResult sums;
  for (size_t i = 0; i < batches.size(); ++i) {
    RolloutBatch& batch = batches[i];
    metrics.scored_tokens += batch.batch.forest.num_scored();
    metrics.packed_tokens += batch.batch.forest.num_tokens();
    metrics.replicated_tokens += batch.batch.forest.num_replicated_tokens();
    if (batch.batch.forest.num_scored() > 0 || options.router_coef != 0) {
      start = Clock::now();
      const BatchLoss part = loss_of(model, batch, metrics.loss_tokens, all_tokens, options);
      metrics.seconds_forward += seconds_since(start);
      start = Clock::now();
      part.total.backward();
      metrics.seconds_backward += seconds_since(start);
      metrics.router_loss += part.router_loss;
      add(sums, part.policy);
    }
    batch = {};  // frees the device view before the following one is used
    if (progress) progress(static_cast<int64_t>(i) + 1, metrics.num_micro_batches);
  }
  for (at::Tensor& parameter : trainable(model))
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
  fill_means(metrics, sums, options);
  return metrics;
}

UpdateMetrics policy_update(CausalLM& model, AdamW& optimizer, std::span<const Rollout> rollouts,
                            const UpdateOptions& options,
                            const std::function<void(int64_t done, int64_t all)>& progress) {
  optimizer.zero_grad();
  UpdateMetrics metrics = accumulate_gradients(model, rollouts, options, progress);
  const auto start = Clock::now();
  const double no_limit = std::numeric_limits<double>::infinity();
  metrics.grad_norm = clip_grad_norm(trainable(model),
                                     options.max_grad_norm > 0 ? options.max_grad_norm : no_limit);
  optimizer.step();
  metrics.seconds_optimizer = seconds_since(start);
  return metrics;
}

}  // namespace zorro
