#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// What norms, routers and decays are computed in: float64 for float64, else float32.
inline at::ScalarType lifted_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace zorro
