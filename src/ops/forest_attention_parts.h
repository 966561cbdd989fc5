#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zorro {

/// Nodes whose own triangles are computed in one causal call.
struct TriangleBatch {
  std::vector<int64_t> begins;  ///< first packed token of each node
  std::vector<int64_t> lengths;
  int64_t max_length = 0;
  /// Distance between neighbouring begins when all lengths are equal and the nodes evenly spaced:
  /// the call then works on a view. 0: tokens are gathered into a right-padded batch.
  int64_t stride = 0;

  int64_t size() const { return static_cast<int64_t>(begins.size()); }
};

/// All queries below an inner node against its keys.
struct Rectangle {
  int64_t q_begin, q_end, k_begin, k_end;  ///< packed tokens, no side empty
};

/// The blocks of the forest's mask that hold visible pairs.
struct AttentionParts {
  std::vector<TriangleBatch> triangles;  ///< every query's node is in one of them
  std::vector<Rectangle> rectangles;     ///< in packed order of their nodes
};

/// Cuts the mask of queries [q_begin, q_end) into parts. nodes [N, 5] on the CPU, the last ends at
/// q_end; subtrees may reach beyond.
AttentionParts attention_parts(const at::Tensor& nodes, int64_t q_begin, int64_t q_end);

}  // namespace zorro
