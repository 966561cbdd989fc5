#include "zorro/train/policy_loss.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "reference/loss_oracle.h"
#include "zorro/core/error.h"
#include "zorro/core/random.h"

namespace zorro {
namespace {

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

at::Tensor vector_of(const std::vector<double>& values, at::ScalarType type) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<double>());
  return tensor.to(type);
}

std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.detach().to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

void expect_near(const at::Tensor& tensor, const std::vector<double>& want, double tolerance) {
  const std::vector<double> values = values_of(tensor);
  ASSERT_EQ(values.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(values[i], want[i], tolerance * std::max(1.0, std::abs(want[i]))) << i;
  }
}

PolicyLossInput input_of(const reference::LossCase& c, at::ScalarType type) {
  PolicyLossInput input;
  input.logprob = vector_of(c.logprob, type).requires_grad_();
  input.entropy = vector_of(c.entropy, type).requires_grad_();
  input.old_logprob = vector_of(c.old_logprob, type);
  input.ref_logprob = vector_of(c.ref_logprob, type);
  input.advantage = vector_of(c.advantage, type);
  std::vector<double> mask(c.mask.begin(), c.mask.end());
  input.mask = vector_of(mask, at::kBool);
  return input;
}

PolicyLossOptions options_of(const reference::LossCase& c) {
  PolicyLossOptions options;
  options.clip_low = c.clip_low;
  options.clip_high = c.clip_high;
  options.kl = c.kl == 0 ? KlKind::kNone : c.kl == 1 ? KlKind::kK1 : KlKind::kK3;
  options.kl_coef = c.kl_coef;
  options.entropy_coef = c.entropy_coef;
  return options;
}

reference::LossCase random_loss(uint64_t seed, size_t tokens, int kl) {
  Random random(seed);
  reference::LossCase c;
  for (size_t i = 0; i < tokens; ++i) {
    c.logprob.push_back(-std::abs(random.normal()));
    c.entropy.push_back(std::abs(random.normal()));
    c.old_logprob.push_back(c.logprob.back() + 0.3 * random.normal());
    c.ref_logprob.push_back(c.logprob.back() + 0.5 * random.normal());
    c.advantage.push_back(random.normal());
    c.mask.push_back(random.below(4) != 0);
  }
  c.denominator = 31;
  c.clip_low = 0.2;
  c.clip_high = 0.28;
  c.kl = kl;
  c.kl_coef = 0.05;
  c.entropy_coef = 0.01;
  return c;
}

/// Advantage -loss at ratio 1: every token's loss is the given number.
reference::LossCase on_policy(const std::vector<double>& losses) {
  reference::LossCase c;
  for (const double loss : losses) {
    c.logprob.push_back(-1);
    c.entropy.push_back(0.5);
    c.old_logprob.push_back(-1);
    c.ref_logprob.push_back(-1);
    c.advantage.push_back(-loss);
    c.mask.push_back(true);
  }
  return c;
}

TEST(PolicyLoss, MatchesTheOracle) {
  for (const int kl : {0, 1, 3}) {
    for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
      const double tolerance = type == at::kDouble ? 1e-12 : 1e-5;
      const reference::LossCase c = random_loss(2, 60, kl);
      const reference::LossAnswer want = reference::loss_oracle(c);
      const PolicyLossInput input = input_of(c, type);
      const PolicyLossResult got = policy_loss(input, 31, options_of(c));
      EXPECT_NEAR(got.loss.item<double>(), want.loss, tolerance);
      EXPECT_NEAR(got.policy_sum, want.policy_sum, 30 * tolerance);
      EXPECT_NEAR(got.kl_sum, want.kl_sum, 30 * tolerance);
      EXPECT_NEAR(got.entropy_sum, want.entropy_sum, 30 * tolerance);
      EXPECT_NEAR(got.approx_kl_sum, want.approx_kl_sum, 30 * tolerance);
      EXPECT_NEAR(got.ratio_sum, want.ratio_sum, 30 * tolerance);
      EXPECT_EQ(got.clipped_sum, want.clipped_sum);
      EXPECT_GT(got.clipped_sum, 0);
      EXPECT_EQ(got.num_tokens, want.num_tokens);
      got.loss.backward();
      expect_near(input.logprob.grad(), want.logprob_grad, tolerance);
      expect_near(input.entropy.grad(), want.entropy_grad, tolerance);
    }
  }
}

