#include "zorro/train/adamw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <utility>

#include "zorro/core/error.h"

namespace zorro {
namespace {

void check_not_negative(const char* name, double value) {
  ZORRO_CHECK(value >= 0 && std::isfinite(value), "[AdamW] ", name,
              " must be >= 0 and finite, got ", value, ".");
}

void check_beta(const char* name, double value) {
  ZORRO_CHECK(value >= 0 && value < 1, "[AdamW] ", name, " must be in [0, 1), got ", value, ".");
}

}  // namespace

AdamW::AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options)
    : parameters_(std::move(parameters)),
      mean_(parameters_.size()),
      square_(parameters_.size()),
      steps_(parameters_.size()),
      options_(options) {
  check_not_negative("lr", options.lr);
  check_not_negative("eps", options.eps);
  check_not_negative("weight_decay", options.weight_decay);
  check_beta("beta1", options.beta1);
  check_beta("beta2", options.beta2);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    ZORRO_CHECK(parameter.defined() && parameter.is_floating_point() && parameter.is_leaf(),
                "[AdamW] parameter ", i, " must be a floating-point leaf tensor, got ",
                parameter.defined() ? parameter.toString() : "nothing", ".");
  }
}

void AdamW::step() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& parameter = parameters_[i];
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    at::Tensor& mean = mean_[i];
    at::Tensor& square = square_[i];
    if (!mean.defined()) {
      mean = at::zeros_like(parameter, at::MemoryFormat::Preserve);
      square = at::zeros_like(parameter, at::MemoryFormat::Preserve);
    }
    const auto t = static_cast<double>(++steps_[i]);
    const double correction1 = 1 - std::pow(options_.beta1, t);
    const double correction2 = 1 - std::pow(options_.beta2, t);
    if (options_.weight_decay != 0) parameter.mul_(1 - options_.lr * options_.weight_decay);
    mean.lerp_(gradient, 1 - options_.beta1);
    square.mul_(options_.beta2).addcmul_(gradient, gradient, 1 - options_.beta2);
    const at::Tensor denominator = square.sqrt().div_(std::sqrt(correction2)).add_(options_.eps);
    parameter.addcdiv_(mean, denominator, -(options_.lr / correction1));
  }
}

void AdamW::zero_grad() {
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm) {
  ZORRO_CHECK(max_norm > 0, "[clip_grad_norm] max_norm must be > 0, got ", max_norm, ".");
  const at::NoGradGuard no_grad;
  double squares = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    const at::ScalarType type = gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto norm =
        at::linalg_vector_norm(gradient, 2, at::OptionalIntArrayRef(), false, type).item<double>();
    squares += norm * norm;
  }
  const double norm = std::sqrt(squares);
  const double factor = max_norm / (norm + 1e-6);
  if (!std::isfinite(norm) || factor >= 1) return norm;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined()) gradient.mul_(factor);
  }
  return norm;
}

}  // namespace zorro
