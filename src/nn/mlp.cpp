#include "zorro/nn/mlp.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>

namespace zorro {

at::Tensor Mlp::forward(const at::Tensor& x) const {
  return at::linear(at::silu(at::linear(x, gate_)).mul(at::linear(x, up_)), down_);
}

std::vector<Weight> Mlp::weights() {
  return {{"gate_proj.weight", {intermediate_, hidden_}, &gate_},
          {"up_proj.weight", {intermediate_, hidden_}, &up_},
          {"down_proj.weight", {hidden_, intermediate_}, &down_}};
}

}  // namespace zorro