TEST(PolicyLoss, GradientsMatchCentralDifferences) {
  reference::LossCase c = random_loss(3, 20, 3);
  const PolicyLossInput input = input_of(c, at::kDouble);
  policy_loss(input, 31, options_of(c)).loss.backward();
  const std::vector<double> gradient = values_of(input.logprob.grad());
  const double step = 1e-6;
  const auto loss_at = [&](size_t token, double shift) {
    reference::LossCase moved = c;
    moved.logprob[token] += shift;
    return policy_loss(input_of(moved, at::kDouble), 31, options_of(c)).loss.item<double>();
  };
  for (size_t token = 0; token < gradient.size(); ++token) {
    const double slope = (loss_at(token, step) - loss_at(token, -step)) / (2 * step);
    EXPECT_NEAR(gradient[token], slope, 1e-8) << token;
  }
}

TEST(PolicyLoss, OnPolicyNothingIsClippedAndKlIsZero) {
  PolicyLossInput input = input_of(on_policy({1, -2, 3}), at::kFloat);
  input.old_logprob = input.logprob.detach();
  const PolicyLossResult result = policy_loss(input, 3);
  EXPECT_EQ(result.clipped_sum, 0);
  EXPECT_EQ(result.kl_sum, 0);
  EXPECT_EQ(result.approx_kl_sum, 0);
  EXPECT_EQ(result.ratio_sum, 3);
  result.loss.backward();
  expect_near(input.logprob.grad(), {1.0 / 3, -2.0 / 3, 1}, 1e-7);
}

TEST(PolicyLoss, B29_TokenMeanIsTheSameInEverySplit) {
  const std::vector<double> first{10}, second(9, 1.0), third{4, 4};
  const auto joined = [](std::initializer_list<std::vector<double>> parts) {
    std::vector<double> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  using Split = std::vector<std::vector<double>>;
  std::vector<double> whole_gradient;
  for (const Split& split :
       {Split{joined({first, second, third})}, Split{joined({first, second}), third},
        Split{first, second, third}, Split{third, first, second}}) {
    double loss = 0, policy_sum = 0;
    int64_t tokens = 0;
    std::vector<double> gradient;
    for (const auto& part : split) {
      const PolicyLossInput input = input_of(on_policy(part), at::kFloat);
      const PolicyLossResult result = policy_loss(input, 12);
      result.loss.backward();
      const std::vector<double> own = values_of(input.logprob.grad());
      gradient.insert(gradient.end(), own.begin(), own.end());
      loss += result.loss.item<double>();
      policy_sum += result.policy_sum;
      tokens += result.num_tokens;
    }
    EXPECT_NEAR(loss, 2.25, 1e-6);
    EXPECT_NEAR(policy_sum / static_cast<double>(tokens), 2.25, 1e-6);
    std::sort(gradient.begin(), gradient.end());
    if (whole_gradient.empty()) whole_gradient = gradient;
    EXPECT_EQ(gradient, whole_gradient);
  }
  EXPECT_NEAR(
      policy_loss(input_of(on_policy(joined({first, second})), at::kFloat), 10).loss.item<double>(),
      1.9, 1e-6);
}

TEST(PolicyLoss, B31_K3KeepsValueAndSlopeFinite) {
  const std::vector<double> d{0, 0.1, -0.5, 1, 20, 89, 100, 1000};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    reference::LossCase c = on_policy(std::vector<double>(d.size(), 0.0));
    c.logprob.assign(d.size(), 0.0);
    c.old_logprob = c.logprob;
    c.ref_logprob = d;
    c.kl = 3;
    c.kl_coef = 1;
    const double rounding = type == at::kFloat ? 1e-6 : 1e-3;
    const std::vector<double> value{0, 0.005171, 0.106531, 0.718282};
    const std::vector<double> slope{0, -0.105171, 0.393469, -1.718282};
    double last = -1;
    for (size_t i = 0; i < d.size(); ++i) {
      PolicyLossInput input = input_of(c, type);
      input.mask.zero_();
      input.mask[static_cast<int64_t>(i)] = true;
      const PolicyLossResult result = policy_loss(input, 1, options_of(c));
      result.loss.backward();
      const std::vector<double> gradient = values_of(input.logprob.grad());
      if (i < value.size()) {
        EXPECT_NEAR(result.kl_sum, value[i], rounding);
        EXPECT_NEAR(gradient[i], slope[i], rounding * 4);
      } else {
        EXPECT_TRUE(std::isfinite(result.kl_sum)) << d[i];
        EXPECT_GT(result.kl_sum, last);
        last = result.kl_sum;
        // Still towards the reference. float16 gradients end at 65504: what it holds there is its
        // own infinity.
        EXPECT_LT(gradient[i], -1) << d[i];
        EXPECT_TRUE(type == at::kHalf || std::isfinite(gradient[i])) << d[i];
      }
      for (size_t other = 0; other < d.size(); ++other) {
        EXPECT_TRUE(other == i || gradient[other] == 0);
      }
    }
  }
}

