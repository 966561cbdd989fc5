#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zorro {

struct AdamWOptions {
  double lr = 1e-6;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  ///< decoupled, on every parameter, as torch.optim.AdamW
};

/// AdamW over leaf tensors, in place and with the arithmetic of torch.optim.AdamW.
///
/// p *= 1 - lr weight_decay;  m = lerp(m, g, 1 - beta1);  v = beta2 v + (1 - beta2) g^2;
/// p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps), t counted per parameter.
///
/// Types     floating point, each parameter its own; state in the parameter's dtype, 2 numbers a
///           weight, made at the parameter's first step. A parameter without gradient is left
///           alone (no decay either).
/// Throws    InvalidArgument: a parameter is undefined, not floating point or not a leaf; lr, eps
///           or weight_decay is not >= 0 and finite; a beta is outside [0, 1).
/// Source    Loshchilov and Hutter, arXiv 1711.05101.
class AdamW {
 public:
  AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options);
  /// One step from the parameters' gradients.
  void step();
  /// Drops all gradients.
  void zero_grad();

 private:
  std::vector<at::Tensor> parameters_, mean_, square_;
  std::vector<int64_t> steps_;
  AdamWOptions options_;
};

/// Scales gradients so that their joint 2-norm is at most max_norm; returns the norm before. As
/// torch.nn.utils.clip_grad_norm_: the factor is min(1, max_norm / (norm + 1e-6)).
///
/// A norm that is NaN or infinite is returned and nothing is scaled: the caller decides whether to
/// skip the step. Tensors without gradient do not count; without any the norm is 0.
///
/// Types     the gradients' own; norms in float32 or better, added up in float64.
/// Throws    InvalidArgument: max_norm is not > 0.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm);

}  // namespace zorro
