#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace zorro {

/// A piece of a model: inputs -> outputs. It may read parameters that it holds itself.
using CheckpointBody =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

/// Runs body(inputs) and keeps only inputs for backward, which runs body once more. The same bits
/// as without.
///
/// inputs      tensors with or without gradient; undefined ones are passed through as they are.
/// parameters  the leaves that body reads itself and that want gradients.
/// Gradients   every input, every parameter, through every output.
/// Cost        one more forward.
std::vector<at::Tensor> checkpoint(const CheckpointBody& body,
                                   const std::vector<at::Tensor>& inputs,
                                   const std::vector<at::Tensor>& parameters);

}  // namespace zorro
