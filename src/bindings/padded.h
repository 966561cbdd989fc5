#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "zorro/forest/sample.h"

// The boundary between a trainer's rectangular tensors and the forest: every argument is checked
// here, once.
namespace zorro::bindings {

/// The tensors of a padded batch on the CPU as int64, and views of them.
struct PaddedInput {
  at::Tensor token_ids, attention_mask, positions;
  PaddedBatch batch;
};

/// Checks and copies the caller's tensors.
///
/// Shapes  input_ids [B, S] · attention_mask [B, S] of 0 and 1, any integer, bool or float dtype ·
///         position_ids [S], [1, S], [B, S] or [A, B, S]. Axes that agree on every valid token are
///         one.
/// Throws  InvalidArgument naming the argument.
PaddedInput padded_input(const at::Tensor& input_ids,
                         const std::optional<at::Tensor>& attention_mask,
                         const std::optional<at::Tensor>& position_ids, int64_t response_length);

/// An int64 CPU tensor of some values.
at::Tensor to_tensor(const std::vector<int64_t>& values);

}  // namespace zorro::bindings
