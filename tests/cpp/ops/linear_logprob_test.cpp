#include "zorro/ops/linear_logprob.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "cpp/ops/linear_logprob_cases.h"
#include "zorro/core/error.h"

namespace zorro::head {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr HeadMode kModes[] = {HeadMode::kNone, HeadMode::kCompute, HeadMode::kMemory};

/// A vocabulary of one-hot rows: the hidden rows are the logits.
LogprobResult of_logits(const at::Tensor& logits, const std::vector<int64_t>& label,
                        double temperature, HeadMode mode = HeadMode::kMemory) {
  std::vector<int64_t> row(label.size());
  for (size_t i = 0; i < row.size(); ++i)
    row[i] = std::min<int64_t>(static_cast<int64_t>(i), logits.size(0) - 1);
  return linear_logprob(logits, at::eye(logits.size(1), logits.options()), to_tensor(row),
                        to_tensor(label), at::scalar_tensor(temperature, at::kDouble), {mode});
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& refusal) {
    return refusal.what();
  }
  return "nothing was thrown";
}

void expect_oracle(const CaseOptions& options, uint64_t seed, at::ScalarType type,
                   const LinearLogprobOptions& head, double tolerance, double gradient_tolerance) {
  const reference::HeadCase c = random_case(seed, options, type);
  const reference::HeadAnswer want = reference::head_oracle(c);
  const HeadRun got = HeadTensors(c, type).run(head);
  EXPECT_LE(error(got.logprob, want.logprob), tolerance);
  EXPECT_LE(error(got.entropy, want.entropy), tolerance);
  EXPECT_LE(error(got.hidden_grad, want.hidden_grad), gradient_tolerance);
  EXPECT_LE(error(got.weight_grad, want.weight_grad), gradient_tolerance);
  EXPECT_EQ(got.logprob.scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
  EXPECT_EQ(got.hidden_grad.scalar_type(), type);
  EXPECT_EQ(got.weight_grad.scalar_type(), type);
}

TEST(LinearLogprob, MatchesTheOracleInEveryModeAndType) {
  for (const HeadMode mode : kModes) {
    for (const int64_t temperatures : {1, 3}) {
      for (const int64_t budget : {int64_t{1}, int64_t{100}, int64_t{64} << 20}) {
        SCOPED_TRACE(testing::Message() << "mode " << static_cast<int>(mode) << ", temperatures "
                                        << temperatures << ", budget " << budget);
        CaseOptions options;
        options.temperatures = temperatures;
        expect_oracle(options, 3, at::kDouble, {mode, budget}, 1e-12, 1e-12);
        expect_oracle(options, 4, at::kFloat, {mode, budget}, 1e-6, 2e-6);
        // bfloat16 gradients are rounded once, at the end: half a unit of 2^-8.
        expect_oracle(options, 5, at::kBFloat16, {mode, budget}, 2e-6, 1.0 / 256);
      }
    }
  }
}

TEST(LinearLogprob, MatchesTheOracleOnRandomShapes) {
  EXPECT_TRUE(rc::check("linear_logprob == oracle", [] {
    CaseOptions options;
    options.hidden_rows = *rc::gen::inRange<int64_t>(1, 9);
    options.width = *rc::gen::inRange<int64_t>(1, 9);
    options.vocabulary = *rc::gen::inRange<int64_t>(1, 40);
    options.tokens = *rc::gen::inRange<int64_t>(0, 40);
    options.temperatures = *rc::gen::inRange<int64_t>(1, 4);
    const HeadMode mode =
        *rc::gen::elementOf(std::vector<HeadMode>(std::begin(kModes), std::end(kModes)));
    const int64_t budget = *rc::gen::inRange<int64_t>(1, 4000);
    const reference::HeadCase c =
        random_case(*rc::gen::arbitrary<uint64_t>(), options, at::kDouble);
    const reference::HeadAnswer want = reference::head_oracle(c);
    const HeadRun got = HeadTensors(c, at::kDouble).run({mode, budget});
    RC_ASSERT(error(got.logprob, want.logprob) < 1e-12);
    RC_ASSERT(error(got.entropy, want.entropy) < 1e-12);
    RC_ASSERT(error(got.hidden_grad, want.hidden_grad) < 1e-11);
    RC_ASSERT(error(got.weight_grad, want.weight_grad) < 1e-11);
  }));
}

TEST(LinearLogprob, GradientsMatchCentralDifferences) {
  CaseOptions options;
  options.temperatures = 3;
  const HeadTensors tensors(random_case(11, options, at::kDouble), at::kDouble);
  const auto loss = [&](const at::Tensor& hidden, const at::Tensor& weight) {
    const LogprobResult out = linear_logprob(hidden, weight, tensors.row, tensors.label,
                                             tensors.temperature, {HeadMode::kMemory, 200});
    return out.logprob.mul(tensors.logprob_grad).sum().item<double>() +
           out.entropy.mul(tensors.entropy_grad).sum().item<double>();
  };
  const HeadRun run = tensors.run({HeadMode::kMemory, 200});
  const double step = 1e-5;
  const auto check = [&](const at::Tensor& gradient, bool of_hidden) {
    const at::Tensor& at_point = of_hidden ? tensors.hidden : tensors.weight;
    for (int64_t i = 0; i < at_point.numel(); ++i) {
      at::Tensor up = at_point.clone(), down = at_point.clone();
      up.mutable_data_ptr<double>()[i] += step;
      down.mutable_data_ptr<double>()[i] -= step;
      const double slope = of_hidden ? loss(up, tensors.weight) - loss(down, tensors.weight)
                                     : loss(tensors.hidden, up) - loss(tensors.hidden, down);
      EXPECT_NEAR(gradient.const_data_ptr<double>()[i], slope / (2 * step), 1e-8);
    }
  };
  check(run.hidden_grad, true);
  check(run.weight_grad, false);
}

TEST(LinearLogprob, MatchesGoldenNumbers) {
  const at::Tensor logits = to_tensor({2, 1, 0}, {1, 3}, at::kDouble);
  struct Golden {
    double temperature, logprob, entropy;
  };
  for (const Golden& golden : {Golden{1, -0.407606, 0.832396}, Golden{0.6, -0.202573, 0.556749},
                               Golden{0.5, -0.142932, 0.441057}, Golden{2, -0.680270, 1.020191}}) {
    const LogprobResult out = of_logits(logits, {0, 1}, golden.temperature);
    const std::vector<double> logprob = to_vector(out.logprob);
    EXPECT_NEAR(logprob[0], golden.logprob, 1e-6) << golden.temperature;
    EXPECT_NEAR(logprob[1], golden.logprob - 1 / golden.temperature, 1e-6);
    EXPECT_NEAR(out.entropy[0].item<double>(), golden.entropy, 1e-6) << golden.temperature;
  }
}

TEST(LinearLogprob, B22_AZeroProbabilityAddsNothing) {
  for (const HeadMode mode : kModes) {
    for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      // Rows against the identity would multiply 0 by -inf: hidden 1 against weights that are the
      // logits.
      const auto entropy_of = [&](const std::vector<double>& logits, const at::Tensor& hidden) {
        const auto size = static_cast<int64_t>(logits.size());
        const LogprobResult out =
            linear_logprob(hidden, to_tensor(logits, {size, 1}, type), to_tensor({0}),
                           to_tensor({0}), at::scalar_tensor(1.0), {mode});
        out.logprob.sum().add(out.entropy.sum()).backward();
        return out.entropy.item<double>();
      };
      const auto one = [&] { return to_tensor({1}, {1, 1}, type).requires_grad_(); };
      EXPECT_EQ(entropy_of({0, -kInfinity}, one()), 0);
      EXPECT_NEAR(entropy_of({0, 0, -kInfinity}, one()), 0.693147, 1e-6);
      EXPECT_EQ(entropy_of({65504, -65504}, one()), 0);
      EXPECT_TRUE(std::isnan(entropy_of({-kInfinity, -kInfinity}, one())));
    }
  }
}

