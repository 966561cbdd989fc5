#include "zorro/ops/expert_mlp.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "ops/checks.h"

namespace zorro {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "expert_mlp";
using Forward = std::tuple<at::Tensor, at::Tensor>;  // y, hidden rows in the order of experts
using ForwardSignature = Forward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const at::Tensor&);
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BackwardSignature = Backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&);

void check(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
           const at::Tensor& expert, const at::Tensor& weight) {
  check_dims(kOp, "x", x, 2, "[T, H]");
  check_dims(kOp, "gate_up", gate_up, 3, "[E, 2I, H]");
  check_dims(kOp, "down", down, 3, "[E, H, I]");
  check_dims(kOp, "expert", expert, 2, "[T, K]");
  check_dims(kOp, "weight", weight, 2, "[T, K]");
  check_float_dtype(kOp, "x", x);
  check_same_dtype(kOp, "gate_up", gate_up, x);
  check_same_dtype(kOp, "down", down, x);
  check_same_dtype(kOp, "weight", weight, x);
  check_int64(kOp, "expert", expert);
  check_size(kOp, "gate_up", gate_up, 2, x.sym_size(1));
  check_size(kOp, "down", down, 0, gate_up.sym_size(0));
  check_size(kOp, "down", down, 1, x.sym_size(1));
  check_size(kOp, "gate_up", gate_up, 1, down.sym_size(2) * 2);
  check_size(kOp, "expert", expert, 0, x.sym_size(0));
  check_size(kOp, "weight", weight, 0, x.sym_size(0));
  check_size(kOp, "weight", weight, 1, expert.sym_size(1));
}

/// The slots (token, choice) sorted by expert, stable: where each expert's begin.
struct Slots {
  at::Tensor order;            ///< [T K] slot at each sorted place
  at::Tensor back;             ///< [T K] sorted place of each slot
  at::Tensor token;            ///< [T K] token of each sorted place
  std::vector<int64_t> begin;  ///< [E + 1]

  Slots(const at::Tensor& expert, int64_t experts) {
    const at::Tensor flat = expert.flatten();
    order = at::argsort(flat, /*stable=*/true, 0, false);
    back = at::argsort(order, /*stable=*/true, 0, false);
    token = order.floor_divide(expert.size(1));
    if (flat.numel() > 0) {
      const auto lowest = flat.min().item<int64_t>(), highest = flat.max().item<int64_t>();
      ZORRO_CHECK(lowest >= 0 && highest < experts, "[", kOp, "] expert must be in [0, ", experts,
                  "), got ", lowest < 0 ? lowest : highest, ".");
    }
    const at::Tensor counts = at::bincount(flat, {}, experts).cpu();
    begin.push_back(0);
    for (int64_t e = 0; e < experts; ++e)
      begin.push_back(begin.back() + counts.const_data_ptr<int64_t>()[e]);
  }

  template <typename Body>
  void each(const Body& body) const {
    for (size_t e = 0; e + 1 < begin.size(); ++e)
      if (begin[e + 1] > begin[e]) body(static_cast<int64_t>(e), begin[e], begin[e + 1] - begin[e]);
  }
};

/// rows [T K, in] times each expert's matrix [in, out].
at::Tensor grouped(const Slots& slots, const at::Tensor& rows, const at::Tensor& matrices) {
  at::Tensor out = at::empty({rows.size(0), matrices.size(2)}, rows.options());
  slots.each([&](int64_t expert, int64_t first, int64_t count) {
    at::Tensor mine = out.narrow(0, first, count);
    at::mm_out(mine, rows.narrow(0, first, count), matrices.select(0, expert));
  });
  return out;
}

/// a^T b of each expert's rows; zeros for an expert without any.
void grouped_outer(const Slots& slots, const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  slots.each([&](int64_t expert, int64_t first, int64_t count) {
    at::Tensor mine = out.select(0, expert);
    at::mm_out(mine, a.narrow(0, first, count).t(), b.narrow(0, first, count));
  });
}

/// Sorted rows back to their tokens, the choices of a token summed in their order.
at::Tensor sum_slots(const Slots& slots, const at::Tensor& rows, int64_t choices) {
  return rows.index_select(0, slots.back).unflatten(0, {-1, choices}).sum(1);
}

at::Tensor sorted_weight(const Slots& slots, const at::Tensor& weight) {
  return weight.flatten().index_select(0, slots.order).unsqueeze(1);
}

