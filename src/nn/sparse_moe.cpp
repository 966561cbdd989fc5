#include "zorro/nn/sparse_moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>

#include "nn/lifted_dtype.h"
#include "zorro/ops/expert_mlp.h"

namespace zorro {

SparseMoe::SparseMoe(const SparseMoeOptions& options) : options_(options) {
  if (options.shared_intermediate > 0)
    shared_ = std::make_unique<Mlp>(options.hidden, options.shared_intermediate);
}

ChannelResult SparseMoe::forward(const at::Tensor& x) const {
  const at::Tensor logits = at::linear(x, router_);
  auto [weight, expert] = at::topk(at::softmax(logits, -1, lifted_dtype(x)), options_.choices, -1);
  if (options_.normalize) weight = weight / weight.sum(-1, /*keepdim=*/true);
  at::Tensor y = expert_mlp(x, gate_up_, down_, expert, weight.to(x.scalar_type()));
  if (shared_) y = y + at::sigmoid(at::linear(x, shared_gate_)) * shared_->apply(x);
  return {y, logits};
}

std::vector<Weight> SparseMoe::weights() {
  const SparseMoeOptions& o = options_;
  std::vector<Weight> list = {
      {"gate.weight", {o.experts, o.hidden}, &router_},
      {"experts.gate_up_proj", {o.experts, 2 * o.intermediate, o.hidden}, &gate_up_},
      {"experts.down_proj", {o.experts, o.hidden, o.intermediate}, &down_}};
  if (shared_) {
    for (Weight& weight : shared_->weights())
      list.push_back(prefixed("shared_expert.", std::move(weight)));
    list.push_back({"shared_expert_gate.weight", {1, o.hidden}, &shared_gate_});
  }
  return list;
}

}  // namespace zorro
