#include "zorro/ops/router_balance.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "ops/checks.h"

namespace zorro {
namespace {

constexpr const char* kOp = "router_balance_loss";

void check(const std::vector<at::Tensor>& logits, const at::Tensor& multiplicity, int64_t choices) {
  ZORRO_CHECK(!logits.empty(), "[", kOp, "] logits must hold a sparse layer, got none.");
  for (const at::Tensor& layer : logits) {
    check_dims(kOp, "logits", layer, 2, "[T, E]");
    check_size(kOp, "logits", layer, 0, multiplicity.sym_size(0));
    check_size(kOp, "logits", layer, 1, logits[0].sym_size(1));
  }
  ZORRO_CHECK(choices >= 1 && choices <= logits[0].size(1), "[", kOp, "] choices must lie in [1, ",
              logits[0].size(1), "], got ", choices, ".");
}

}  // namespace

RouterCounts router_counts(const std::vector<at::Tensor>& logits, const at::Tensor& multiplicity,
                           int64_t choices) {
  check(logits, multiplicity, choices);
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = accumulate_dtype(logits[0].scalar_type());
  const at::Tensor weight = multiplicity.to(dtype);
  RouterCounts result;
  result.counts = at::zeros({logits[0].size(1)}, weight.options());
  for (const at::Tensor& layer : logits) {
    const at::Tensor chosen = std::get<1>(at::topk(at::softmax(layer, -1, dtype), choices, -1));
    result.counts.index_add_(0, chosen.flatten(), weight.repeat_interleave(choices));
  }
  result.total = weight.sum() * static_cast<double>(logits.size());
  return result;
}

at::Tensor router_balance_loss(const std::vector<at::Tensor>& logits,
                               const at::Tensor& multiplicity, int64_t choices,
                               const RouterCounts& given) {
  check(logits, multiplicity, choices);
  const RouterCounts counts =
      given.counts.defined() ? given : router_counts(logits, multiplicity, choices);
  const at::ScalarType dtype = accumulate_dtype(logits[0].scalar_type());
  const at::Tensor weight = multiplicity.to(dtype).unsqueeze(1);
  at::Tensor probability = at::zeros({logits[0].size(1)}, weight.options());
  for (const at::Tensor& layer : logits)
    probability = probability + (at::softmax(layer, -1, dtype) * weight).sum(0);
  const at::Tensor share = counts.counts.to(dtype) / counts.total;
  return (share * probability / counts.total).sum() * static_cast<double>(logits[0].size(1));
}

namespace {

std::tuple<at::Tensor, at::Tensor> counts_op(at::TensorList logits, const at::Tensor& multiplicity,
                                             int64_t choices) {
  const RouterCounts counts = router_counts(logits.vec(), multiplicity, choices);
  return {counts.counts, counts.total};
}

at::Tensor loss_op(at::TensorList logits, const at::Tensor& multiplicity, int64_t choices,
                   const std::optional<at::Tensor>& counts,
                   const std::optional<at::Tensor>& total) {
  RouterCounts given;
  if (counts && total) given = {*counts, *total};
  return router_balance_loss(logits.vec(), multiplicity, choices, given);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def(
      "router_counts(Tensor[] logits, Tensor multiplicity, int choices) "
      "-> (Tensor counts, Tensor total)",
      counts_op);
  m.def(
      "router_balance_loss(Tensor[] logits, Tensor multiplicity, int choices, Tensor? counts=None, "
      "Tensor? total=None) -> Tensor",
      loss_op);
}

}  // namespace zorro