TEST(LinearLogprob, B22_GradientsOfAnInfiniteLogitAreFinite) {
  for (const HeadMode mode : kModes) {
    // Column 1 has the logit -inf by overflow of a finite product, so that its weight's gradient is
    // 0 times finite.
    const at::Tensor hidden = to_tensor({1e30, 1}, {1, 2}, at::kFloat).requires_grad_();
    const at::Tensor weight =
        to_tensor({0, 1, -1e30, 1, 0, 1}, {3, 2}, at::kFloat).requires_grad_();
    const LogprobResult out = linear_logprob(hidden, weight, to_tensor({0}), to_tensor({0}),
                                             at::scalar_tensor(1.0), {mode});
    EXPECT_NEAR(out.entropy.item<double>(), 0.693147, 1e-6);
    out.logprob.sum().add(out.entropy.sum()).backward();
    EXPECT_TRUE(hidden.grad().isfinite().all().item<bool>());
    EXPECT_TRUE(weight.grad().isfinite().all().item<bool>());
    EXPECT_TRUE(weight.grad()[1].eq(0).all().item<bool>());
  }
}

TEST(LinearLogprob, B22_ABadRowStaysAlone) {
  for (const HeadMode mode : kModes) {
    const at::Tensor hidden = to_tensor({NAN, 1, 2}, {3, 1}, at::kFloat).requires_grad_();
    const at::Tensor weight = to_tensor({1, 2, 3, -1}, {4, 1}, at::kFloat).requires_grad_();
    const LogprobResult out = linear_logprob(hidden, weight, to_tensor({0, 1, 2}),
                                             to_tensor({0, 1, 2}), at::scalar_tensor(1.0), {mode});
    EXPECT_TRUE(std::isnan(out.logprob[0].item<double>()));
    EXPECT_TRUE(out.logprob.narrow(0, 1, 2).isfinite().all().item<bool>());
    // No gradient is asked of the bad row, so it must not reach the weight.
    out.logprob.narrow(0, 1, 2).sum().backward();
    EXPECT_TRUE(weight.grad().isfinite().all().item<bool>());
    EXPECT_EQ(hidden.grad()[0].item<double>(), 0);
  }
}

