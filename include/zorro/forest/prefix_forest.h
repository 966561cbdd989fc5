#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zorro/forest/sample.h"

namespace zorro {

/// Which tokens of a micro-batch share a row of the packed order.
enum class Sharing {
  kNone,     ///< every sample is its own root: the naive batch
  kPrompts,  ///< equal prompts are one node
  kPrefixes  ///< a trie: any equal prefix of at least min_shared_tokens tokens
};

struct ForestOptions {
  Sharing sharing = Sharing::kPrompts;
  /// kPrefixes only: a branch shorter than this many tokens is not split off into a shared node.
  /// >= 1.
  int64_t min_shared_tokens = 64;
  /// kPrefixes only: most nodes on a path (levels of the tree). >= 1; 1 shares nothing.
  int64_t max_levels = 64;
  /// Position axes of every sample: 1, or 3 for mRoPE.
  int64_t num_axes = 1;
};

/// A run of packed tokens that the same samples pass through.
struct Node {
  int64_t begin;        ///< first packed index
  int64_t end;          ///< one past its last packed index
  int64_t subtree_end;  ///< one past the last packed index of its subtree, itself included
  int64_t parent;       ///< index in `nodes`, -1 at a root
  int64_t depth;        ///< tokens before its first token on its path
};

/// A micro-batch as tries of samples, laid out depth first: T packed tokens described by integer
/// vectors.
///
/// Plain data: `build` fills it, `validate` checks it, tests may edit it. docs/math.md#forest.
struct PrefixForest {
  int64_t num_axes = 1;
  std::vector<int64_t> token_ids;  ///< [T]
  std::vector<int64_t> positions;  ///< [num_axes, T]
  std::vector<int64_t>
      previous;  ///< [T] packed index of the token before it on its path, -1 at a root
  std::vector<int64_t> visible_until;  ///< [T] one past the last packed index that may attend to it
  std::vector<int64_t> multiplicity;   ///< [T] samples that run through it
  std::vector<Node> nodes;             ///< in packed order: a parent stands before its children
  std::vector<int64_t> scored;  ///< [M] packed index of every scored token, sample after sample
  std::vector<int64_t> scored_offsets;  ///< [samples + 1]
  std::vector<int64_t>
      sample_last;  ///< [samples] packed index of the last token, -1 for an empty sample
  std::vector<int64_t> sample_lengths;  ///< [samples]

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_samples() const { return static_cast<int64_t>(sample_lengths.size()); }
  int64_t num_scored() const { return static_cast<int64_t>(scored.size()); }
  /// Tokens of the naive batch: the sum of all sample lengths.
  int64_t num_replicated_tokens() const;

  /// Builds the forest. Linear in the number of tokens (hashing); samples keep the caller's order.
  ///
  /// Throws  InvalidArgument naming the sample when a scored token has no predecessor, or a size
  /// disagrees.
  static PrefixForest build(std::span<const Sample> samples, const ForestOptions& options);

  /// Packed index of every token of every sample, sample after sample: [num_replicated_tokens()].
  std::vector<int64_t> replicated_to_packed() const;

  /// Checks every invariant of the vectors against each other; O(T + M + total sample length).
  ///
  /// Throws  InternalError that names the broken one.
  void validate() const;

  /// A text drawing for people: one line a node with its range, tokens and samples. Cut after
  /// max_nodes lines.
  std::string draw(int64_t max_nodes = 40) const;
};

}  // namespace zorro
