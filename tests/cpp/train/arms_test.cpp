#include "zorro/train/arms.h"

#include <gtest/gtest.h>

#include <set>

#include "cpp/train/rollout_cases.h"
#include "zorro/core/error.h"
#include "zorro/train/model_cost.h"

namespace zorro {
namespace {

using testing::mixed_rollouts;
using testing::tiny_config;
using testing::tiny_model;

constexpr RolloutShape kShape{2, 4, 24, 6};

std::vector<at::Tensor> copy_weights(CausalLM& model) {
  std::vector<at::Tensor> copies;
  for (const Weight& weight : model.weights()) copies.push_back(weight.slot->detach().clone());
  return copies;
}

TEST(Race, ReportsWorkAndBoundOfBothArms) {
  const auto model = tiny_model(at::kFloat);
  RaceOptions options;
  options.num_pairs = 2;
  options.warm_up = 0;
  const RaceResult result = race(*model, random_rollouts(kShape, 97, 1), options);
  EXPECT_EQ(result.naive.work.tokens, 2 * 4 * 30);
  EXPECT_EQ(result.dedup.work.tokens, 2 * (24 + 4 * 6));
  EXPECT_EQ(result.naive.work.predictors, 2 * 4 * 6);
  EXPECT_EQ(result.dedup.work.predictors, 2 * (1 + 4 * 5));
  EXPECT_DOUBLE_EQ(result.token_ratio, 240.0 / 96.0);
  const ModelCost cost_model = model_cost(tiny_config());
  EXPECT_DOUBLE_EQ(result.naive.flops.total(), cost(result.naive.work, cost_model).total());
  EXPECT_DOUBLE_EQ(result.bound, result.naive.flops.total() / result.dedup.flops.total());
  EXPECT_EQ(result.dedup.runs.size(), 2U);
  EXPECT_LE(result.slowest_speedup, result.speedup);
  EXPECT_GE(result.fastest_speedup, result.speedup);
  EXPECT_GT(result.dedup.median().update(), 0);
  EXPECT_GT(result.dedup.median().optimizer, 0);
}

TEST(Race, LeavesTheModelAsItWas) {
  const auto model = tiny_model(at::kFloat);
  const std::vector<at::Tensor> before = copy_weights(*model);
  RaceOptions options;
  options.num_pairs = 1;
  race(*model, mixed_rollouts(), options);
  const std::vector<at::Tensor> after = copy_weights(*model);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].equal(after[i]));
  for (const Weight& weight : model->weights()) EXPECT_FALSE(weight.slot->grad().defined());
}

TEST(Race, ArmsTakeTurnsAndReportProgress) {
  const auto model = tiny_model(at::kFloat);
  RaceOptions options;
  options.num_pairs = 2;
  options.warm_up = 1;
  std::vector<int64_t> seen;
  race(*model, mixed_rollouts(), options, [&seen](int64_t done, int64_t all) {
    EXPECT_EQ(all, 6);
    seen.push_back(done);
  });
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Race, BadOptionsAreRefused) {
  const auto model = tiny_model(at::kFloat);
  RaceOptions options;
  options.num_pairs = 0;
  EXPECT_THROW(race(*model, mixed_rollouts(), options), InvalidArgument);
  std::vector<Rollout> rollouts = mixed_rollouts();
  rollouts[0].token_ids[0] = 1000;
  EXPECT_THROW(race(*model, rollouts, {}), InvalidArgument);
}

TEST(OperatorCount, IsTheSameInBothArmsWhenNothingIsShared) {
  const auto model = tiny_model(at::kFloat);
  const std::vector<Rollout> rollouts = random_rollouts({3, 1, 12, 5}, 97, 1);
  RaceOptions dedup, naive;
  naive.forest.sharing = Sharing::kNone;
  const auto counts = count_operators(*model, rollouts, dedup);
  EXPECT_GT(counts.size(), 50U);
  EXPECT_EQ(counts, count_operators(*model, rollouts, naive));
}

TEST(OperatorCount, SeesADifferenceInShapesAlone) {
  const auto model = tiny_model(at::kFloat);
  const auto one = count_operators(*model, random_rollouts({1, 1, 12, 5}, 97, 1), {});
  const auto other = count_operators(*model, random_rollouts({1, 1, 13, 5}, 97, 1), {});
  EXPECT_NE(one, other);
}

TEST(RandomRollouts, SharePromptsAndRepeat) {
  const std::vector<Rollout> rollouts = random_rollouts(kShape, 97, 4);
  ASSERT_EQ(rollouts.size(), 8U);
  std::set<std::vector<int64_t>> prompts;
  for (const Rollout& rollout : rollouts) {
    EXPECT_EQ(rollout.token_ids.size(), 30U);
    EXPECT_EQ(rollout.num_scored(), 6);
    prompts.emplace(rollout.token_ids.begin(), rollout.token_ids.begin() + 24);
  }
  EXPECT_EQ(prompts.size(), 2U);
  EXPECT_EQ(random_rollouts(kShape, 97, 4)[5].token_ids, rollouts[5].token_ids);
  EXPECT_NE(random_rollouts(kShape, 97, 5)[5].token_ids, rollouts[5].token_ids);
  EXPECT_THROW(random_rollouts({0, 1, 1, 1}, 97, 1), InvalidArgument);
}

TEST(MachineRates, ArePositive) {
  EXPECT_GT(measure_mm_rate(at::kFloat), 1e8);
  const AttentionTimes times =
      measure_naive_attention(tiny_config(), 2, 32, at::kFloat, AttentionPath::kLevels);
  EXPECT_GT(times.arm, 0);
  EXPECT_GT(times.plain, 0);
}

}  // namespace
}  // namespace zorro
