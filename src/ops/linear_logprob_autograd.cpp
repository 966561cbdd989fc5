#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

namespace zorro {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using ForwardSignature = Forward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const at::Tensor&, c10::string_view, int64_t);
using BackwardSignature = std::tuple<at::Tensor, at::Tensor>(
    const OptionalTensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, c10::string_view, int64_t, std::array<bool, 2>);

// Saved: the five arguments and, in the accumulation type, entropy, maximum, log_sum [M] and the
// logits, [U, V] unless the mode is memory (then [0]).
struct LinearLogprob : torch::autograd::Function<LinearLogprob> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& hidden, const at::Tensor& weight,
                                                const at::Tensor& row, const at::Tensor& label,
                                                const at::Tensor& temperature,
                                                const std::string& mode, int64_t budget_bytes) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::linear_logprob", "")
                               .typed<ForwardSignature>();
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [logprob, entropy, maximum, log_sum, logits] =
        op.call(hidden, weight, row, label, temperature, mode, budget_bytes);
    context->save_for_backward(
        {hidden, weight, row, label, temperature, entropy, maximum, log_sum, logits});
    context->saved_data["mode"] = mode;
    context->saved_data["budget_bytes"] = budget_bytes;
    context->mark_non_differentiable({maximum, log_sum, logits});
    context->set_materialize_grads(false);  // an output that no loss reads costs nothing
    return {logprob, entropy, maximum, log_sum, logits};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    torch::autograd::variable_list result(7);
    const std::array<bool, 2> wanted{context->needs_input_grad(0), context->needs_input_grad(1)};
    const auto upstream = [&](size_t output) {
      return gradients[output].defined() ? OptionalTensor(gradients[output]) : std::nullopt;
    };
    if (!gradients[0].defined() && !gradients[1].defined()) return result;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::linear_logprob_backward", "")
                               .typed<BackwardSignature>();
    const auto saved = context->get_saved_variables();
    std::tie(result[0], result[1]) =
        op.call(upstream(0), upstream(1), saved[0], saved[1], saved[2], saved[3], saved[4],
                saved[5], saved[6], saved[7], saved[8], context->saved_data["mode"].toStringRef(),
                context->saved_data["budget_bytes"].toInt(), wanted);
    return result;
  }
};

Forward differentiable(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& row,
                       const at::Tensor& label, const at::Tensor& temperature,
                       c10::string_view mode, int64_t budget_bytes) {
  const auto outputs = LinearLogprob::apply(hidden, weight, row, label, temperature,
                                            std::string(mode), budget_bytes);
  return {outputs[0], outputs[1], outputs[2], outputs[3], outputs[4]};
}

}  // namespace

TORCH_LIBRARY_IMPL(zorro, Autograd, m) {
  m.impl("linear_logprob", &differentiable);
  m.impl("linear_logprob_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace zorro
