#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

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
/// logprob = x_label - lse(x), entropy = -sum_v p_v ln p_v, with x = hidden[row] weight^T /
/// temperature over all V rows of weight. Many tokens may share a row: each has its own label and
/// temperature.
///
/// Shapes    hidden [U, H] · weight [V, H], V > 0 · row [M] int64 into U · label [M] int64 into V ·
///           temperature [] or [M], any float dtype. U and M may be 0.
/// Types     hidden and weight of one dtype: float64, float32 or bfloat16. bfloat16 is widened to
///           float32 before the products, so logits are never rounded to it. One device; a scalar
///           temperature may be on the CPU.
/// Gradients hidden and weight, from logprob and from entropy, exact in every mode, accumulated in
///           float32 or better and rounded once; none for temperature; no second derivative.
///           An input that wants no gradient gets no buffer. Tokens whose upstream gradient is 0
///           are left out of the backward pass: they cost nothing and their NaN reaches nothing.
/// Values    A logit of -inf has probability 0 and adds 0. NaN, +inf or only -inf in a row gives
///           NaN for the tokens of that row alone.
/// Cost      one matrix row per distinct predictor, statistics per distinct (row, temperature).
///           kMemory: 4 products of U V H (one recomputed) and O(tile) memory; else 3 products, the
///           logits saved [U, V], and in backward a second [U, V] (kNone) or a tile (kCompute).
///           bfloat16 adds hidden and its gradient in float32; kNone also the whole weight.
///           Rows and labels are checked and grouped on the host: a device is synchronised once.
/// Throws    InvalidArgument: a shape, dtype or device disagrees; a row or label out of range (its
///           index and value); a temperature that is not > 0 and finite (its index and value);
///           budget_bytes < 1.
/// Source    docs/math.md#head.
LogprobResult linear_logprob(const at::Tensor& hidden, const at::Tensor& weight,
                             const at::Tensor& row, const at::Tensor& label,
                             const at::Tensor& temperature,
                             const LinearLogprobOptions& options = {});

}  // namespace zorro
