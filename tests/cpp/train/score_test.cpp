#include "zorro/train/score.h"

#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cpp/train/rollout_cases.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using testing::mixed_rollouts;
using testing::tiny_model;

double worst_difference(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

TEST(RolloutScores, AgreeWithEachRowAlone) {
  const auto model = tiny_model();
  const std::vector<Rollout> rollouts = mixed_rollouts();
  ScoreOptions options;
  options.micro_batches = {40, 0};
  options.logits = true;
  const ScoreResult together = score_rollouts(*model, rollouts, options);
  EXPECT_GT(together.num_micro_batches, 1);
  EXPECT_EQ(together.num_prompts, 3);
  EXPECT_LT(together.packed_tokens, together.replicated_tokens);
  for (size_t i = 0; i < rollouts.size(); ++i) {
    const ScoreResult alone = score_rollouts(*model, {&rollouts[i], 1}, {});
    const RolloutScore& score = together.rollouts[i];
    ASSERT_EQ(score.logprob.size(0), rollouts[i].num_scored());
    EXPECT_LT(worst_difference(score.logprob, alone.rollouts[0].logprob), 1e-10);
    EXPECT_LT(worst_difference(score.entropy, alone.rollouts[0].entropy), 1e-10);
    EXPECT_EQ(score.logits.size(0), rollouts[i].num_scored());
    EXPECT_FALSE(score.logprob.requires_grad());
    EXPECT_FALSE(alone.rollouts[0].logits.defined());
  }
}

TEST(RolloutScores, OwnTemperatureWins) {
  const auto model = tiny_model();
  std::vector<Rollout> rollouts = mixed_rollouts();
  rollouts[1].temperature = 0.5;
  ScoreOptions hot, cold;
  hot.temperature = 2;
  cold.temperature = 0.5;
  const ScoreResult mixed = score_rollouts(*model, rollouts, hot);
  const ScoreResult all_cold = score_rollouts(*model, rollouts, cold);
  EXPECT_LT(worst_difference(mixed.rollouts[1].logprob, all_cold.rollouts[1].logprob), 1e-10);
  EXPECT_GT(worst_difference(mixed.rollouts[0].logprob, all_cold.rollouts[0].logprob), 1e-3);
}

TEST(RolloutScores, BadInputIsNamed) {
  const auto model = tiny_model();
  std::vector<Rollout> rollouts = mixed_rollouts();
  ScoreOptions options;
  options.temperature = 0;
  EXPECT_THROW(score_rollouts(*model, rollouts, options), InvalidArgument);
  options = {};
  options.micro_batches = {20, 0};
  try {
    score_rollouts(*model, rollouts, options);
    FAIL() << "a row over the cap was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("line 3"), std::string::npos) << error.what();
  }
  rollouts[5].token_ids.back() = 97;
  try {
    score_rollouts(*model, rollouts, {});
    FAIL() << "an id beyond the vocabulary was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("line 6"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("97"), std::string::npos) << error.what();
  }
}

TEST(RolloutPlan, NumbersPromptsInFirstSeenOrder) {
  EXPECT_EQ(prompt_numbers(mixed_rollouts()), (std::vector<int64_t>{0, 1, 2, 0, 1, 2, 0, 1, 2}));
}

TEST(RolloutPlan, KeepsGroupsTogetherUnlessNothingIsShared) {
  const std::vector<Rollout> rollouts = mixed_rollouts();
  const auto grouped = plan_rollouts(rollouts, Sharing::kPrompts, {0, 3});
  for (const auto& members : grouped)
    for (const int64_t member : members) EXPECT_EQ(member % 3, members.front() % 3);
  const auto single = plan_rollouts(rollouts, Sharing::kNone, {0, 9});
  EXPECT_TRUE(std::all_of(single.begin(), single.end(),
                          [](const auto& members) { return members.size() == 1; }));
}

TEST(RolloutPlan, TemperatureIsAScalarWhenAllAgree) {
  std::vector<Rollout> rollouts = mixed_rollouts();
  const std::vector<int64_t> members{0, 1};
  EXPECT_EQ(temperatures(rollouts, members, 0.7).dim(), 0);
  rollouts[1].temperature = 0.5;
  const at::Tensor mixed = temperatures(rollouts, members, 0.7);
  EXPECT_EQ(mixed.size(0), rollouts[0].num_scored() + rollouts[1].num_scored());
  EXPECT_EQ(mixed[0].item<double>(), 0.7);
  EXPECT_EQ(mixed[-1].item<double>(), 0.5);
}

}  // namespace
}  // namespace zorro
