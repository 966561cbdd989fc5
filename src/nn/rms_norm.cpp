#include "zorro/nn/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/lifted_dtype.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            double eps, bool is_centered) {
    const at::Tensor lifted = x.to(lifted_dtype(x));
    const at::Tensor rstd = lifted.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_();
    ctx->save_for_backward({x, weight, rstd});
    ctx->saved_data["is_centered"] = is_centered;
    if (is_centered)
      return lifted.mul(rstd).mul_(weight.to(lifted.scalar_type()).add(1)).to(x.scalar_type());
    return lifted.mul(rstd).to(x.scalar_type()).mul_(weight);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &rstd = saved[2];
    const at::Tensor normed = x.to(lifted_dtype(x)).mul(rstd);
    const bool is_centered = ctx->saved_data["is_centered"].toBool();
    at::Tensor d_x, d_weight;
    if (ctx->needs_input_grad(0)) {
      const at::Tensor d_normed =
          is_centered
              ? grads[0].to(normed.scalar_type()).mul(weight.to(normed.scalar_type()).add(1))
              : grads[0].mul(weight).to(normed.scalar_type());
      const at::Tensor share = d_normed.mul(normed).mean(-1, /*keepdim=*/true);
      d_x = d_normed.sub(normed.mul(share)).mul_(rstd).to(x.scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      // The forward's rounding of the normed rows is part of the function; the sum runs in higher
      // precision.
      const at::Tensor rounded =
          is_centered ? normed : normed.to(x.scalar_type()).to(normed.scalar_type());
      d_weight = grads[0]
                     .to(normed.scalar_type())
                     .mul(rounded)
                     .reshape({-1, weight.size(0)})
                     .sum(0)
                     .to(weight.scalar_type());
    }
    return {d_x, d_weight, {}, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormKind kind) {
  ZORRO_CHECK(weight.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight.size(0),
              "[rms_norm] weight must have the size of x's last dimension, got ", weight.sizes(),
              " and ", x.sizes(), ".");
  return RmsNorm::apply(x, weight, eps, kind == NormKind::kZeroCentered);
}

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                          double eps) {
  const at::Tensor normed = rms_norm(x, weight.to(x.scalar_type()), eps);
  return (normed * at::silu(gate.to(lifted_dtype(gate)))).to(x.scalar_type());
}

}  // namespace zorro
