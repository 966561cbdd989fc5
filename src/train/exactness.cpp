#include "zorro/train/exactness.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "zorro/core/error.h"

namespace zorro {
namespace {

// Tolerances of one arm against the other; docs/testing.md#exactness.
constexpr Measure kLogprobFloat{0, 1e-5}, kLogprobDouble{0, 1e-10};
constexpr Measure kGradientFloat{0, 1e-4}, kGradientDouble{0, 1e-9};
constexpr double kBfloat16Together = 1.25, kBfloat16Single = 3.0;
constexpr double kGroupShare = 1e-3;  // of a layer's norm: below it a gradient counts as zero
constexpr double kBfloat16Epsilon = 0x1p-8;

double norm_of(const at::Tensor& x) { return x.to(at::kDouble).norm().item<double>(); }

double norm_of_difference(const at::Tensor& x, const at::Tensor& y) {
  return (x.to(at::kDouble) - y.to(at::kDouble)).norm().item<double>();
}

void check_same_tokens(const ArmNumbers& a, const ArmNumbers& b) {
  ZORRO_CHECK(a.logprob.sizes() == b.logprob.sizes() && a.gradients.size() == b.gradients.size(),
              "[compare] both arms must have the same tokens and parameters, got ",
              a.logprob.numel(), " and ", b.logprob.numel(), " tokens, ", a.gradients.size(),
              " and ", b.gradients.size(), " parameters.");
}

double token_error(const at::Tensor& x, const at::Tensor& y) {
  if (x.numel() == 0) return 0;
  return ((x - y).abs() / y.abs().clamp_min(1)).max().item<double>();
}

/// Norm of each group's gradients together.
std::map<std::string, double> group_norms(const NamedTensors& gradients) {
  std::map<std::string, double> squares;
  for (const auto& [name, gradient] : gradients)
    squares[gradient_group(name)] += std::pow(norm_of(gradient), 2);
  for (auto& [group, square] : squares) square = std::sqrt(square);
  return squares;
}

/// Keeps the worst parameter; NaN is worse than any number.
void keep_worst(ExactnessReport& report, double error, const std::string& parameter) {
  if (!report.worst_parameter.empty() && error <= report.gradient.value) return;
  if (std::isnan(report.gradient.value)) return;
  report.gradient.value = error;
  report.worst_parameter = parameter;
}

void find_smallest(ExactnessReport& report, const NamedTensors& gradients) {
  report.smallest_norm = std::numeric_limits<double>::infinity();
  for (const auto& [name, gradient] : gradients) {
    const double length = norm_of(gradient);
    if (length >= report.smallest_norm) continue;
    report.smallest_norm = length;
    report.smallest_parameter = name;
  }
}

double rms(const at::Tensor& x) {
  return x.numel() == 0 ? 0 : x.pow(2).mean().sqrt().item<double>();
}

/// Error over the naive arm's own; both zero is no error at all.
double multiple(double error, double naive_error) { return error == 0 ? 0 : error / naive_error; }

}  // namespace

std::string gradient_group(const std::string& parameter) {
  const std::string marker = "layers.";
  const size_t layers = parameter.find(marker);
  if (layers == std::string::npos) return parameter;
  const size_t end = parameter.find('.', layers + marker.size());
  return end == std::string::npos ? parameter : parameter.substr(0, end + 1);
}

double ArmNumbers::token_ratio() const {
  if (packed_tokens == 0) return 1;
  return static_cast<double>(replicated_tokens) / static_cast<double>(packed_tokens);
}

bool ExactnessReport::passed() const {
  return logprob.within() && entropy.within() && gradient.within() &&
         (!all_gradients || all_gradients->within());
}

ExactnessReport compare(const ArmNumbers& arm, const ArmNumbers& naive, at::ScalarType dtype,
                        double tolerance_scale) {
  ZORRO_CHECK(dtype == at::kFloat || dtype == at::kDouble,
              "[compare] dtype must be float32 or float64, got ", c10::toString(dtype),
              ". Use compare_to_truth.");
  check_same_tokens(arm, naive);
  const bool is_double = dtype == at::kDouble;
  ExactnessReport report;
  report.logprob = report.entropy = is_double ? kLogprobDouble : kLogprobFloat;
  report.gradient = is_double ? kGradientDouble : kGradientFloat;
  for (Measure* measure : {&report.logprob, &report.entropy, &report.gradient})
    measure->tolerance *= tolerance_scale;
  report.logprob.value = token_error(arm.logprob, naive.logprob);
  report.entropy.value = token_error(arm.entropy, naive.entropy);
  std::map<std::string, double> groups = group_norms(naive.gradients);
  for (size_t i = 0; i < naive.gradients.size(); ++i) {
    const auto& [name, expected] = naive.gradients[i];
    const double length = std::max(norm_of(expected), kGroupShare * groups[gradient_group(name)]);
    const double difference = norm_of_difference(arm.gradients[i].second, expected);
    keep_worst(report, difference == 0 ? 0 : difference / length, name);
  }
  find_smallest(report, naive.gradients);
  report.token_ratio = arm.token_ratio();
  return report;
}

ExactnessReport compare_to_truth(const ArmNumbers& arm, const ArmNumbers& naive,
                                 const ArmNumbers& truth, double tolerance_scale) {
  check_same_tokens(arm, truth);
  check_same_tokens(naive, truth);
  ExactnessReport report;
  const double together = kBfloat16Together * tolerance_scale;
  report.logprob = {multiple(rms(arm.logprob - truth.logprob), rms(naive.logprob - truth.logprob)),
                    together};
  report.entropy = {multiple(rms(arm.entropy - truth.entropy), rms(naive.entropy - truth.entropy)),
                    together};
  report.gradient.tolerance = kBfloat16Single * tolerance_scale;
  std::map<std::string, double> groups = group_norms(truth.gradients);
  double square = 0, naive_square = 0;
  for (size_t i = 0; i < truth.gradients.size(); ++i) {
    const auto& [name, expected] = truth.gradients[i];
    const double error = norm_of_difference(arm.gradients[i].second, expected);
    const double naive_error = norm_of_difference(naive.gradients[i].second, expected);
    const double floor = kBfloat16Epsilon * kGroupShare * groups[gradient_group(name)];
    keep_worst(report, multiple(error, std::max(naive_error, floor)), name);
    square += error * error;
    naive_square += naive_error * naive_error;
  }
  report.all_gradients = {multiple(std::sqrt(square), std::sqrt(naive_square)), together};
  find_smallest(report, truth.gradients);
  report.token_ratio = arm.token_ratio();
  return report;
}

void round_weights_to_bfloat16(CausalLM& model) {
  const at::NoGradGuard no_grad;
  for (const Weight& weight : model.weights())
    if (!weight.keep_float32) weight.slot->copy_(weight.slot->to(at::kBFloat16));
}

}  // namespace zorro
