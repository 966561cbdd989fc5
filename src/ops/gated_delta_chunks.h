#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// The gated delta rule of one level of a forest: equally deep nodes, cut into chunks of 64 tokens
// from their begins. Chunks of a level are numbered step by step: first the first chunk of every
// node, then the second of those that have one, and so on, longest nodes first.
namespace zorro::gated_delta {

inline constexpr int64_t kChunk = 64;

struct Level {
  std::vector<int64_t> nodes;   ///< node numbers, longest first (stable)
  std::vector<int64_t> active;  ///< [steps] how many of them have a chunk at each step
  int64_t first_chunk = 0;      ///< where the level's chunks begin among those of the forest
  int64_t num_chunks = 0;
  at::Tensor tokens;  ///< [num_chunks * kChunk] token of each place, T in the padding; CPU int64
};

struct Span {
  int64_t begin, end;  ///< tokens, counted from the first one given
};

struct Plan {
  std::vector<Level> levels;
  std::vector<Span> spans;       ///< [N]
  std::vector<int64_t> parents;  ///< [N]
  at::Tensor places;             ///< [T] place of each token among num_chunks * kChunk; CPU int64
  int64_t num_chunks = 0;
  int64_t num_nodes = 0;
  int64_t nodes_before = 0;

  /// Where the chunks of a node stand among those of the forest; `place` is its place in the level.
  std::vector<int64_t> chunks_of(const Level& level, int64_t place) const;
};

/// nodes [N, 5]; the first nodes_before are left out, their tokens too.
Plan make_plan(const at::Tensor& nodes, int64_t nodes_before);

/// The inputs of a level by chunk and value head, in the accumulation type, zero in the padding.
struct Inputs {
  at::Tensor q, k;     ///< [chunks, Hv, C, dk]
  at::Tensor v;        ///< [chunks, Hv, C, dv]
  at::Tensor g, beta;  ///< [chunks, Hv, C]
};

/// What does not depend on the state. Names as in docs/math.md#gated-delta-rule.
struct Chunks {
  Inputs in;
  at::Tensor gamma;    ///< [chunks, Hv, C] running sum of g
  at::Tensor grown;    ///< exp(gamma)
  at::Tensor rest;     ///< exp(gamma_C - gamma)
  at::Tensor decay;    ///< [chunks, Hv, C, C] exp(gamma_i - gamma_j) for j <= i, else 0
  at::Tensor gram;     ///< K K^T
  at::Tensor scores;   ///< (Q K^T) o decay
  at::Tensor inverse;  ///< (I + A)^-1
  at::Tensor u, w;     ///< [chunks, Hv, C, dv], [chunks, Hv, C, dk]
  at::Tensor last() const { return grown.select(2, kChunk - 1); }  ///< [chunks, Hv] exp(gamma_C)
};

Chunks prepare(Inputs in);

/// Runs the states through the chunks of a level. state [nodes, Hv, dk, dv] is the initial one and
/// becomes the final one; states [chunks, Hv, dk, dv] receives the one before each chunk.
/// Returns delta [chunks, Hv, C, dv].
at::Tensor scan(const Chunks& chunks, const std::vector<int64_t>& active, at::Tensor& state,
                const at::Tensor& states);

/// out [chunks, Hv, C, dv]
at::Tensor outputs(const Chunks& chunks, const at::Tensor& states, const at::Tensor& delta);

/// Gradients of a level. d_state [nodes, Hv, dk, dv]: of the final states, becomes that of the
/// initial ones.
Inputs backward(const Chunks& chunks, const std::vector<int64_t>& active, const at::Tensor& states,
                const at::Tensor& d_out, at::Tensor& d_state);

}  // namespace zorro::gated_delta
