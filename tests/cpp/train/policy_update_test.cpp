#include "zorro/train/policy_update.h"

#include <gtest/gtest.h>

#include "cpp/models/tiny_model.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

std::vector<Rollout> rollouts_of(const reference::OwnedSamples& samples, uint64_t seed = 5) {
  Random random(seed);
  std::vector<Rollout> rollouts;
  for (size_t i = 0; i < samples.tokens.size(); ++i) {
    Rollout rollout;
    rollout.token_ids = samples.tokens[i];
    rollout.scored_begin = rollout.prompt_length = samples.scored_begin[i];
    const double advantage = random.normal();
    for (int64_t t = 0; t < rollout.num_scored(); ++t) {
      rollout.loss_mask.push_back(1);
      rollout.advantages.push_back(advantage);
      rollout.old_logprobs.push_back(-3 + random.normal());
      rollout.ref_logprobs.push_back(-3 + random.normal());
    }
    rollout.id = std::to_string(i);
    rollout.line = static_cast<int64_t>(i) + 1;
    rollouts.push_back(std::move(rollout));
  }
  return rollouts;
}

std::vector<Rollout> ba_rollouts() {
  Random random(1);
  return rollouts_of(reference::batch_ba(random, 97));
}

Gradients gradients(CausalLM& model) {
  Gradients result;
  for (const Weight& weight : model.weights()) {
    EXPECT_TRUE(weight.slot->grad().defined()) << weight.name;
    result[weight.name] = weight.slot->grad().clone();
    weight.slot->mutable_grad().reset();
  }
  return result;
}

UpdateOptions options_with(int64_t parts, Sharing sharing = Sharing::kPrompts) {
  UpdateOptions options;
  options.micro_batches = {0, parts};
  options.forest.sharing = sharing;
  options.loss.entropy_coef = 0.01;
  return options;
}

TEST(PolicyUpdate, B07_GradientsDoNotDependOnTheCut) {
  const auto model = tiny_model();
  auto rollouts = ba_rollouts();
  rollouts.push_back(rollouts[2]);  // an identical row with another advantage counts too
  for (double& advantage : rollouts.back().advantages) advantage = -2;
  const UpdateMetrics whole =
      accumulate_gradients(*model, rollouts, options_with(1, Sharing::kNone));
  const Gradients truth = gradients(*model);
  for (const int64_t parts : {1, 2, 8})
    for (const Sharing sharing : {Sharing::kNone, Sharing::kPrompts, Sharing::kPrefixes}) {
      const UpdateMetrics metrics =
          accumulate_gradients(*model, rollouts, options_with(parts, sharing));
      EXPECT_EQ(metrics.num_micro_batches, parts);
      EXPECT_NEAR(metrics.loss, whole.loss, 1e-12);
      EXPECT_LT(gradient_error(gradients(*model), truth), 1e-9);
    }
  EXPECT_EQ(whole.loss_tokens, 35 + 7);
}

TEST(PolicyUpdate, MetricsCountTheWork) {
  const auto model = tiny_model();
  const UpdateMetrics metrics = accumulate_gradients(*model, ba_rollouts(), options_with(1));
  gradients(*model);
  EXPECT_EQ(metrics.packed_tokens, 9 + 3 + 12 + 35);
  EXPECT_EQ(metrics.replicated_tokens, 4 * 9 + 2 * 3 + 2 * 12 + 35);
  EXPECT_EQ(metrics.num_prompts, 3);
  EXPECT_EQ(metrics.num_samples, 8);
  EXPECT_EQ(metrics.scored_tokens, 35);
}

TEST(PolicyUpdate, B29_TokenMeanOverAnySplit) {
  // A loss of 10 on one token, 1 on nine, 4 on two: on-policy, the policy loss of a token is
  // -advantage.
  const auto model = tiny_model();
  reference::OwnedSamples samples;
  Random random(2);
  const double losses[] = {10, 1, 4};
  for (const int64_t length : {1, 9, 2})
    samples.add(reference::random_tokens(random, length + 3, 97), 3);
  auto rollouts = rollouts_of(samples);
  for (size_t i = 0; i < 3; ++i) {
    rollouts[i].old_logprobs.clear();
    rollouts[i].ref_logprobs.clear();
    for (double& advantage : rollouts[i].advantages) advantage = -losses[i];
  }
  for (const int64_t parts : {1, 2, 3}) {
    UpdateOptions options = options_with(parts);
    options.loss.entropy_coef = 0;
    const UpdateMetrics metrics = accumulate_gradients(*model, rollouts, options);
    EXPECT_NEAR(metrics.loss, 2.25, 1e-12);
    EXPECT_EQ(metrics.clip_fraction, 0);
    EXPECT_NEAR(metrics.mean_ratio, 1, 1e-12);
    gradients(*model);
  }
}