TEST(PolicyLoss, ExtremeRatiosStayFinite) {
  for (const double log_ratio : {21.0, 100.0, 1000.0, -100.0, -1000.0}) {
    for (const double advantage : {1.0, -1.0}) {
      reference::LossCase c = on_policy({-advantage});
      c.old_logprob = {c.logprob[0] - log_ratio};
      const PolicyLossInput input = input_of(c, at::kFloat);
      const PolicyLossResult result = policy_loss(input, 1);
      result.loss.backward();
      const double gradient = input.logprob.grad().item<double>();
      EXPECT_TRUE(std::isfinite(result.loss.item<double>()));
      EXPECT_TRUE(std::isfinite(gradient));
      // A negative advantage with a large ratio pushes the log-probability down; the other cases
      // are clipped or 0.
      EXPECT_EQ(gradient > 1e8, advantage < 0 && log_ratio > 0) << log_ratio << " " << advantage;
    }
  }
}

TEST(PolicyLoss, B32_NothingToTrainOnGivesZeroLossAndZeroGradients) {
  for (const int64_t denominator : {0, 12}) {
    for (const double kl_coef : {0.0, 0.5}) {
      for (const size_t tokens : {size_t{0}, size_t{4}}) {
        reference::LossCase c = on_policy(std::vector<double>(tokens, 3.0));
        c.mask.assign(tokens, false);
        c.logprob.assign(tokens, kNotANumber);
        c.kl = 3;
        c.kl_coef = kl_coef;
        c.entropy_coef = 0.1;
        const PolicyLossInput input = input_of(c, at::kFloat);
        const PolicyLossResult result = policy_loss(input, denominator, options_of(c));
        EXPECT_EQ(result.loss.item<double>(), 0);
        EXPECT_EQ(result.policy_sum, 0);
        EXPECT_EQ(result.kl_sum, 0);
        EXPECT_EQ(result.num_tokens, 0);
        result.loss.backward();
        ASSERT_TRUE(input.logprob.grad().defined());
        EXPECT_TRUE(at::equal(input.logprob.grad(), at::zeros_like(input.logprob)));
      }
    }
  }
}

TEST(PolicyLoss, B32_AnEmptyRowLeavesTheOthersUnchanged) {
  reference::LossCase c = random_loss(7, 12, 3);
  for (size_t i = 0; i < 4; ++i) c.mask[i] = false;
  const PolicyLossInput with = input_of(c, at::kFloat);
  const PolicyLossResult all = policy_loss(with, 31, options_of(c));
  all.loss.backward();
  for (auto* values : {&c.logprob, &c.entropy, &c.old_logprob, &c.ref_logprob, &c.advantage}) {
    values->erase(values->begin(), values->begin() + 4);
  }
  c.mask.erase(c.mask.begin(), c.mask.begin() + 4);
  const PolicyLossInput without = input_of(c, at::kFloat);
  const PolicyLossResult rest = policy_loss(without, 31, options_of(c));
  rest.loss.backward();
  EXPECT_EQ(all.loss.item<double>(), rest.loss.item<double>());
  EXPECT_TRUE(at::equal(with.logprob.grad().narrow(0, 4, 8), without.logprob.grad()));
  EXPECT_TRUE(at::equal(with.logprob.grad().narrow(0, 0, 4), at::zeros({4})));
}

TEST(PolicyLoss, B33_MaskedTokensAddExactlyNothing) {
  reference::LossCase c = random_loss(9, 7, 3);
  c.mask = {true, true, false, false, true, true, true};
  c.denominator = 5;
  const reference::LossAnswer want = reference::loss_oracle(c);
  for (const double bad : {1e3, kNotANumber, std::numeric_limits<double>::infinity()}) {
    reference::LossCase spoiled = c;
    for (auto* values : {&spoiled.logprob, &spoiled.entropy, &spoiled.old_logprob,
                         &spoiled.ref_logprob, &spoiled.advantage}) {
      (*values)[2] = bad;
      (*values)[3] = -bad;
    }
    const PolicyLossInput input = input_of(spoiled, at::kDouble);
    const PolicyLossResult got = policy_loss(input, 5, options_of(c));
    EXPECT_NEAR(got.loss.item<double>(), want.loss, 1e-12);
    EXPECT_NEAR(got.kl_sum, want.kl_sum, 1e-12);
    EXPECT_NEAR(got.entropy_sum, want.entropy_sum, 1e-12);
    EXPECT_EQ(got.num_tokens, 5);
    got.loss.backward();
    expect_near(input.logprob.grad(), want.logprob_grad, 1e-12);
    expect_near(input.entropy.grad(), want.entropy_grad, 1e-12);
  }
}

