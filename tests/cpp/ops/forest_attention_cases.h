#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/attention_oracle.h"
#include "reference/small_forests.h"
#include "zorro/core/random.h"
#include "zorro/ops/forest_attention.h"
#include "zorro/ops/forest_tensors.h"

namespace zorro::reference {

struct Heads {
  int64_t query, kv, dim;
};

/// q, k, v and an upstream gradient for every token of a forest.
struct AttentionInputs {
  at::Tensor q, k, v, out_grad;  // [T, heads, dim]

  AttentionInputs to(at::ScalarType dtype) const {
    return {q.to(dtype), k.to(dtype), v.to(dtype), out_grad.to(dtype)};
  }
};

struct AttentionRun {
  at::Tensor out, lse, q_grad, k_grad, v_grad;

  std::vector<at::Tensor> all() const { return {out, lse, q_grad, k_grad, v_grad}; }
};

inline at::Tensor normals(Random& random, at::IntArrayRef shape,
                          at::ScalarType dtype = at::kDouble) {
  at::Tensor tensor = at::empty(shape, at::kDouble);
  auto* value = tensor.mutable_data_ptr<double>();
  std::generate(value, value + tensor.numel(), [&] { return random.normal(); });
  return tensor.to(dtype);
}

inline AttentionInputs random_inputs(Random& random, int64_t num_tokens, const Heads& heads,
                                     at::ScalarType dtype = at::kDouble) {
  return {normals(random, {num_tokens, heads.query, heads.dim}, dtype),
          normals(random, {num_tokens, heads.kv, heads.dim}, dtype),
          normals(random, {num_tokens, heads.kv, heads.dim}, dtype),
          normals(random, {num_tokens, heads.query, heads.dim}, dtype)};
}

/// Forward and backward through autograd.
inline AttentionRun run_attention(const AttentionInputs& inputs, const at::Tensor& visible_until,
                                  const at::Tensor& nodes, const ForestAttentionOptions& options) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().requires_grad_(true); };
  const at::Tensor q = leaf(inputs.q), k = leaf(inputs.k), v = leaf(inputs.v);
  const AttentionResult result = forest_attention(q, k, v, visible_until, nodes, options);
  result.out.backward(inputs.out_grad);
  return {result.out.detach(), result.lse, q.grad(), k.grad(), v.grad()};
}

inline AttentionRun run_attention(const AttentionInputs& inputs, const PrefixForest& forest,
                                  const ForestAttentionOptions& options) {
  const ForestTensors tensors = to_tensors(forest);
  return run_attention(inputs, tensors.visible_until, tensors.nodes, options);
}

inline ForestAttentionOptions with_path(AttentionPath path) {
  ForestAttentionOptions options;
  options.path = path;
  return options;
}

inline std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.detach().to(at::kDouble).contiguous();
  const auto* values = wide.const_data_ptr<double>();
  return {values, values + wide.numel()};
}

inline at::Tensor tensor_of(const std::vector<double>& values, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, at::kDouble);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<double>());
  return tensor;
}

/// The loops' answer to the same question, every sample alone.
inline AttentionRun oracle_run(const AttentionInputs& inputs, const PrefixForest& forest,
                               double scale = 0) {
  AttentionCase c;
  c.query_heads = inputs.q.size(1);
  c.kv_heads = inputs.k.size(1);
  c.head_dim = inputs.q.size(2);
  c.scale = scale == 0 ? 1 / std::sqrt(static_cast<double>(c.head_dim)) : scale;
  c.q = values_of(inputs.q);
  c.k = values_of(inputs.k);
  c.v = values_of(inputs.v);
  c.out_grad = values_of(inputs.out_grad);
  c.paths = sample_paths(forest);
  const AttentionAnswer answer = attention_oracle(c);
  return {tensor_of(answer.out, inputs.q.sizes()),
          tensor_of(answer.lse, {inputs.q.size(0), inputs.q.size(1)}).t(),
          tensor_of(answer.q_grad, inputs.q.sizes()), tensor_of(answer.k_grad, inputs.k.sizes()),
          tensor_of(answer.v_grad, inputs.v.sizes())};
}

/// max |x - y| / max(1, max |y|); NaN counts as infinite.
inline double distance(const at::Tensor& x, const at::Tensor& y) {
  if (x.sizes() != y.sizes()) return INFINITY;
  const std::vector<double> a = values_of(x), b = values_of(y);
  double error = 0, size = 1;
  for (size_t i = 0; i < a.size(); ++i) {
    const double gap = std::fabs(a[i] - b[i]);
    error = std::isnan(gap) ? INFINITY : std::fmax(error, gap);
    size = std::fmax(size, std::fabs(b[i]));
  }
  return error / size;
}

/// The largest distance over out, lse and the three gradients.
inline double distance(const AttentionRun& x, const AttentionRun& y) {
  const std::vector<at::Tensor> a = x.all(), b = y.all();
  double error = 0;
  for (size_t i = 0; i < a.size(); ++i) error = std::fmax(error, distance(a[i], b[i]));
  return error;
}

}  // namespace zorro::reference
