#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "cpp/ops/linear_logprob_cases.h"
#include "ops/linear_logprob_rows.h"
#include "ops/linear_logprob_tiles.h"
#include "zorro/core/error.h"
#include "zorro/ops/linear_logprob.h"

namespace zorro::head {
namespace {

class LinearLogprobArguments : public testing::Test {
 public:
  LogprobResult call(const LinearLogprobOptions& options = {}) const {
    return linear_logprob(hidden, weight, row, label, temperature, options);
  }
  at::Tensor hidden = at::zeros({2, 4}), weight = at::zeros({3, 4});
  at::Tensor row = to_tensor({0, 1, 1}), label = to_tensor({0, 1, 2});
  at::Tensor temperature = at::scalar_tensor(1.0);
};

TEST_F(LinearLogprobArguments, WrongFormsAreRefused) {
  EXPECT_NO_THROW(call());
  const auto refused = [&](at::Tensor LinearLogprobArguments::* argument, const at::Tensor& bad) {
    const at::Tensor good = this->*argument;
    this->*argument = bad;
    EXPECT_THROW(call(), InvalidArgument) << bad.toString();
    this->*argument = good;
  };
  refused(&LinearLogprobArguments::hidden, at::zeros({4}));
  refused(&LinearLogprobArguments::hidden, at::zeros({2, 4}, at::kHalf));
  refused(&LinearLogprobArguments::hidden, at::zeros({2, 4}, at::kLong));
  refused(&LinearLogprobArguments::hidden, at::empty({2, 4}, at::device(at::kMeta)));
  refused(&LinearLogprobArguments::hidden, at::Tensor());
  refused(&LinearLogprobArguments::weight, at::zeros({3, 5}));
  refused(&LinearLogprobArguments::weight, at::zeros({0, 4}));
  refused(&LinearLogprobArguments::weight, at::zeros({3, 4}, at::kDouble));
  refused(&LinearLogprobArguments::row, to_tensor({0, 1}));
  refused(&LinearLogprobArguments::row, at::zeros({3}, at::kInt));
  refused(&LinearLogprobArguments::label, at::zeros({3}, at::kFloat));
  refused(&LinearLogprobArguments::temperature, at::zeros({2}).add(1));
  refused(&LinearLogprobArguments::temperature, at::zeros({3, 1}).add(1));
  refused(&LinearLogprobArguments::temperature, at::scalar_tensor(1, at::kLong));
  refused(&LinearLogprobArguments::temperature, at::Tensor());
  EXPECT_THROW(call({HeadMode::kMemory, 0}), InvalidArgument);
  EXPECT_THROW(call({static_cast<HeadMode>(7), 1}), InvalidArgument);
}

TEST_F(LinearLogprobArguments, ModeNamesOfTheSchemaAreChecked) {
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("zorro::linear_logprob", "")
          .typed<Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, c10::string_view, int64_t)>();
  EXPECT_THROW(op.call(hidden, weight, row, label, temperature, "some", 100), InvalidArgument);
  EXPECT_EQ(std::get<4>(op.call(hidden, weight, row, label, temperature, "compute", 100)).sizes(),
            at::IntArrayRef({2, 3}));
  EXPECT_EQ(std::get<4>(op.call(hidden, weight, row, label, temperature, "memory", 100)).numel(),
            0);
}

TEST_F(LinearLogprobArguments, MetaTensorsGiveShapesOnly) {
  for (at::Tensor* tensor : {&hidden, &weight, &row, &label, &temperature}) {
    *tensor = tensor->to(at::kMeta);
  }
  for (const HeadMode mode : {HeadMode::kNone, HeadMode::kCompute, HeadMode::kMemory}) {
    const LogprobResult out = call({mode});
    EXPECT_TRUE(out.logprob.is_meta());
    EXPECT_EQ(out.logprob.sizes(), row.sizes());
    EXPECT_EQ(out.entropy.sizes(), row.sizes());
  }
  hidden.requires_grad_();
  weight = weight.to(at::kMeta).requires_grad_();
  call().logprob.sum().backward();
  EXPECT_EQ(hidden.grad().sizes(), hidden.sizes());
  EXPECT_EQ(weight.grad().sizes(), weight.sizes());
}

TEST_F(LinearLogprobArguments, ASecondDerivativeIsRefused) {
  hidden.requires_grad_();
  const LogprobResult out = call();
  out.logprob.sum().backward({}, true, /*create_graph=*/true);
  const at::Tensor gradient = hidden.grad();
  ASSERT_TRUE(gradient.requires_grad());
  EXPECT_ANY_THROW(gradient.square().sum().backward());
  hidden.mutable_grad() = at::Tensor();  // breaks the cycle that create_graph makes
}

TEST(LinearLogprobTiles, StayWithinTheBudget) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor hidden = at::empty({3000, 64}, type), weight = at::empty({20000, 64}, type);
    const int64_t item = type == at::kDouble ? 8 : 4;
    for (const int64_t budget : {int64_t{100000}, int64_t{1} << 20, int64_t{1} << 28}) {
      const TileShape shape =
          plan_tiles(HeadMode::kMemory, hidden, weight, budget, HeadMath::kFused);
      const int64_t widened = type == at::kBFloat16 ? 2 * shape.columns * 64 : 0;
      EXPECT_LE(item * (shape.rows * shape.columns + widened), budget);
      EXPECT_GE(item * (shape.rows * shape.columns + widened),
                std::min<int64_t>(budget, 1 << 20) / 2);
    }
    const TileShape least = plan_tiles(HeadMode::kMemory, hidden, weight, 1, HeadMath::kFused);
    EXPECT_EQ(least.rows * least.columns, 1);
    const TileShape whole = plan_tiles(HeadMode::kNone, hidden, weight, 1, HeadMath::kFused);
    EXPECT_EQ(whole.rows, 3000);
    EXPECT_EQ(whole.columns, 20000);
  }
}