Forward forward(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                const at::Tensor& expert, const at::Tensor& weight) {
  check(x, gate_up, down, expert, weight);
  const Slots slots(expert, gate_up.size(0));
  const at::Tensor hidden = grouped(slots, x.index_select(0, slots.token), gate_up.transpose(1, 2));
  const int64_t inner = down.size(2);
  const at::Tensor active =
      at::silu(hidden.narrow(1, 0, inner)).mul_(hidden.narrow(1, inner, inner));
  at::Tensor out = grouped(slots, active, down.transpose(1, 2));
  out.mul_(sorted_weight(slots, weight));
  return {sum_slots(slots, out, expert.size(1)), hidden};
}

Backward backward(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& gate_up,
                  const at::Tensor& down, const at::Tensor& expert, const at::Tensor& weight,
                  const at::Tensor& hidden) {
  const Slots slots(expert, gate_up.size(0));
  const int64_t inner = down.size(2);
  const at::Tensor gate = hidden.narrow(1, 0, inner), up = hidden.narrow(1, inner, inner);
  const at::Tensor silu = at::silu(gate), active = silu.mul(up);
  const at::Tensor scale = sorted_weight(slots, weight);
  const at::Tensor d_rows = d_y.index_select(0, slots.token);
  const at::Tensor d_active = grouped(slots, d_rows, down);  // before the weight
  const at::Tensor d_weight =
      active.mul(d_active).sum(1).index_select(0, slots.back).view(weight.sizes());
  at::Tensor d_down = at::zeros_like(down), d_gate_up = at::zeros_like(gate_up);
  grouped_outer(slots, d_rows.mul(scale), active, d_down);

  const at::Tensor d_scaled = d_active.mul(scale);
  at::Tensor d_hidden = at::empty_like(hidden);
  d_hidden.narrow(1, 0, inner).copy_(at::silu_backward(d_scaled.mul(up), gate));
  d_hidden.narrow(1, inner, inner).copy_(d_scaled.mul(silu));
  grouped_outer(slots, d_hidden, x.index_select(0, slots.token), d_gate_up);
  const at::Tensor d_x = sum_slots(slots, grouped(slots, d_hidden, gate_up), expert.size(1));
  return {d_x, d_gate_up, d_down, d_weight};
}

Forward forward_meta(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                     const at::Tensor& expert, const at::Tensor& weight) {
  check(x, gate_up, down, expert, weight);
  return {at::empty_like(x),
          at::empty_symint({expert.sym_numel(), gate_up.sym_size(1)}, x.options())};
}

Backward backward_meta(const at::Tensor&, const at::Tensor& x, const at::Tensor& gate_up,
                       const at::Tensor& down, const at::Tensor&, const at::Tensor& weight,
                       const at::Tensor&) {
  return {at::empty_like(x), at::empty_like(gate_up), at::empty_like(down), at::empty_like(weight)};
}

struct ExpertMlp : torch::autograd::Function<ExpertMlp> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const at::Tensor& gate_up, const at::Tensor& down,
                               const at::Tensor& expert, const at::Tensor& weight) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::expert_mlp", "")
                               .typed<ForwardSignature>();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [y, hidden] = op.call(x, gate_up, down, expert, weight);
    context->save_for_backward({x, gate_up, down, expert, weight, hidden});
    context->mark_non_differentiable({hidden});
    return {y, hidden};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::expert_mlp_backward", "")
                               .typed<BackwardSignature>();
    const variable_list saved = context->get_saved_variables();
    auto [d_x, d_gate_up, d_down, d_weight] =
        op.call(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]);
    return {d_x, d_gate_up, d_down, {}, d_weight};
  }
};

Forward differentiable(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                       const at::Tensor& expert, const at::Tensor& weight) {
  const variable_list found = ExpertMlp::apply(x, gate_up, down, expert, weight);
  return {found[0], found[1]};
}

}  // namespace

at::Tensor expert_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                      const at::Tensor& expert, const at::Tensor& weight) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zorro::expert_mlp", "")
                             .typed<ForwardSignature>();
  return std::get<0>(op.call(x, gate_up, down, expert, weight));
}

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def(
      "expert_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor expert, Tensor weight) "
      "-> (Tensor y, Tensor hidden)");
  m.def(
      "expert_mlp_backward(Tensor d_y, Tensor x, Tensor gate_up, Tensor down, Tensor expert, "
      "Tensor weight, Tensor hidden) -> (Tensor dx, Tensor d_gate_up, Tensor d_down, "
      "Tensor d_weight)");
}

TORCH_LIBRARY_IMPL(zorro, CompositeExplicitAutograd, m) {
  m.impl("expert_mlp", forward);
  m.impl("expert_mlp_backward", backward);
}

TORCH_LIBRARY_IMPL(zorro, Meta, m) {
  m.impl("expert_mlp", forward_meta);
  m.impl("expert_mlp_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(zorro, Autograd, m) {
  m.impl("expert_mlp", differentiable);
  m.impl("expert_mlp_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace zorro
