#include <ATen/ops/empty.h>

#include <algorithm>

#include "zorro/core/error.h"
#include "zorro/train/policy_update.h"
#include "zorro/train/score.h"

namespace zorro {
namespace {

std::string name_of(const Rollout& rollout) {
  return concat("rollout \"", rollout.id, "\" (line ", rollout.line, ")");
}

void check_advantage(const Rollout& rollout) {
  ZORRO_CHECK(rollout.num_scored() == 0 || !rollout.advantages.empty(), "[update] ",
              name_of(rollout), ": key \"advantage\" must be there for training, got nothing.");
}

/// One value a scored token of the members, in the forest's scored order.
template <typename Values>
at::Tensor gather_scored(std::span<const Rollout> rollouts, const std::vector<int64_t>& members,
                         at::ScalarType dtype, const Values& values) {
  int64_t count = 0;
  for (const int64_t i : members) count += rollouts[static_cast<size_t>(i)].num_scored();
  at::Tensor tensor = at::empty({count}, at::kDouble);
  auto* slot = tensor.mutable_data_ptr<double>();
  for (const int64_t i : members) {
    const Rollout& rollout = rollouts[static_cast<size_t>(i)];
    for (int64_t token = 0; token < rollout.num_scored(); ++token)
      *slot++ = values(rollout, static_cast<size_t>(token));
  }
  return tensor.to(dtype);
}

bool any_has(std::span<const Rollout> rollouts, const std::vector<int64_t>& members,
             std::vector<double> Rollout::* values) {
  return std::any_of(members.begin(), members.end(), [&](int64_t i) {
    return !(rollouts[static_cast<size_t>(i)].*values).empty();
  });
}

void check_all_have(std::span<const Rollout> rollouts, const std::vector<int64_t>& members,
                    std::vector<double> Rollout::* values, const char* key) {
  for (const int64_t i : members) {
    const Rollout& rollout = rollouts[static_cast<size_t>(i)];
    ZORRO_CHECK(rollout.num_scored() == 0 || !(rollout.*values).empty(), "[update] ",
                name_of(rollout), ": key \"", key,
                "\" must be there when other rollouts have it, got nothing.");
  }
}

/// In float64: a loss is a few numbers a token, and its sums should not depend on the model's
/// dtype.
PolicyLossInput loss_inputs(std::span<const Rollout> rollouts,
                            const std::vector<int64_t>& members) {
  const auto column = [&](std::vector<double> Rollout::* values, const char* key) {
    if (!any_has(rollouts, members, values)) return at::Tensor();
    check_all_have(rollouts, members, values, key);
    return gather_scored(rollouts, members, at::kDouble, [&](const Rollout& rollout, size_t token) {
      return (rollout.*values)[token];
    });
  };
  PolicyLossInput input;
  input.advantage =
      gather_scored(rollouts, members, at::kDouble,
                    [](const Rollout& rollout, size_t token) { return rollout.advantages[token]; });
  input.mask =
      gather_scored(rollouts, members, at::kBool, [](const Rollout& rollout, size_t token) {
        return rollout.loss_mask[token] != 0 ? 1.0 : 0.0;
      });
  input.old_logprob = column(&Rollout::old_logprobs, "old_logprobs");
  input.ref_logprob = column(&Rollout::ref_logprobs, "ref_logprobs");
  return input;
}

}  // namespace

std::vector<RolloutBatch> make_micro_batches(std::span<const Rollout> rollouts,
                                             const ModelConfig& config,
                                             const UpdateOptions& options) {
  check_token_ids(rollouts, config.vocab_size);
  for (const Rollout& rollout : rollouts) check_advantage(rollout);
  std::vector<RolloutBatch> batches;
  for (std::vector<int64_t>& members :
       plan_rollouts(rollouts, options.forest.sharing, options.micro_batches)) {
    std::vector<Sample> samples;
    for (const int64_t i : members) samples.push_back(rollouts[static_cast<size_t>(i)].sample());
    RolloutBatch batch;
    batch.batch = Batch::from(PrefixForest::build(samples, options.forest));
    batch.inputs = loss_inputs(rollouts, members);
    batch.temperature = temperatures(rollouts, members, options.temperature);
    batch.members = std::move(members);
    batches.push_back(std::move(batch));
  }
  return batches;
}

}  // namespace zorro