TEST(PolicyLoss, B33_AFillerRowWithoutAdvantageOutsideTheMaskChangesNothing) {
  reference::LossCase c = random_loss(10, 9, 0);
  c.entropy_coef = 0;
  const double before = policy_loss(input_of(c, at::kDouble), 7, options_of(c)).loss.item<double>();
  for (int i = 0; i < 3; ++i) {
    for (auto* values : {&c.logprob, &c.entropy, &c.old_logprob, &c.ref_logprob}) {
      values->push_back(-0.5);
    }
    c.advantage.push_back(0);
    c.mask.push_back(i == 0);  // an advantage of 0 adds nothing even inside the mask
  }
  EXPECT_EQ(policy_loss(input_of(c, at::kDouble), 7, options_of(c)).loss.item<double>(), before);
}

TEST(PolicyLoss, AddsUpOverMicroBatches) {
  const reference::LossCase c = random_loss(12, 40, 3);
  const PolicyLossInput whole = input_of(c, at::kFloat);
  const PolicyLossResult all = policy_loss(whole, 31, options_of(c));
  all.loss.backward();
  double loss = 0, kl = 0, ratio = 0;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 13}, {13, 14}, {14, 40}}) {
    PolicyLossInput part = input_of(c, at::kFloat);
    const at::Tensor logprob = part.logprob;
    for (at::Tensor* tensor : {&part.logprob, &part.entropy, &part.old_logprob, &part.ref_logprob,
                               &part.advantage, &part.mask}) {
      *tensor = tensor->narrow(0, begin, end - begin);
    }
    const PolicyLossResult result = policy_loss(part, 31, options_of(c));
    result.loss.backward();
    EXPECT_TRUE(at::equal(logprob.grad().narrow(0, begin, end - begin),
                          whole.logprob.grad().narrow(0, begin, end - begin)));
    loss += result.loss.item<double>();
    kl += result.kl_sum;
    ratio += result.ratio_sum;
  }
  EXPECT_NEAR(loss, all.loss.item<double>(), 1e-12);
  EXPECT_NEAR(kl, all.kl_sum, 1e-12);
  EXPECT_NEAR(ratio, all.ratio_sum, 1e-12);
}

TEST(PolicyLoss, WithoutAReferenceThereIsNoKl) {
  reference::LossCase c = random_loss(13, 10, 3);
  PolicyLossInput input = input_of(c, at::kDouble);
  input.ref_logprob = at::Tensor();
  const PolicyLossResult result = policy_loss(input, 31, options_of(c));
  c.kl = 0;
  EXPECT_NEAR(result.loss.item<double>(), reference::loss_oracle(c).loss, 1e-12);
  EXPECT_EQ(result.kl_sum, 0);
}

TEST(PolicyLoss, RefusesWhatDoesNotFit) {
  const reference::LossCase c = random_loss(1, 4, 3);
  const auto refused = [&](at::Tensor PolicyLossInput::* member, const at::Tensor& bad) {
    PolicyLossInput input = input_of(c, at::kFloat);
    input.*member = bad;
    EXPECT_THROW(policy_loss(input, 4), InvalidArgument) << bad.toString();
  };
  refused(&PolicyLossInput::logprob, at::Tensor());
  refused(&PolicyLossInput::logprob, at::zeros({2, 2}));
  refused(&PolicyLossInput::logprob, at::zeros({4}, at::kLong));
  refused(&PolicyLossInput::entropy, at::zeros({3}));
  refused(&PolicyLossInput::old_logprob, at::Tensor());
  refused(&PolicyLossInput::ref_logprob, at::zeros({5}));
  refused(&PolicyLossInput::advantage, at::zeros({4}, at::kLong));
  refused(&PolicyLossInput::advantage, at::empty({4}, at::device(at::kMeta)));
  refused(&PolicyLossInput::mask, at::ones({4}));
  const auto refused_options = [&](int64_t denominator, const PolicyLossOptions& options) {
    EXPECT_THROW(policy_loss(input_of(c, at::kFloat), denominator, options), InvalidArgument);
  };
  refused_options(-1, {});
  refused_options(4, {.clip_low = -0.1});
  refused_options(4, {.clip_low = 1.5});
  refused_options(4, {.clip_high = -0.1});
  refused_options(4, {.kl_coef = kNotANumber});
  refused_options(4, {.entropy_coef = kNotANumber});
}

}  // namespace
}  // namespace zorro
