#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/head_oracle.h"
#include "zorro/core/random.h"
#include "zorro/ops/linear_logprob.h"

namespace zorro::head {

inline at::Tensor to_tensor(const std::vector<double>& values, at::IntArrayRef shape,
                            at::ScalarType type) {
  at::Tensor tensor = at::empty(shape, at::kDouble);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<double>());
  return tensor.to(type);
}

inline at::Tensor to_tensor(const std::vector<int64_t>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

inline std::vector<double> to_vector(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.detach().to(at::kDouble).contiguous();
  const double* values = wide.const_data_ptr<double>();
  return {values, values + wide.numel()};
}

/// Largest |x - y| / max(|y|, 1).
inline double error(const at::Tensor& x, const std::vector<double>& y) {
  const std::vector<double> values = to_vector(x);
  if (values.size() != y.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double e = std::abs(values[i] - y[i]) / std::max(std::abs(y[i]), 1.0);
    worst = e > worst || std::isnan(e) ? e : worst;
  }
  return worst;
}

/// ||x - y|| / ||y||.
inline double norm_error(const at::Tensor& x, const at::Tensor& y) {
  return (x.detach().sub(y).norm().item<double>()) / y.norm().item<double>();
}

struct CaseOptions {
  int64_t hidden_rows = 5, width = 6, vocabulary = 11, tokens = 23;
  int64_t temperatures = 1;  // distinct ones; 1 is passed as a scalar
};

/// Random rows, labels and gradients, rounded to `type` so that oracle and op see the same numbers.
/// Tokens repeat rows and labels; the last hidden row is left unused, and some upstream gradients
/// are zero.
inline reference::HeadCase random_case(uint64_t seed, const CaseOptions& options,
                                       at::ScalarType type) {
  Random random(seed);
  reference::HeadCase c;
  c.hidden_rows = options.hidden_rows;
  c.width = options.width;
  c.vocabulary = options.vocabulary;
  const auto normals = [&](int64_t count, at::ScalarType rounded) {
    std::vector<double> values(static_cast<size_t>(count));
    for (double& value : values) value = random.normal();
    return to_vector(to_tensor(values, {count}, rounded));
  };
  c.hidden = normals(c.hidden_rows * c.width, type);
  c.weight = normals(c.vocabulary * c.width, type);
  std::vector<double> temperatures;
  for (int64_t i = 0; i < options.temperatures; ++i) {
    temperatures.push_back(0.5 + 0.25 * static_cast<double>(i));
  }
  for (int64_t token = 0; token < options.tokens; ++token) {
    c.row.push_back(random.below(std::max<int64_t>(1, c.hidden_rows - 1)));
    c.label.push_back(random.below(c.vocabulary));
    c.temperature.push_back(temperatures[static_cast<size_t>(random.below(options.temperatures))]);
  }
  c.logprob_grad = normals(options.tokens, at::kFloat);
  c.entropy_grad = normals(options.tokens, at::kFloat);
  for (size_t token = 0; token < c.row.size(); token += 5) {
    c.logprob_grad[token] = 0;
    c.entropy_grad[token] = 0;
  }
  return c;
}

struct HeadRun {
  at::Tensor hidden, weight, logprob, entropy, hidden_grad, weight_grad;
};

/// The tensors of a case, and forward and backward through the public function.
struct HeadTensors {
  HeadTensors(const reference::HeadCase& c, at::ScalarType type)
      : hidden(to_tensor(c.hidden, {c.hidden_rows, c.width}, type)),
        weight(to_tensor(c.weight, {c.vocabulary, c.width}, type)),
        row(to_tensor(c.row)),
        label(to_tensor(c.label)) {
    const auto tokens = static_cast<int64_t>(c.row.size());
    const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
    const bool scalar = std::all_of(c.temperature.begin(), c.temperature.end(),
                                    [&](double t) { return t == c.temperature[0]; });
    temperature = scalar && tokens > 0 ? at::scalar_tensor(c.temperature[0], at::kDouble)
                                       : to_tensor(c.temperature, {tokens}, at::kDouble);
    logprob_grad = to_tensor(c.logprob_grad, {tokens}, wide);
    entropy_grad = to_tensor(c.entropy_grad, {tokens}, wide);
  }

  HeadRun run(const LinearLogprobOptions& options) const {
    HeadRun result;
    result.hidden = hidden.clone().requires_grad_();
    result.weight = weight.clone().requires_grad_();
    const LogprobResult out =
        linear_logprob(result.hidden, result.weight, row, label, temperature, options);
    result.logprob = out.logprob;
    result.entropy = out.entropy;
    (out.logprob.mul(logprob_grad).sum().add(out.entropy.mul(entropy_grad).sum())).backward();
    result.hidden_grad = result.hidden.grad();
    result.weight_grad = result.weight.grad();
    return result;
  }

  at::Tensor hidden, weight, row, label, temperature, logprob_grad, entropy_grad;
};

}  // namespace zorro::head
