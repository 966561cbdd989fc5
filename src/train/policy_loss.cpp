#include "zorro/train/policy_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "zorro/core/error.h"

namespace zorro {
namespace {

constexpr double kLargestExponent = 20;

// exp(x), continued by its tangent above kLargestExponent. where() on both sides of exp: neither
// branch overflows, so the branch not taken has no 0 * inf in its gradient.
at::Tensor bounded_exp(const at::Tensor& x) {
  const double top = std::exp(kLargestExponent);
  return at::where(x.gt(kLargestExponent), (x - kLargestExponent + 1) * top,
                   x.clamp_max(kLargestExponent).exp());
}

void check_vector(const char* name, const at::Tensor& tensor, const at::Tensor& like) {
  ZORRO_CHECK(tensor.defined() && tensor.dim() == 1 && tensor.sizes() == like.sizes(),
              "[policy_loss] ", name, " must be [M] as logprob, got ",
              tensor.defined() ? concat("shape ", tensor.sizes()) : "nothing", ".");
  ZORRO_CHECK(tensor.device() == like.device(), "[policy_loss] ", name, " must be on ",
              like.device(), " as logprob, got ", tensor.device(), ".");
}

void check_floats(const char* name, const at::Tensor& tensor, const at::Tensor& like) {
  check_vector(name, tensor, like);
  ZORRO_CHECK(tensor.is_floating_point(), "[policy_loss] ", name, " must be floating point, got ",
              tensor.scalar_type(), ".");
}

void check(const PolicyLossInput& input, int64_t denominator, const PolicyLossOptions& options) {
  ZORRO_CHECK(input.logprob.defined() && input.logprob.dim() == 1,
              "[policy_loss] logprob must be [M], got ",
              input.logprob.defined() ? concat("shape ", input.logprob.sizes()) : "nothing", ".");
  check_floats("logprob", input.logprob, input.logprob);
  check_floats("entropy", input.entropy, input.logprob);
  check_floats("old_logprob", input.old_logprob, input.logprob);
  check_floats("advantage", input.advantage, input.logprob);
  if (input.ref_logprob.defined()) check_floats("ref_logprob", input.ref_logprob, input.logprob);
  check_vector("mask", input.mask, input.logprob);
  ZORRO_CHECK(input.mask.scalar_type() == at::kBool, "[policy_loss] mask must be bool, got ",
              input.mask.scalar_type(), ".");
  ZORRO_CHECK(denominator >= 0, "[policy_loss] denominator must be >= 0, got ", denominator, ".");
  ZORRO_CHECK(options.clip_low >= 0 && options.clip_low <= 1,
              "[policy_loss] clip_low must be in [0, 1], got ", options.clip_low, ".");
  ZORRO_CHECK(options.clip_high >= 0 && std::isfinite(options.clip_high),
              "[policy_loss] clip_high must be >= 0 and finite, got ", options.clip_high, ".");
  ZORRO_CHECK(std::isfinite(options.kl_coef), "[policy_loss] kl_coef must be finite, got ",
              options.kl_coef, ".");
  ZORRO_CHECK(std::isfinite(options.entropy_coef),
              "[policy_loss] entropy_coef must be finite, got ", options.entropy_coef, ".");
}

at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

at::Tensor kl_terms(KlKind kind, const at::Tensor& logprob, const at::Tensor& reference) {
  if (kind == KlKind::kK1) return logprob - reference;
  const at::Tensor d = reference - logprob;
  return bounded_exp(d) - 1 - d;
}

// In order on the host: the same sum on every machine and for every number of threads.
double ordered_sum(const at::Tensor& x) {
  const at::Tensor host =
      x.detach().to(at::TensorOptions(at::kCPU).dtype(at::kDouble)).contiguous();
  const auto* values = host.const_data_ptr<double>();
  double sum = 0;
  for (int64_t i = 0; i < host.numel(); ++i) sum += values[i];
  return sum;
}

}  // namespace

PolicyLossResult policy_loss(const PolicyLossInput& input, int64_t denominator,
                             const PolicyLossOptions& options) {
  check(input, denominator, options);
  // Tokens outside the mask leave before any arithmetic; the gradient of the choice is 0 for them.
  const at::Tensor chosen = input.mask.nonzero().squeeze(1);
  const auto pick = [&](const at::Tensor& x) { return widened(x.index_select(0, chosen)); };
  const at::Tensor logprob = pick(input.logprob);
  const at::Tensor entropy = pick(input.entropy);
  const at::Tensor advantage = pick(input.advantage.detach());

  const at::Tensor log_ratio = logprob - pick(input.old_logprob.detach());
  const at::Tensor ratio = bounded_exp(log_ratio);
  const at::Tensor free = -advantage * ratio;
  const at::Tensor clipped = -advantage * ratio.clamp(1 - options.clip_low, 1 + options.clip_high);
  const at::Tensor surrogate = at::maximum(free, clipped);
  at::Tensor terms = surrogate.sum(at::kDouble);

  PolicyLossResult result;
  result.num_tokens = chosen.numel();
  result.policy_sum = ordered_sum(surrogate);
  result.entropy_sum = ordered_sum(entropy);
  result.clipped_sum = ordered_sum(clipped.gt(free));
  result.approx_kl_sum = ordered_sum(-log_ratio);
  result.ratio_sum = ordered_sum(ratio);
  if (input.ref_logprob.defined() && options.kl != KlKind::kNone) {
    const at::Tensor kl = kl_terms(options.kl, logprob, pick(input.ref_logprob.detach()));
    result.kl_sum = ordered_sum(kl);
    if (options.kl_coef != 0) terms = terms + kl.sum(at::kDouble) * options.kl_coef;
  }
  if (options.entropy_coef != 0) {
    terms = terms - entropy.sum(at::kDouble) * options.entropy_coef;
  }
  // An empty part of logprob: 0, and a gradient of zeros that exists.
  result.loss = denominator == 0 ? input.logprob.narrow(0, 0, 0).sum(at::kDouble)
                                 : terms / static_cast<double>(denominator);
  return result;
}

}  // namespace zorro
