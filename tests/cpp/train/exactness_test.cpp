#include "zorro/train/exactness.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpp/train/rollout_cases.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using testing::mixed_rollouts;
using testing::tiny_model;

at::Tensor doubles(std::vector<double> values) { return at::tensor(values, at::kDouble); }

/// Numbers of an arm with one token and the gradients given.
ArmNumbers numbers(double logprob, NamedTensors gradients) {
  ArmNumbers arm;
  arm.logprob = doubles({logprob});
  arm.entropy = doubles({0.5});
  arm.gradients = std::move(gradients);
  return arm;
}

ArmOptions naive_options() {
  ArmOptions options;
  options.forest.sharing = Sharing::kNone;
  return options;
}

TEST(ExactnessMeasure, GroupsGradientsByLayer) {
  EXPECT_EQ(gradient_group("model.layers.3.mlp.up_proj.weight"), "model.layers.3.");
  EXPECT_EQ(gradient_group("model.layers.12.self_attn.q_norm.weight"), "model.layers.12.");
  EXPECT_EQ(gradient_group("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(gradient_group("lm_head.weight"), "lm_head.weight");
}

TEST(ExactnessMeasure, LogprobErrorIsRelativeAboveOneAndAbsoluteBelow) {
  const ExactnessReport far = compare(numbers(-10.1, {}), numbers(-10, {}), at::kFloat);
  EXPECT_NEAR(far.logprob.value, 0.01, 1e-12);
  const ExactnessReport near = compare(numbers(-0.1001, {}), numbers(-0.1, {}), at::kFloat);
  EXPECT_NEAR(near.logprob.value, 1e-4, 1e-12);
  EXPECT_FALSE(near.passed());
}

TEST(ExactnessMeasure, GradientErrorIsMeasuredInItsLayer) {
  const NamedTensors expected{{"model.layers.0.a", doubles({3, 4})},
                              {"model.layers.0.zero", doubles({0, 0})},
                              {"lm_head.weight", doubles({1})}};
  NamedTensors found = expected;
  found[1].second = doubles({1e-6, 0});  // against 1e-3 of the layer's norm 5
  const ExactnessReport report = compare(numbers(-1, found), numbers(-1, expected), at::kDouble);
  EXPECT_NEAR(report.gradient.value, 1e-6 / 5e-3, 1e-12);
  EXPECT_EQ(report.worst_parameter, "model.layers.0.zero");
  EXPECT_EQ(report.smallest_parameter, "model.layers.0.zero");
  EXPECT_FALSE(report.passed());
}

TEST(ExactnessMeasure, NothingHidesNaN) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const NamedTensors good{{"a", doubles({1})}, {"b", doubles({1})}, {"c", doubles({1})}};
  NamedTensors bad = good;
  bad[1].second = doubles({nan});
  const ExactnessReport report = compare(numbers(-1, bad), numbers(-1, good), at::kFloat);
  EXPECT_FALSE(report.passed());
  EXPECT_EQ(report.worst_parameter, "b");
  EXPECT_FALSE(compare(numbers(nan, good), numbers(-1, good), at::kFloat).passed());
  EXPECT_FALSE(compare_to_truth(numbers(-1, bad), numbers(-1, good), numbers(-1, good)).passed());
}

TEST(ExactnessMeasure, TolerancesFollowTheDtypeAndTheScale) {
  const ArmNumbers arm = numbers(-1, {});
  EXPECT_EQ(compare(arm, arm, at::kDouble).logprob.tolerance, 1e-10);
  EXPECT_EQ(compare(arm, arm, at::kDouble).gradient.tolerance, 1e-9);
  EXPECT_EQ(compare(arm, arm, at::kFloat).logprob.tolerance, 1e-5);
  EXPECT_EQ(compare(arm, arm, at::kFloat, 10).gradient.tolerance, 1e-3);
  EXPECT_THROW(compare(arm, arm, at::kBFloat16), InvalidArgument);
}

TEST(ExactnessMeasure, Bfloat16IsHeldAgainstTheNaiveArmsOwnError) {
  const NamedTensors truth{{"a", doubles({1, 0})}, {"b", doubles({2})}};
  const NamedTensors naive{{"a", doubles({1.01, 0})}, {"b", doubles({2.02})}};
  NamedTensors arm = naive;
  const ArmNumbers exact = numbers(-1, truth), plain = numbers(-1.02, naive);
  EXPECT_NEAR(compare_to_truth(numbers(-1.02, arm), plain, exact).logprob.value, 1, 1e-9);
  EXPECT_TRUE(compare_to_truth(numbers(-1.024, arm), plain, exact).passed());
  EXPECT_FALSE(compare_to_truth(numbers(-1.026, arm), plain, exact).passed());
  arm[0].second = doubles({1.031, 0});  // one parameter beyond three times
  const ExactnessReport report = compare_to_truth(numbers(-1.02, arm), plain, exact);
  EXPECT_FALSE(report.gradient.within());
  EXPECT_EQ(report.worst_parameter, "a");
  EXPECT_NEAR(report.all_gradients->value, std::hypot(0.031, 0.02) / std::hypot(0.01, 0.02), 1e-9);
}

TEST(ExactnessMeasure, ArmsOfDifferentSizesAreRefused) {
  EXPECT_THROW(compare(numbers(-1, {}), numbers(-1, {{"a", doubles({1})}}), at::kFloat),
               InvalidArgument);
  ArmNumbers longer = numbers(-1, {});
  longer.logprob = doubles({-1, -2});
  EXPECT_THROW(compare(longer, numbers(-1, {}), at::kFloat), InvalidArgument);
}

TEST(ExactnessArm, DedupEqualsNaiveInEverySetting) {
  const auto model = tiny_model();
  const std::vector<Rollout> rollouts = mixed_rollouts();
  const ArmNumbers naive = run_arm(*model, rollouts, naive_options());
  EXPECT_EQ(naive.packed_tokens, naive.replicated_tokens);
  std::vector<ArmOptions> settings(8);
  settings[1].forest = {Sharing::kPrefixes, 1};
  settings[2].layout = Layout::kLeft;
  settings[3].layout = Layout::kRight;
  settings[4].layout = Layout::kBoth;
  settings[5].permute_seed = 7;
  settings[6].micro_batches = {0, 8};
  settings[7].forward.attention = AttentionPath::kComposed;
  settings[7].forward.head.mode = HeadMode::kNone;
  for (size_t i = 0; i < settings.size(); ++i) {
    const ArmNumbers arm = run_arm(*model, rollouts, settings[i]);
    const ExactnessReport report = compare(arm, naive, at::kDouble);
    EXPECT_TRUE(report.passed()) << "setting " << i << ": " << report.worst_parameter << " "
                                 << report.gradient.value << ", logprob " << report.logprob.value;
    EXPECT_NEAR(arm.loss, naive.loss, 1e-9);
    EXPECT_GT(report.smallest_norm, 0);
    EXPECT_GT(report.token_ratio, 1);
  }
}

TEST(ExactnessArm, CheckpointingChangesNothing) {
  const auto model = tiny_model();
  ArmOptions options;
  options.forward.checkpointing = true;
  const std::vector<Rollout> rollouts = mixed_rollouts();
  EXPECT_TRUE(compare(run_arm(*model, rollouts, options),
                      run_arm(*model, rollouts, naive_options()), at::kDouble)
                  .passed());
}

TEST(ExactnessArm, LeavesNoGradientsAndRepeatsBitForBit) {
  const auto model = tiny_model(at::kFloat);
  const std::vector<Rollout> rollouts = mixed_rollouts();
  const ArmNumbers first = run_arm(*model, rollouts, {});
  const ArmNumbers second = run_arm(*model, rollouts, {});
  for (const Weight& weight : model->weights()) EXPECT_FALSE(weight.slot->grad().defined());
  EXPECT_TRUE(first.logprob.equal(second.logprob));
  for (size_t i = 0; i < first.gradients.size(); ++i)
    EXPECT_TRUE(first.gradients[i].second.equal(second.gradients[i].second))
        << first.gradients[i].first;
}

TEST(ExactnessArm, LossFollowsTheSeedAndTheTrainingLoss) {
  const auto model = tiny_model();
  const std::vector<Rollout> rollouts = mixed_rollouts();
  ArmOptions seeded, training;
  seeded.loss_seed = 1;
  training.policy_loss = PolicyLossOptions{};
  const double plain = run_arm(*model, rollouts, {}).loss;
  EXPECT_NE(run_arm(*model, rollouts, seeded).loss, plain);
  ArmOptions naive = naive_options();
  naive.policy_loss = PolicyLossOptions{};
  const ArmNumbers dedup_training = run_arm(*model, rollouts, training);
  EXPECT_NE(dedup_training.loss, plain);
  EXPECT_TRUE(compare(dedup_training, run_arm(*model, rollouts, naive), at::kDouble).passed());
}

TEST(ExactnessArm, TrainingLossNeedsAdvantagesInEveryLine) {
  const auto model = tiny_model();
  std::vector<Rollout> rollouts = mixed_rollouts();
  ArmOptions options;
  options.policy_loss = PolicyLossOptions{};
  rollouts[0].advantages.clear();
  EXPECT_THROW(run_arm(*model, rollouts, options), InvalidArgument);
  for (Rollout& rollout : rollouts) rollout.advantages.clear();
  EXPECT_THROW(run_arm(*model, rollouts, options), InvalidArgument);
}

TEST(ExactnessArm, Bfloat16StaysWithinTheNaiveArmsError) {
  const auto model = tiny_model(at::kBFloat16), truth = tiny_model(at::kFloat);
  round_weights_to_bfloat16(*truth);
  const std::vector<Rollout> rollouts = mixed_rollouts();
  const ExactnessReport report =
      compare_to_truth(run_arm(*model, rollouts, {}), run_arm(*model, rollouts, naive_options()),
                       run_arm(*truth, rollouts, naive_options()));
  EXPECT_TRUE(report.passed()) << report.logprob.value << " " << report.gradient.value << " "
                               << report.worst_parameter;
}

TEST(ExactnessArm, ProgressReachesTheEndAndMayStopTheWork) {
  const auto model = tiny_model();
  const std::vector<Rollout> rollouts = mixed_rollouts();
  int64_t last = 0, total = 0;
  run_arm(*model, rollouts, {}, [&](int64_t done, int64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  });
  EXPECT_EQ(last, total);
  EXPECT_THROW(
      run_arm(*model, rollouts, {}, [](int64_t, int64_t) { throw std::runtime_error("stop"); }),
      std::runtime_error);
}

/// A fault of a forest must show far beyond the tolerance.
void expect_found(const std::function<void(PrefixForest&)>& fault) {
  const auto model = tiny_model();
  const std::vector<Rollout> rollouts = mixed_rollouts();
  ArmOptions broken;
  broken.edit_forest = fault;
  const ExactnessReport report = compare(run_arm(*model, rollouts, broken),
                                         run_arm(*model, rollouts, naive_options()), at::kDouble);
  EXPECT_GT(report.logprob.value, 100 * report.logprob.tolerance);
  EXPECT_GT(report.gradient.value, 100 * report.gradient.tolerance);
}

TEST(ExactnessMutation, LabelFromThePackedNeighbourIsFound) {
  expect_found([](PrefixForest& forest) {
    for (const Node& node : forest.nodes)
      if (node.parent >= 0) forest.previous[static_cast<size_t>(node.begin)] = node.begin - 1;
  });
}

TEST(ExactnessMutation, DroppedMaskRectangleIsFound) {
  expect_found([](PrefixForest& forest) {
    for (Node& node : forest.nodes) {
      for (int64_t token = node.begin; token < node.end; ++token)
        forest.visible_until[static_cast<size_t>(token)] = node.end;
      node.subtree_end = node.end;
      node.parent = -1;
      node.depth = 0;
    }
  });
}

TEST(ExactnessMutation, ShiftedPositionIsFound) {
  expect_found([](PrefixForest& forest) {
    for (const Node& node : forest.nodes)
      if (node.parent >= 0)
        for (int64_t token = node.begin; token < node.end; ++token)
          ++forest.positions[static_cast<size_t>(token)];
  });
}

}  // namespace
}  // namespace zorro
