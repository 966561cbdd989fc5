#include "zorro/train/adamw.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "zorro/core/error.h"
#include "zorro/core/random.h"

namespace zorro {
namespace {

at::Tensor vector_of(const std::vector<double>& values, at::ScalarType type) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<double>());
  return tensor.to(type);
}

std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.detach().to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

at::Tensor parameter_of(const std::vector<double>& values, at::ScalarType type) {
  return vector_of(values, type).requires_grad_();
}

// torch 2.13.0:
//   p = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=dtype, requires_grad=True)
//   o = torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.05)
//   for step in range(1, 6):
//       p.grad = torch.tensor([0.3 * step, -1.0 / step, 1e-6, 2.0 - step], dtype=dtype)
//       o.step(); print([float(x) for x in p.detach().double()])
constexpr double kGolden64[5][4] = {
    {0.8950000033333332, -1.890000001, 0.39849009900990096, -0.09999999900000002},
    {0.7941375172846222, -1.7872052020002547, 0.29748774752475243, -0.16665801278178236},
    {0.6946134274608776, -1.6906943170521702, 0.19699040779702973, -0.1572380229378705},
    {0.5954594537142812, -1.5997296637044522, 0.09699555476794554, -0.1051227243899229},
    {0.4962324326007214, -1.5137341277222114, -0.002499323995993258, -0.0352191429652587}};
constexpr double kGolden32[5][4] = {
    {0.8949999809265137, -1.8899999856948853, 0.3984901010990143, -0.10000000149011612},
    {0.7941374778747559, -1.7872052192687988, 0.2974877655506134, -0.16665801405906677},
    {0.6946133971214294, -1.6906943321228027, 0.19699043035507202, -0.15723802149295807},
    {0.5954594612121582, -1.5997296571731567, 0.09699556976556778, -0.10512273013591766},
    {0.49623245000839233, -1.513734221458435, -0.002499319612979889, -0.03521914780139923}};

TEST(AdamW, MatchesTorchStepByStep) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    at::Tensor parameter = parameter_of({1, -2, 0.5, 0}, type);
    const void* storage = parameter.const_data_ptr();
    AdamW optimizer({parameter}, {0.1, 0.9, 0.99, 1e-8, 0.05});
    for (int step = 1; step <= 5; ++step) {
      parameter.mutable_grad() = vector_of({0.3 * step, -1.0 / step, 1e-6, 2.0 - step}, type);
      optimizer.step();
      const std::vector<double> values = values_of(parameter);
      for (size_t i = 0; i < values.size(); ++i) {
        const double want = type == at::kDouble ? kGolden64[step - 1][i] : kGolden32[step - 1][i];
        EXPECT_NEAR(values[i], want, type == at::kDouble ? 1e-15 : 6e-8) << step << " " << i;
      }
    }
    EXPECT_EQ(parameter.const_data_ptr(), storage);
  }
}

// The formulas of the header, number by number.
struct ScalarAdamW {
  double p, m = 0, v = 0;
  void step(double g, int t, const AdamWOptions& o) {
    p *= 1 - o.lr * o.weight_decay;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double mean = m / (1 - std::pow(o.beta1, t));
    const double square = v / (1 - std::pow(o.beta2, t));
    p -= o.lr * mean / (std::sqrt(square) + o.eps);
  }
};

TEST(AdamW, MatchesTheFormulasOnRandomGradients) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    const AdamWOptions options{0.02, 0.8, 0.95, 1e-3, 0.1};
    Random random(4);
    std::vector<double> start(17);
    for (double& value : start) value = random.normal();
    at::Tensor parameter = parameter_of(start, type);
    std::vector<ScalarAdamW> oracle;
    for (const double value : start) oracle.push_back({value});
    AdamW optimizer({parameter}, options);
    for (int step = 1; step <= 5; ++step) {
      std::vector<double> gradient(start.size());
      for (double& value : gradient) value = random.normal();
      for (size_t i = 0; i < oracle.size(); ++i) oracle[i].step(gradient[i], step, options);
      parameter.mutable_grad() = vector_of(gradient, type);
      optimizer.step();
    }
    const std::vector<double> values = values_of(parameter);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(values[i], oracle[i].p, type == at::kDouble ? 1e-14 : 1e-6);
    }
  }
}

