#include "zorro/ops/logits_logprob.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <tuple>

#include "ops/checks.h"

namespace zorro {

LogprobResult logits_logprob(const at::Tensor& logits, const at::Tensor& row,
                             const at::Tensor& label, const at::Tensor& temperature) {
  constexpr const char* kOp = "logits_logprob";
  check_dims(kOp, "logits", logits, 2, "[U, V]");
  check_dims(kOp, "row", row, 1, "[M]");
  check_dims(kOp, "label", label, 1, "[M]");
  check_float_dtype(kOp, "logits", logits);
  check_size(kOp, "label", label, 0, row.sym_size(0));
  const at::Tensor divisor = temperature.dim() == 0 ? temperature : temperature.unsqueeze(1);
  const at::Tensor x =
      logits.to(accumulate_dtype(logits.scalar_type())).index_select(0, row) / divisor;
  const at::Tensor logp = at::log_softmax(x, -1);
  // Mask before the product: a logit of -inf has probability 0 and adds 0, also to the gradient.
  const at::Tensor finite = at::where(logp.isneginf(), 0, logp);
  return {at::gather(logp, 1, label.unsqueeze(1)).squeeze(1), -(logp.exp() * finite).sum(1)};
}

namespace {

std::tuple<at::Tensor, at::Tensor> logits_logprob_op(const at::Tensor& logits,
                                                     const at::Tensor& row, const at::Tensor& label,
                                                     const at::Tensor& temperature) {
  const LogprobResult result = logits_logprob(logits, row, label, temperature);
  return {result.logprob, result.entropy};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def(
      "logits_logprob(Tensor logits, Tensor row, Tensor label, Tensor temperature) "
      "-> (Tensor logprob, Tensor entropy)",
      logits_logprob_op);
}

}  // namespace zorro
