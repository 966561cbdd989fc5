#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zorro {

struct AdamWOptions {
  double lr = 1e-6;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  ///< decoupled, on every parameter, as torch.optim.AdamW
};

/// AdamW over leaf tensors, with the arithmetic of torch.optim.AdamW. State in the parameter's dtype.
class AdamW {
 public:
  AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options);
  /// One step from the parameters' gradients; a parameter without gradient is left alone.
  void step();
  /// Drops all gradients.
  void zero_grad();

 private:
  std::vector<at::Tensor> parameters_, mean_, square_;
  AdamWOptions options_;
  int64_t steps_ = 0;
};

/// Scales gradients so that their joint 2-norm is at most max_norm (> 0); returns the norm before. As
/// torch.nn.utils.clip_grad_norm_.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm);

}  // namespace zorro