TEST(PolicyUpdate, B32_NothingLeftToTrainOn) {
  const auto model = tiny_model();
  auto rollouts = ba_rollouts();
  accumulate_gradients(*model, rollouts, options_with(1));
  const Gradients before = gradients(*model);
  auto more = rollouts;
  more.push_back(rollouts[0]);
  std::fill(more.back().loss_mask.begin(), more.back().loss_mask.end(), uint8_t{0});
  accumulate_gradients(*model, more, options_with(3));
  EXPECT_LT(gradient_error(gradients(*model), before), 1e-9);
  for (Rollout& rollout : rollouts)
    std::fill(rollout.loss_mask.begin(), rollout.loss_mask.end(), uint8_t{0});
  const UpdateMetrics none = accumulate_gradients(*model, rollouts, options_with(2));
  EXPECT_EQ(none.loss, 0);
  for (const auto& [name, gradient] : gradients(*model))
    EXPECT_EQ(gradient.abs().max().item<double>(), 0) << name;
}

TEST(PolicyUpdate, B33_MaskedTokensAreContextNotTargets) {
  const auto model = tiny_model();
  auto rollouts = ba_rollouts();
  Rollout& holes = rollouts[2];  // seven response tokens
  holes.loss_mask = {1, 1, 0, 0, 1, 1, 1};
  accumulate_gradients(*model, rollouts, options_with(1));
  const Gradients truth = gradients(*model);
  holes.advantages[2] = holes.advantages[3] = 1e6;
  holes.old_logprobs[2] = -1e6;
  const UpdateMetrics metrics = accumulate_gradients(*model, rollouts, options_with(1));
  EXPECT_EQ(metrics.loss_tokens, 33);
  EXPECT_EQ(gradient_error(gradients(*model), truth), 0);
  holes.token_ids[12] = (holes.token_ids[12] + 1) % 97;  // seen by the tokens after it
  accumulate_gradients(*model, rollouts, options_with(1));
  EXPECT_GT(gradient_error(gradients(*model), truth), 1e-6);
}

TEST(PolicyUpdate, ThreeUpdatesAreTheSameForEverySharing) {
  std::vector<at::Tensor> heads;
  for (const Sharing sharing : {Sharing::kNone, Sharing::kPrompts}) {
    const auto model = tiny_model();
    std::vector<at::Tensor> parameters;
    for (const Weight& weight : model->weights()) parameters.push_back(*weight.slot);
    AdamWOptions adam;
    adam.lr = 1e-3;
    AdamW optimizer(parameters, adam);
    const auto rollouts = ba_rollouts();
    double first = 0, last = 0;
    for (int update = 0; update < 3; ++update) {
      const UpdateMetrics metrics =
          policy_update(*model, optimizer, rollouts, options_with(2, sharing));
      EXPECT_GT(metrics.grad_norm, 0);
      (update == 0 ? first : last) = metrics.loss;
    }
    EXPECT_LT(last, first);
    heads.push_back(model->head_weight().detach());
  }
  EXPECT_TRUE(at::allclose(heads[0], heads[1], 1e-9, 1e-9));
}

TEST(PolicyUpdate, BadRolloutsAreNamed) {
  const auto model = tiny_model();
  const auto refused = [&](const auto& edit, const std::string& part, int64_t cap = 0) {
    auto rollouts = ba_rollouts();
    edit(rollouts);
    UpdateOptions options;
    options.micro_batches = {cap, 0};
    try {
      make_micro_batches(rollouts, model->config(), options);
      ADD_FAILURE() << part;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused([](auto& r) { r[1].advantages.clear(); }, "advantage");
  refused([](auto& r) { r[1].old_logprobs.clear(); }, "old_logprobs");
  refused([](auto& r) { r[1].token_ids[0] = 97; }, "97");
  refused([](auto&) {}, "17", 17);
}

}  // namespace
}  // namespace zorro
