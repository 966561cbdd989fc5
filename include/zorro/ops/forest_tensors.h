#pragma once

#include <ATen/core/Tensor.h>

#include "zorro/forest/prefix_forest.h"

namespace zorro {

/// The device view of a forest: what ops and layers read. Built once a micro-batch.
struct ForestTensors {
  at::Tensor token_ids;       ///< [T] int64
  at::Tensor positions;       ///< [A, T] int64
  at::Tensor previous;        ///< [T] int64
  at::Tensor visible_until;   ///< [T] int64
  at::Tensor multiplicity;    ///< [T] int64
  at::Tensor nodes;           ///< [N, 5] int64, on the CPU: begin, end, subtree_end, parent, depth
  at::Tensor scored;          ///< [M] int64, packed index of scored tokens, sample after sample
  at::Tensor scored_offsets;  ///< [samples + 1] int64, on the CPU
  at::Tensor predictors;      ///< [U] int64, distinct packed rows that predict one, ascending
  at::Tensor row;             ///< [M] int64, index into predictors: where each is predicted
  at::Tensor label;           ///< [M] int64, token id of each scored token
  at::Tensor replicated;      ///< [sum of lengths] int64, packed index of every sample's tokens
  at::Tensor first_copy;      ///< [T] int64, index into `replicated` of each token's first copy

  int64_t num_tokens() const { return token_ids.size(0); }
  int64_t num_scored() const { return scored.size(0); }
};

/// Copies a forest's vectors to a device and derives predictors, rows and labels from them.
///
/// Throws  InternalError when a scored token has no predecessor.
ForestTensors to_tensors(const PrefixForest& forest, at::Device device = at::kCPU);

/// The node table of the packed tokens [0, end): later nodes dropped, subtrees cut. end must be a
/// node's end.
at::Tensor nodes_before(const at::Tensor& nodes, int64_t end);

/// x [T, ...] packed -> [sum of lengths, ...]: every sample's tokens, sample after sample.
/// Differentiable: a shared token's gradient is the sum over its copies.
at::Tensor packed_to_replicated(const at::Tensor& packed, const ForestTensors& forest);

/// Left inverse of packed_to_replicated: takes each packed token from its first copy. Bit-exact.
at::Tensor replicated_to_packed(const at::Tensor& replicated, const ForestTensors& forest);

/// x [N, ...] of valid tokens -> [num_rows, width, ...] with zeros in the pads; cells [N] int64 as
/// in PaddedSamples::cells. Differentiable.
at::Tensor to_padded(const at::Tensor& valid, const at::Tensor& cells, int64_t num_rows,
                     int64_t width);

/// Inverse of to_padded: picks the valid tokens of [num_rows, width, ...]. Differentiable,
/// bit-exact.
at::Tensor from_padded(const at::Tensor& padded, const at::Tensor& cells);

}  // namespace zorro
