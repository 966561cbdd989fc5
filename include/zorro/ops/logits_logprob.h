#pragma once

#include <ATen/core/Tensor.h>

#include "zorro/ops/linear_logprob.h"

namespace zorro {

/// linear_logprob for a head that has computed its logits itself (a bias, an adapter).
///
/// Shapes    logits [U, V] · row [M] int64 into U · label [M] int64 into V · temperature [] or [M]
/// Types     float64, float32 or bfloat16 logits; computes and returns float32 (float64).
/// Gradients logits, from logprob and from entropy; plain ATen underneath.
/// Values    A logit of -inf has probability 0 and adds 0.
/// Cost      three matrices [M, V] kept for backward.
/// Throws    InvalidArgument when a shape or dtype disagrees.
/// Source    docs/math.md#head.
LogprobResult logits_logprob(const at::Tensor& logits, const at::Tensor& row,
                             const at::Tensor& label, const at::Tensor& temperature);

}  // namespace zorro
