#include "zorro/nn/rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <numbers>

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

/// The dimension whose wave turns `turns` times within the original length.
double turning_dim(const RotaryOptions& options, int64_t dims, double turns) {
  return static_cast<double>(dims) *
         std::log(options.original_max_positions / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(options.theta));
}

at::Tensor yarn(const at::Tensor& frequency, int64_t dims, const RotaryOptions& options) {
  double low = turning_dim(options, dims, options.beta_fast);
  double high = turning_dim(options, dims, options.beta_slow);
  if (options.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, static_cast<double>(dims - 1));
  if (low == high) high += 0.001;
  const at::Tensor ramp =
      at::arange(dims / 2, frequency.options()).sub(low).div(high - low).clamp(0, 1);
  return frequency.div(options.factor).mul(ramp).add(frequency.mul(1 - ramp));
}

at::Tensor llama3(const at::Tensor& frequency, const RotaryOptions& options) {
  const at::Tensor wavelength = 2 * std::numbers::pi / frequency;
  const at::Tensor smooth =
      (options.original_max_positions / wavelength - options.low_freq_factor) /
      (options.high_freq_factor - options.low_freq_factor);
  const at::Tensor blend = smooth.clamp(0, 1);
  return frequency.div(options.factor).mul(1 - blend).add(frequency.mul(blend));
}

at::Tensor scaled(const at::Tensor& frequency, int64_t dims, const RotaryOptions& options) {
  switch (options.scaling) {
    case RotaryOptions::Scaling::kNone:
      return frequency;
    case RotaryOptions::Scaling::kLinear:
      return frequency.div(options.factor);
    case RotaryOptions::Scaling::kLlama3:
      return llama3(frequency, options);
    case RotaryOptions::Scaling::kYarn:
      return yarn(frequency, dims, options);
  }
  return frequency;
}

double magnitude(const RotaryOptions& options) {
  if (options.scaling != RotaryOptions::Scaling::kYarn) return 1;
  if (options.attention_factor > 0) return options.attention_factor;
  return options.factor > 1 ? 0.1 * std::log(options.factor) + 1 : 1;
}

/// The axis of each frequency: T, H, W in turn while a section lasts, then T.
at::Tensor axis_of(int64_t frequencies, const std::vector<int64_t>& section) {
  at::Tensor axes = at::zeros({frequencies}, at::kLong);
  auto* axis = axes.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < frequencies; ++i)
    for (const int64_t a : {1, 2})
      if (i % 3 == a && i < 3 * section[static_cast<size_t>(a)]) axis[i] = a;
  return axes;
}

/// [T, frequencies] the position that each frequency turns by.
at::Tensor turning(const at::Tensor& positions, int64_t frequencies, const RotaryOptions& options) {
  if (positions.dim() == 1) return positions.unsqueeze(1);
  if (positions.size(0) == 1) return positions.select(0, 0).unsqueeze(1);
  ZORRO_CHECK(positions.size(0) == 3 && options.mrope_section.size() == 3,
              "[rope] positions must have one axis, or three in a model with mrope_section, got ",
              positions.size(0), ".");
  return positions
      .index_select(0, axis_of(frequencies, options.mrope_section).to(positions.device()))
      .t();
}

}  // namespace

RotaryTable rotary_table(const at::Tensor& positions, int64_t dims, const RotaryOptions& options,
                         at::ScalarType dtype) {
  ZORRO_CHECK(dims > 0 && dims % 2 == 0, "[rope] dims must be even and > 0, got ", dims, ".");
  const at::ScalarType angle_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor exponent =
      at::arange(0, dims, 2, positions.options()).to(angle_dtype).div(static_cast<double>(dims));
  const at::Tensor frequency = scaled(at::pow(options.theta, exponent).reciprocal(), dims, options);
  const at::Tensor half =
      turning(positions, dims / 2, options).to(angle_dtype).mul(frequency.unsqueeze(0));
  const at::Tensor angle = at::cat({half, half}, 1);
  const double size = magnitude(options);
  return {angle.cos().mul_(size).to(dtype), angle.sin().mul_(size).to(dtype)};
}

at::Tensor apply_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  ZORRO_CHECK(x.dim() == 3 && cos.dim() == 2 && cos.sizes() == sin.sizes() &&
                  cos.size(0) == x.size(0) && cos.size(1) <= x.size(2),
              "[rope] table must be [T, dims] for x [T, heads, head_dim], got ", cos.sizes(),
              " and ", x.sizes(), ".");
  return Rope::apply(x, cos, sin);
}

}  // namespace zorro
