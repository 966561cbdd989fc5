#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "zorro/forest/prefix_forest.h"

namespace zorro {

/// A run of tokens that the same samples pass through, before it has a place in the packed order.
struct TrieRun {
  int64_t sample;       ///< a sample that passes through it: its first one in the caller's order
  int64_t begin, end;   ///< token range on that sample's path
  int64_t parent;       ///< index in Trie::runs, -1 at a root; a parent stands before its children
  int64_t num_samples;  ///< that pass through it
};

struct Trie {
  std::vector<TrieRun> runs;
  std::vector<int64_t>
      sample_run;  ///< [samples] the run that holds the sample's last token, -1 for an empty sample
};

/// Finds the shared runs. Samples must have been checked. Time linear in the number of tokens.
Trie build_trie(std::span<const Sample> samples, const ForestOptions& options);

/// Position of token i of a sample on an axis: the caller's, or i.
inline int64_t position_of(const Sample& sample, int64_t axis, int64_t i) {
  if (sample.positions.empty()) return i;
  return sample
      .positions[static_cast<size_t>(axis) * sample.token_ids.size() + static_cast<size_t>(i)];
}

}  // namespace zorro