TEST(AdamW, AParameterWithoutGradientIsLeftAlone) {
  at::Tensor moving = parameter_of({1, 2}, at::kFloat);
  at::Tensor resting = parameter_of({3, 4}, at::kFloat);
  AdamW optimizer({moving, resting}, {0.1});
  moving.mutable_grad() = vector_of({1, 1}, at::kFloat);
  optimizer.step();
  EXPECT_EQ(values_of(resting), (std::vector<double>{3, 4}));
  // Its count of steps begins with its own first gradient, as in torch: the first step has length
  // lr.
  resting.mutable_grad() = vector_of({5, -5}, at::kFloat);
  optimizer.step();
  const std::vector<double> values = values_of(resting);
  EXPECT_NEAR(values[0], 3 * (1 - 0.001) - 0.1, 1e-6);
  EXPECT_NEAR(values[1], 4 * (1 - 0.001) + 0.1, 1e-6);
}

TEST(AdamW, ZeroGradDropsGradients) {
  at::Tensor parameter = parameter_of({1}, at::kFloat);
  parameter.mutable_grad() = vector_of({1}, at::kFloat);
  AdamW optimizer({parameter}, {});
  optimizer.zero_grad();
  EXPECT_FALSE(parameter.grad().defined());
  optimizer.step();
  EXPECT_EQ(values_of(parameter), std::vector<double>{1});
}

TEST(AdamW, RefusesBadArguments) {
  const at::Tensor leaf = parameter_of({1}, at::kFloat);
  const auto refused = [&](const at::Tensor& parameter, const AdamWOptions& options) {
    EXPECT_THROW(AdamW({parameter}, options), InvalidArgument);
  };
  refused(at::Tensor(), {});
  refused(at::zeros({2}, at::kLong), {});
  refused(leaf.mul(2), {});
  refused(leaf, {.lr = -1});
  refused(leaf, {.lr = std::numeric_limits<double>::quiet_NaN()});
  refused(leaf, {.eps = -1e-8});
  refused(leaf, {.weight_decay = -0.1});
  refused(leaf, {.beta1 = 1});
  refused(leaf, {.beta2 = -0.1});
}

std::vector<at::Tensor> with_gradients(const std::vector<std::vector<double>>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) {
    parameters.push_back(parameter_of(std::vector<double>(gradient.size()), at::kFloat));
    parameters.back().mutable_grad() = vector_of(gradient, at::kFloat);
  }
  return parameters;
}

TEST(ClipGradNorm, ScalesTheJointNorm) {
  auto parameters = with_gradients({{3, 0}, {0, 4}});
  parameters.push_back(parameter_of({1}, at::kFloat));  // no gradient: does not count
  EXPECT_NEAR(clip_grad_norm(parameters, 1), 5, 1e-6);
  const double factor = 1 / (5 + 1e-6);
  EXPECT_NEAR(values_of(parameters[0].grad())[0], 3 * factor, 1e-7);
  EXPECT_NEAR(values_of(parameters[1].grad())[1], 4 * factor, 1e-7);
  EXPECT_FALSE(parameters[2].grad().defined());
}

TEST(ClipGradNorm, LeavesAShortGradientAlone) {
  const auto parameters = with_gradients({{0.3, 0}, {0, 0.4}});
  const at::Tensor before = parameters[0].grad().clone();
  EXPECT_NEAR(clip_grad_norm(parameters, 1), 0.5, 1e-6);
  EXPECT_TRUE(at::equal(parameters[0].grad(), before));
  EXPECT_EQ(clip_grad_norm({}, 1), 0);
}

TEST(ClipGradNorm, ANormThatIsNotFiniteIsReturnedAndScalesNothing) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto infinite = with_gradients({{3}, {infinity}});
  EXPECT_EQ(clip_grad_norm(infinite, 1), infinity);
  EXPECT_EQ(values_of(infinite[0].grad()), std::vector<double>{3});
  const auto undefined = with_gradients({{3}, {NAN}});
  EXPECT_TRUE(std::isnan(clip_grad_norm(undefined, 1)));
  EXPECT_EQ(values_of(undefined[0].grad()), std::vector<double>{3});
}

TEST(ClipGradNorm, RefusesALimitThatIsNotPositive) {
  EXPECT_THROW(clip_grad_norm({}, 0), InvalidArgument);
  EXPECT_THROW(clip_grad_norm({}, NAN), InvalidArgument);
}

}  // namespace
}  // namespace zorro
