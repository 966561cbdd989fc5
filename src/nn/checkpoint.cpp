#include "zorro/nn/checkpoint.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

namespace zorro {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct BodyHolder : torch::CustomClassHolder {
  explicit BodyHolder(CheckpointBody held) : body(std::move(held)) {}
  CheckpointBody body;
};

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  // A TensorList: Function::apply would not track the tensors of a std::vector.
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, int64_t num_inputs,
                               const CheckpointBody& body) {
    const variable_list all = tensors.vec();
    ctx->save_for_backward(all);
    ctx->saved_data["num_inputs"] = num_inputs;
    ctx->saved_data["body"] = c10::IValue::make_capsule(c10::make_intrusive<BodyHolder>(body));
    return body(variable_list(all.begin(), all.begin() + num_inputs));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto num_inputs = static_cast<size_t>(ctx->saved_data["num_inputs"].toInt());
    auto* holder = static_cast<BodyHolder*>(ctx->saved_data["body"].toCapsule().get());

    variable_list inputs, wanted;
    std::vector<size_t> wanted_slots;
    for (size_t slot = 0; slot < saved.size(); ++slot) {
      const bool is_input = slot < num_inputs;
      const bool wants = ctx->needs_input_grad(slot);
      at::Tensor leaf = saved[slot];
      if (is_input) {
        leaf = leaf.detach().requires_grad_(wants);
        inputs.push_back(leaf);
      }
      if (!wants) continue;
      wanted.push_back(leaf);
      wanted_slots.push_back(slot);
    }

    variable_list outputs;
    {
      const at::AutoGradMode record(true);
      outputs = holder->body(inputs);
    }
    variable_list reached, upstream;  // outputs that nobody used have no gradient
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!grads[i].defined() || !outputs[i].requires_grad()) continue;
      reached.push_back(outputs[i]);
      upstream.push_back(grads[i]);
    }
    variable_list result(saved.size() + 2);  // the two other arguments have slots too
    if (reached.empty()) return result;
    const variable_list found =
        torch::autograd::grad(reached, wanted, upstream, /*retain_graph=*/false,
                              /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) result[wanted_slots[i]] = found[i];
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint(const CheckpointBody& body,
                                   const std::vector<at::Tensor>& inputs,
                                   const std::vector<at::Tensor>& parameters) {
  // Autograd takes defined tensors only: the body gets the undefined ones put back in their places.
  variable_list tracked;
  std::vector<bool> is_defined;
  for (const at::Tensor& input : inputs) {
    is_defined.push_back(input.defined());
    if (input.defined()) tracked.push_back(input);
  }
  const auto num_inputs = static_cast<int64_t>(tracked.size());
  const CheckpointBody on_defined = [body, is_defined](const variable_list& defined) {
    variable_list all;
    auto following = defined.begin();
    for (const bool present : is_defined) all.push_back(present ? *following++ : at::Tensor());
    return body(all);
  };
  tracked.insert(tracked.end(), parameters.begin(), parameters.end());
  return Checkpoint::apply(at::TensorList(tracked), num_inputs, on_defined);
}

}  // namespace zorro
