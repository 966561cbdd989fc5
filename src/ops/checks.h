#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "zorro/core/error.h"

// Checks of an op's arguments. Each names the op, the argument, the rule and what came instead.
namespace zorro {

inline void check_dims(const char* op, const char* argument, const at::Tensor& tensor, int64_t dims,
                       const char* shape) {
  ZORRO_CHECK(tensor.defined() && tensor.dim() == dims, "[", op, "] ", argument, " must be ", shape,
              ", got ", tensor.defined() ? concat("shape ", tensor.sym_sizes()) : "nothing", ".");
}

inline void check_size(const char* op, const char* argument, const at::Tensor& tensor, int64_t dim,
                       const c10::SymInt& size) {
  ZORRO_CHECK(tensor.sym_size(dim) == size, "[", op, "] ", argument, " must have size ", size,
              " in dimension ", dim, ", got shape ", tensor.sym_sizes(), ".");
}

inline void check_same_dtype(const char* op, const char* argument, const at::Tensor& tensor,
                             const at::Tensor& like) {
  ZORRO_CHECK(tensor.scalar_type() == like.scalar_type(), "[", op, "] ", argument, " must be ",
              like.scalar_type(), " as the first argument, got ", tensor.scalar_type(), ".");
}

inline void check_same_device(const char* op, const char* argument, const at::Tensor& tensor,
                              const at::Tensor& like) {
  ZORRO_CHECK(tensor.device() == like.device(), "[", op, "] ", argument, " must be on ",
              like.device(), " as the first argument, got ", tensor.device(), ".");
}

inline void check_int64(const char* op, const char* argument, const at::Tensor& tensor) {
  ZORRO_CHECK(tensor.scalar_type() == at::kLong, "[", op, "] ", argument, " must be int64, got ",
              tensor.scalar_type(), ".");
}

inline void check_float_dtype(const char* op, const char* argument, const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  ZORRO_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16, "[", op, "] ",
              argument, " must be float32, float64 or bfloat16, got ", dtype, ".");
}

/// The dtype that sums are kept in: float64 for float64, else float32.
inline at::ScalarType accumulate_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace zorro
