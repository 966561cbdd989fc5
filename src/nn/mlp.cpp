#include "zorro/nn/mlp.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>

namespace zorro {

at::Tensor Mlp::apply(const at::Tensor& x) const {
  const auto project = [](const at::Tensor& rows, const at::Tensor& weight,
                          const at::Tensor& bias) {
    return at::linear(rows, weight, bias.defined() ? std::optional(bias) : std::nullopt);
  };
  const at::Tensor gate = project(x, gate_, gate_bias_), up = project(x, up_, up_bias_);
  return project(at::silu(gate).mul(up), down_, down_bias_);
}

std::vector<Weight> Mlp::weights() {
  std::vector<Weight> list = {{"gate_proj.weight", {intermediate_, hidden_}, &gate_},
                              {"up_proj.weight", {intermediate_, hidden_}, &up_},
                              {"down_proj.weight", {hidden_, intermediate_}, &down_}};
  if (bias_)
    list.insert(list.end(), {{"gate_proj.bias", {intermediate_}, &gate_bias_},
                             {"up_proj.bias", {intermediate_}, &up_bias_},
                             {"down_proj.bias", {hidden_}, &down_bias_}});
  return list;
}

}  // namespace zorro
