#include "zorro/train/score.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "zorro/core/error.h"

namespace zorro {
namespace {

const Rollout& rollout_at(std::span<const Rollout> rollouts, int64_t index) {
  return rollouts[static_cast<size_t>(index)];
}

std::string name_of(const Rollout& rollout) {
  return concat("rollout of line ", rollout.line, " (id ", rollout.id, ")");
}

/// The prompt's tokens as bytes: a hash key that compares by content.
std::string prompt_key(const Rollout& rollout) {
  const auto length = static_cast<size_t>(rollout.prompt_length);
  return {reinterpret_cast<const char*>(rollout.token_ids.data()), length * sizeof(int64_t)};
}

Batch make_batch(std::span<const Rollout> rollouts, std::span<const int64_t> members,
                 const ForestOptions& options) {
  std::vector<Sample> samples;
  for (const int64_t member : members) samples.push_back(rollout_at(rollouts, member).sample());
  return Batch::from(PrefixForest::build(samples, options));
}

}  // namespace

std::vector<int64_t> prompt_numbers(std::span<const Rollout> rollouts) {
  std::unordered_map<std::string, int64_t> number_of;
  std::vector<int64_t> numbers;
  for (const Rollout& rollout : rollouts) {
    const auto next = static_cast<int64_t>(number_of.size());
    numbers.push_back(number_of.try_emplace(prompt_key(rollout), next).first->second);
  }
  return numbers;
}

std::vector<std::vector<int64_t>> plan_rollouts(std::span<const Rollout> rollouts, Sharing sharing,
                                                const MicroBatchOptions& options) {
  const std::vector<int64_t> prompts = prompt_numbers(rollouts);
  std::vector<PlanSample> samples;
  for (size_t i = 0; i < rollouts.size(); ++i) {
    const auto length = static_cast<int64_t>(rollouts[i].token_ids.size());
    ZORRO_CHECK(options.max_tokens == 0 || length <= options.max_tokens, "[plan] ",
                name_of(rollouts[i]), " must fit the cap of ", options.max_tokens, " tokens, got ",
                length, ". Raise --max-tokens (max_tokens) or shorten it.");
    const int64_t group = sharing == Sharing::kNone ? static_cast<int64_t>(i) : prompts[i];
    samples.push_back({group, rollouts[i].prompt_length, length - rollouts[i].prompt_length});
  }
  return plan_micro_batches(samples, options);
}

void check_token_ids(std::span<const Rollout> rollouts, int64_t vocab_size) {
  for (const Rollout& rollout : rollouts)
    for (size_t token = 0; token < rollout.token_ids.size(); ++token) {
      const int64_t id = rollout.token_ids[token];
      ZORRO_CHECK(id >= 0 && id < vocab_size, "[rollouts] token ids must lie in [0, ", vocab_size,
                  "), got ", id, " at token ", token, " of the ", name_of(rollout),
                  ". Score it with the model that sampled it.");
    }
}

at::Tensor temperatures(std::span<const Rollout> rollouts, std::span<const int64_t> members,
                        double otherwise) {
  ZORRO_CHECK(otherwise > 0, "[rollouts] temperature must be > 0, got ", otherwise, ".");
  std::vector<double> values;
  bool all_agree = true;
  double first = otherwise;
  for (size_t i = 0; i < members.size(); ++i) {
    const Rollout& rollout = rollout_at(rollouts, members[i]);
    const double value = rollout.temperature.value_or(otherwise);
    if (i == 0) first = value;
    all_agree = all_agree && value == first;
    values.insert(values.end(), static_cast<size_t>(rollout.num_scored()), value);
  }
  if (all_agree) return at::scalar_tensor(first, at::kDouble);
  return at::tensor(values, at::kDouble);
}

ScoreResult score_rollouts(const CausalLM& model, std::span<const Rollout> rollouts,
                           const ScoreOptions& options, const TokenProgress& progress) {
  const at::NoGradGuard no_grad;
  check_token_ids(rollouts, model.config().vocab_size);
  ScoreResult scores;
  scores.rollouts.resize(rollouts.size());
  for (const int64_t number : prompt_numbers(rollouts))
    scores.num_prompts = std::max(scores.num_prompts, number + 1);
  for (const Rollout& rollout : rollouts)
    scores.replicated_tokens += static_cast<int64_t>(rollout.token_ids.size());
  int64_t done = 0;
  for (const std::vector<int64_t>& members :
       plan_rollouts(rollouts, options.forest.sharing, options.micro_batches)) {
    if (progress) progress(done, scores.replicated_tokens);
    const Batch batch = make_batch(rollouts, members, options.forest);
    const LogprobResult result =
        model.score(batch, temperatures(rollouts, members, options.temperature), options.forward);
    const at::Tensor logits = options.logits ? model.logits(batch, options.forward) : at::Tensor();
    for (size_t i = 0; i < members.size(); ++i) {
      const int64_t begin = batch.forest.scored_offsets[i],
                    end = batch.forest.scored_offsets[i + 1];
      RolloutScore& score = scores.rollouts[static_cast<size_t>(members[i])];
      score.logprob = result.logprob.slice(0, begin, end);
      score.entropy = result.entropy.slice(0, begin, end);
      if (options.logits) score.logits = logits.slice(0, begin, end);
    }
    ++scores.num_micro_batches;
    scores.packed_tokens += batch.forest.num_tokens();
    done += batch.forest.num_replicated_tokens();
  }
  if (progress) progress(done, scores.replicated_tokens);
  return scores;
}

}  // namespace zorro
