#include "zorro/nn/rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/pow.h>
#include <torch/csrc/autograd/custom_function.h>

#include "zorro/core/error.h"

namespace zorro {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t half = cos.size(1) / 2, dims = cos.size(1);
  const at::Tensor c = cos.narrow(1, 0, half).unsqueeze(1), s = sin.narrow(1, 0, half).unsqueeze(1);
  const at::Tensor first = x.narrow(2, 0, half), second = x.narrow(2, half, half);
  at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  at::Tensor out_first = out.narrow(2, 0, half), out_second = out.narrow(2, half, half);
  out_first.copy_(first.mul(c).sub_(second.mul(s)));
  out_second.copy_(second.mul(c).add_(first.mul(s)));
  if (dims < x.size(2)) {
    const int64_t rest = x.size(2) - dims;
    out.narrow(2, dims, rest).copy_(x.narrow(2, dims, rest));
  }
  return out;
}

struct Rope : torch::autograd::Function<Rope> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotate(x, cos, sin);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {rotate(grads[0], saved[0], saved[1].neg()), {}, {}};
  }
};

}  // namespace

RotaryTable rotary_table(const at::Tensor& positions, int64_t dims, double theta,
                         at::ScalarType dtype) {
  ZORRO_CHECK(dims > 0 && dims % 2 == 0, "[rope] dims must be even and > 0, got ", dims, ".");
  const at::ScalarType angle_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor exponent =
      at::arange(0, dims, 2, positions.options()).to(angle_dtype).div(static_cast<double>(dims));
  const at::Tensor frequency = at::pow(theta, exponent).reciprocal();
  const at::Tensor half = positions.to(angle_dtype).unsqueeze(1).mul(frequency.unsqueeze(0));
  const at::Tensor angle = at::cat({half, half}, 1);
  return {angle.cos().to(dtype), angle.sin().to(dtype)};
}

at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  ZORRO_CHECK(x.dim() == 3 && cos.dim() == 2 && cos.sizes() == sin.sizes() &&
                  cos.size(0) == x.size(0) && cos.size(1) <= x.size(2),
              "[rope] table must be [T, dims] for x [T, heads, head_dim], got ", cos.sizes(),
              " and ", x.sizes(), ".");
  return Rope::apply(x, cos, sin);
}

}  // namespace zorro
