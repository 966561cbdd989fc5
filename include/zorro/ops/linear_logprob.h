#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// How the output head is computed. The numbers and gradients are the same.
enum class HeadMode {
  kNone,     ///< whole logits at once, kept for backward
  kCompute,  ///< whole logits once, everything that follows in chunks of rows
  kMemory    ///< tiles of rows x vocabulary, whole logits never exist, recomputed in backward
};

struct LinearLogprobOptions {
  HeadMode mode = HeadMode::kMemory;
  /// Bytes that tiles (kMemory) or chunks (kCompute) may use beside inputs and outputs. > 0.
  int64_t budget_bytes = int64_t{64} << 20;
};

struct LogprobResult {
  at::Tensor logprob;  ///< [M], float32 (float64 for float64 inputs), <= 0
  at::Tensor entropy;  ///< [M], float32 (float64 for float64 inputs), in [0, ln V]
};

/// Log-probability and entropy of labels under softmax(hidden weight^T / temperature).
///
/// Shapes    hidden [U, H] · weight [V, H] · row [M] int64 into U · label [M] int64 into V · temperature [] or [M] > 0.
/// Types     float64, float32, bfloat16; log-softmax in float32 or better.
/// Gradients hidden and weight, from logprob and from entropy, exact in every mode; none for temperature.
/// Cost      one matrix row per distinct predictor, statistics per distinct (row, temperature); kMemory 4 products
///           of U V H (one recomputed) and O(tile) memory, else 3 products and O(U V) memory.
/// Throws    InvalidArgument: shape, dtype or device disagrees; a label outside [0, V) (its index and value);
///           a temperature that is not > 0 or is NaN (its value).
/// Source    docs/math.md#head.
LogprobResult linear_logprob(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& row,
                             const at::Tensor& label, const at::Tensor& temperature,
                             const LinearLogprobOptions& options = {});

}  // namespace zorro