TEST(LinearLogprob, B23_EntropyGradientIsRightAndNothingIsOverwritten) {
  for (const HeadMode mode : kModes) {
    const at::Tensor hidden = to_tensor({2, 1, 0}, {1, 3}, at::kDouble).requires_grad_();
    const at::Tensor weight = at::eye(3, at::kDouble).requires_grad_();
    const at::Tensor before = hidden.detach().clone();
    const LogprobResult out = linear_logprob(hidden, weight, to_tensor({0}), to_tensor({0}),
                                             at::scalar_tensor(1.0), {mode});
    const at::Tensor loss = out.entropy.sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor first = hidden.grad().clone(), first_weight = weight.grad().clone();
    EXPECT_LE(error(first, {-0.282587, 0.140770, 0.141817}), 1e-6);
    hidden.mutable_grad() = at::Tensor();
    weight.mutable_grad() = at::Tensor();
    loss.backward();
    EXPECT_TRUE(at::equal(first, hidden.grad()));
    EXPECT_TRUE(at::equal(first_weight, weight.grad()));
    EXPECT_TRUE(at::equal(before, hidden.detach()));
    EXPECT_TRUE(at::equal(weight.detach(), at::eye(3, at::kDouble)));
  }
}

TEST(LinearLogprob, B24_RefusesATemperatureThatIsNotPositive) {
  const at::Tensor logits = to_tensor({2, 1, 0}, {1, 3}, at::kFloat);
  for (const double bad : {0.0, -1.0, static_cast<double>(NAN), kInfinity, 1e-50}) {
    EXPECT_THROW(of_logits(logits, {0}, bad), InvalidArgument) << bad;
  }
  EXPECT_NE(message_of([&] { of_logits(logits, {0}, -1); }).find("> 0 and finite, got -1."),
            std::string::npos);
  const std::string message = message_of([&] {
    linear_logprob(logits, at::eye(3), to_tensor({0, 0, 0}), to_tensor({0, 1, 2}),
                   to_tensor({1, 1, -2}, {3}, at::kFloat));
  });
  EXPECT_NE(message.find("temperature[2] must be > 0 and finite, got -2."), std::string::npos)
      << message;
}

TEST(LinearLogprob, B24_ASmallTemperatureStaysFinite) {
  const at::Tensor logits = to_tensor({2, 1, 0}, {1, 3}, at::kFloat).requires_grad_();
  const LogprobResult out = of_logits(logits, {0, 1}, 1e-3);
  EXPECT_EQ(out.logprob[0].item<double>(), 0);
  EXPECT_NEAR(out.logprob[1].item<double>(), -1000, 1e-3);
  EXPECT_EQ(out.entropy[0].item<double>(), 0);
  out.logprob.sum().add(out.entropy.sum()).backward();
  EXPECT_LE(error(logits.grad(), {-1000, 1000, 0}), 1e-6);
}

TEST(LinearLogprob, B25_ResultsDoNotDependOnTheTiles) {
  CaseOptions options{12, 16, 120, 70, 2};
  HeadTensors tensors(random_case(8, options, at::kFloat), at::kFloat);
  tensors.hidden.mul_(0.25);  // logits of order 1: their rounding stays below the tolerance
  const HeadRun whole = tensors.run({HeadMode::kNone});
  for (const int64_t budget : {1, 7 * 4, 1000 * 4, 12000, 1 << 26}) {
    for (const HeadMode mode : {HeadMode::kCompute, HeadMode::kMemory}) {
      const HeadRun tiled = tensors.run({mode, budget});
      EXPECT_LE(error(tiled.logprob, to_vector(whole.logprob)), 1e-6) << budget;
      EXPECT_LE(error(tiled.entropy, to_vector(whole.entropy)), 1e-6) << budget;
      EXPECT_LE(norm_error(tiled.hidden_grad, whole.hidden_grad), 1e-6) << budget;
      EXPECT_LE(norm_error(tiled.weight_grad, whole.weight_grad), 1e-6) << budget;
    }
  }
}

