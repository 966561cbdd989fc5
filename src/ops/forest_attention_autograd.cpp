#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <tuple>

namespace zorro {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::tuple<at::Tensor, at::Tensor> call_forward(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v,
                                                const at::Tensor& visible_until,
                                                const at::Tensor& nodes, double scale,
                                                int64_t q_begin, c10::string_view path) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zorro::forest_attention", "")
                             .typed<decltype(call_forward)>();
  return op.call(q, k, v, visible_until, nodes, scale, q_begin, path);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& visible_until,
    const at::Tensor& nodes, double scale, int64_t q_begin, c10::string_view path) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zorro::forest_attention_backward", "")
                             .typed<decltype(call_backward)>();
  return op.call(grad_out, q, k, v, out, lse, visible_until, nodes, scale, q_begin, path);
}

/// Saves q, k, v, out and lse: (2 Tq Hq + 2 Tk Hkv) D values of q's dtype and Tq Hq float32.
struct ForestAttention : torch::autograd::Function<ForestAttention> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& visible_until,
                               const at::Tensor& nodes, double scale, int64_t q_begin,
                               const std::string& path) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, lse] = call_forward(q, k, v, visible_until, nodes, scale, q_begin, path);
    ctx->save_for_backward({q, k, v, out, lse, visible_until, nodes});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["q_begin"] = q_begin;
    ctx->saved_data["path"] = path;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dq, dk, dv] =
        call_backward(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
                      saved[6], ctx->saved_data["scale"].toDouble(),
                      ctx->saved_data["q_begin"].toInt(), ctx->saved_data["path"].toStringView());
    return {dq, dk, dv, {}, {}, {}, {}, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> attention_autograd(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& v,
                                                      const at::Tensor& visible_until,
                                                      const at::Tensor& nodes, double scale,
                                                      int64_t q_begin, c10::string_view path) {
  const variable_list result =
      ForestAttention::apply(q, k, v, visible_until, nodes, scale, q_begin, std::string(path));
  return {result[0], result[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(zorro, Autograd, m) {
  m.impl("forest_attention", attention_autograd);
  m.impl("forest_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace zorro