TEST(LinearLogprobTiles, ComposedAndFusedAgreeForAnyTile) {
  const CaseOptions options{6, 5, 20, 30, 3};
  const reference::HeadCase c = random_case(21, options, at::kDouble);
  const reference::HeadAnswer want = reference::head_oracle(c);
  const HeadTensors t(c, at::kDouble);
  const HeadInputs inputs{t.hidden, t.weight, t.row, t.label, t.temperature};
  for (const HeadMath math : {HeadMath::kFused, HeadMath::kComposed}) {
    for (const bool keep : {false, true}) {
      for (const TileShape shape :
           {TileShape{1, 1}, TileShape{7, 7}, TileShape{3, 19}, TileShape{1000, 1000}}) {
        const HeadForward out = head_forward(inputs, keep, shape, math);
        EXPECT_LE(error(out.logprob, want.logprob), 1e-12);
        EXPECT_LE(error(out.entropy, want.entropy), 1e-12);
        const auto gradients =
            head_backward({t.logprob_grad, t.entropy_grad}, inputs, out, true, true, shape, math);
        EXPECT_LE(error(gradients.first, want.hidden_grad), 1e-12);
        EXPECT_LE(error(gradients.second, want.weight_grad), 1e-12);
      }
    }
  }
}

// A kernel of an instruction set that this machine lacks cannot run; the rest must agree.
std::vector<Isa> runnable() {
  std::vector<Isa> sets{Isa::kBaseline};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    sets.push_back(Isa::kAvx2);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back(Isa::kAvx512);
  }
  return sets;
}

template <typename T>
void expect_row_kernels(Isa isa, double tolerance) {
  Random random(5);
  for (const int64_t count : {1, 3, 17, 511, 512, 513, 1700}) {
    std::vector<T> logits(static_cast<size_t>(count));
    for (T& logit : logits) logit = static_cast<T>(8 * random.normal());
    if (count > 3) logits[2] = -std::numeric_limits<T>::infinity();
    const T inverse[] = {T{1}, T{2}};
    T maximum = std::numeric_limits<T>::lowest();
    double exp_sum[] = {0, 0}, weighted[] = {0, 0};
    add_row_statistics(isa, logits.data(), count, 2, inverse, &maximum, exp_sum, weighted);
    EXPECT_EQ(maximum, *std::max_element(logits.begin(), logits.end()));
    T log_sum[2];
    for (int pair = 0; pair < 2; ++pair) {
      double sum = 0, product = 0;
      for (const T logit : logits) {
        const double s = (double{logit} - double{maximum}) * double{inverse[pair]};
        sum += std::exp(s);
        if (std::isfinite(s)) product += s * std::exp(s);
      }
      EXPECT_NEAR(exp_sum[pair] / sum, 1, tolerance) << count;
      EXPECT_NEAR(weighted[pair], product, tolerance * std::max(1.0, std::abs(product))) << count;
      log_sum[pair] = static_cast<T>(std::log(sum));
    }
    const T constant[] = {T(0.5), T(-0.25)}, slope[] = {T(0.125), T(0)};
    std::vector<T> out(logits.size());
    row_gradient<T>(isa, logits.data(), count, {2, maximum, inverse, log_sum, constant, slope},
                    out.data());
    std::vector<T> in_place = logits;
    row_gradient<T>(isa, in_place.data(), count, {2, maximum, inverse, log_sum, constant, slope},
                    in_place.data());
    EXPECT_EQ(out, in_place);
    for (size_t j = 0; j < logits.size(); ++j) {
      double want = 0;
      for (int pair = 0; pair < 2; ++pair) {
        const double logp =
            (double{logits[j]} - double{maximum}) * double{inverse[pair]} - double{log_sum[pair]};
        if (std::isfinite(logp)) {
          want += std::exp(logp) * (double{constant[pair]} + double{slope[pair]} * logp);
        }
      }
      EXPECT_NEAR(double{out[j]}, want, tolerance) << count;
    }
  }
}

TEST(LinearLogprobRows, EveryInstructionSetMatchesTheFormula) {
  for (const Isa isa : runnable()) {
    SCOPED_TRACE(static_cast<int>(isa));
    expect_row_kernels<float>(isa, 2e-6);
    expect_row_kernels<double>(isa, 1e-13);
  }
}

TEST(LinearLogprobRows, NotANumberAndPositiveInfinitySpoilTheRow) {
  for (const Isa isa : runnable()) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> logits(700, 1.0F);
      logits[600] = bad;
      float maximum = std::numeric_limits<float>::lowest();
      const float inverse = 1;
      double exp_sum = 0, weighted = 0;
      add_row_statistics(isa, logits.data(), 700, 1, &inverse, &maximum, &exp_sum, &weighted);
      EXPECT_TRUE(std::isnan(exp_sum));
      EXPECT_TRUE(std::isnan(weighted));
    }
  }
}

}  // namespace
}  // namespace zorro::head