TEST(LinearLogprob, B25_BoundsHoldExactly) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const double scale : {0.0, 1e-4, 1.0, 30.0}) {
      CaseOptions options{20, 8, 100, 60, 1};
      HeadTensors tensors(random_case(9, options, type), type);
      tensors.hidden.mul_(scale);
      const HeadRun run = tensors.run({HeadMode::kMemory, 5000});
      EXPECT_LE(run.logprob.max().item<double>(), 0);
      EXPECT_GE(run.entropy.min().item<double>(), 0);
      EXPECT_LE(run.entropy.max().item<double>(), std::log(100.0));
    }
  }
}

TEST(LinearLogprob, B27_ExtraZeroRowsCountInTheNormaliser) {
  const at::Tensor hidden = to_tensor({2, 1}, {1, 2}, at::kDouble);
  const at::Tensor weight = to_tensor({1, 0, 0, 1, 0, 0, 0, 0}, {4, 2}, at::kDouble);
  const LogprobResult out =
      linear_logprob(hidden, weight, to_tensor({0}), to_tensor({0}), at::scalar_tensor(1.0));
  EXPECT_NEAR(out.logprob.item<double>(), 2 - std::log(std::exp(2.0) + std::exp(1.0) + 2), 1e-12);
}

TEST(LinearLogprob, B27_RefusesLabelsAndRowsOutOfRange) {
  const at::Tensor logits = to_tensor({2, 1, 0}, {1, 3}, at::kFloat);
  EXPECT_NE(message_of([&] {
              of_logits(logits, {0, 3}, 1);
            }).find("label[1] must be in [0, 3), the vocabulary, got 3."),
            std::string::npos);
  EXPECT_NE(message_of([&] { of_logits(logits, {-100}, 1); }).find("got -100."), std::string::npos);
  const std::string message = message_of([&] {
    linear_logprob(logits, at::eye(3), to_tensor({1}), to_tensor({0}), at::scalar_tensor(1.0));
  });
  EXPECT_NE(message.find("row[0] must be in [0, 1), the hidden rows, got 1."), std::string::npos)
      << message;
}

TEST(LinearLogprob, B28_AFrozenTensorGetsNoGradient) {
  const HeadTensors tensors(random_case(6, {}, at::kFloat), at::kFloat);
  for (const HeadMode mode : kModes) {
    const HeadRun both = tensors.run({mode});
    for (const bool of_hidden : {true, false}) {
      const at::Tensor hidden = tensors.hidden.clone().requires_grad_(of_hidden);
      const at::Tensor weight = tensors.weight.clone().requires_grad_(!of_hidden);
      const LogprobResult out =
          linear_logprob(hidden, weight, tensors.row, tensors.label, tensors.temperature, {mode});
      out.logprob.mul(tensors.logprob_grad)
          .sum()
          .add(out.entropy.mul(tensors.entropy_grad).sum())
          .backward();
      EXPECT_EQ(hidden.grad().defined(), of_hidden);
      EXPECT_EQ(weight.grad().defined(), !of_hidden);
      EXPECT_TRUE(of_hidden ? at::equal(hidden.grad(), both.hidden_grad)
                            : at::equal(weight.grad(), both.weight_grad));
    }
  }
}

TEST(LinearLogprob, RepeatsBitForBit) {
  CaseOptions options{30, 16, 200, 100, 2};
  const HeadTensors tensors(random_case(12, options, at::kFloat), at::kFloat);
  for (const HeadMode mode : kModes) {
    const HeadRun first = tensors.run({mode, 20000}), second = tensors.run({mode, 20000});
    EXPECT_TRUE(at::equal(first.logprob, second.logprob));
    EXPECT_TRUE(at::equal(first.entropy, second.entropy));
    EXPECT_TRUE(at::equal(first.hidden_grad, second.hidden_grad));
    EXPECT_TRUE(at::equal(first.weight_grad, second.weight_grad));
  }
}

TEST(LinearLogprob, NothingToScoreGivesEmptyResultsAndZeroGradients) {
  for (const HeadMode mode : kModes) {
    for (const int64_t hidden_rows : {0, 2}) {
      const at::Tensor hidden = at::zeros({hidden_rows, 4}).requires_grad_();
      const at::Tensor weight = at::zeros({3, 4}).requires_grad_();
      const LogprobResult out =
          linear_logprob(hidden, weight, to_tensor(std::vector<int64_t>{}),
                         to_tensor(std::vector<int64_t>{}), at::scalar_tensor(1.0), {mode});
      EXPECT_EQ(out.logprob.numel(), 0);
      EXPECT_EQ(out.entropy.numel(), 0);
      out.logprob.sum().add(out.entropy.sum()).backward();
      ASSERT_TRUE(hidden.grad().defined() && weight.grad().defined());
      EXPECT_TRUE(hidden.grad().eq(0).all().item<bool>());
      EXPECT_TRUE(weight.grad().eq(0).all().item<bool>());
    }
  }
}

}  // namespace
}  // namespace zorro::head
