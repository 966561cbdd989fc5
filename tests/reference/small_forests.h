#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "zorro/core/random.h"
#include "zorro/forest/prefix_forest.h"

namespace zorro::reference {

/// Writes a forest's vectors straight from a drawing of its nodes, without the builder.
class ForestWriter {
 public:
  /// Appends a node below `parent` (-1: a new tree). Nodes come depth first.
  int64_t add(int64_t parent, int64_t length) {
    const int64_t begin = forest_.nodes.empty() ? 0 : forest_.nodes.back().end;
    int64_t depth = 0;
    if (parent >= 0) {
      const Node& above = forest_.nodes[static_cast<size_t>(parent)];
      depth = above.depth + above.end - above.begin;
    }
    forest_.nodes.push_back({begin, begin + length, begin + length, parent, depth});
    for (int64_t up = parent; up >= 0; up = forest_.nodes[static_cast<size_t>(up)].parent)
      forest_.nodes[static_cast<size_t>(up)].subtree_end = begin + length;
    return static_cast<int64_t>(forest_.nodes.size()) - 1;
  }

  /// A sample ends with the node; its last `num_scored` tokens are scored.
  void end_sample(int64_t node, int64_t num_scored) { ends_.push_back({node, num_scored}); }

  PrefixForest finish() {
    for (size_t i = 0; i < forest_.nodes.size(); ++i) fill_node(forest_.nodes[i]);
    forest_.scored_offsets.push_back(0);
    for (const auto& [node, num_scored] : ends_) fill_sample(node, num_scored);
    return forest_;
  }

 private:
  struct End {
    int64_t node, num_scored;
  };

  void fill_node(const Node& node) {
    const int64_t before =
        node.parent < 0 ? -1 : forest_.nodes[static_cast<size_t>(node.parent)].end - 1;
    for (int64_t token = node.begin; token < node.end; ++token) {
      forest_.token_ids.push_back((token * 37 + 11) % 101);
      forest_.positions.push_back(node.depth + token - node.begin);
      forest_.previous.push_back(token == node.begin ? before : token - 1);
      forest_.visible_until.push_back(node.subtree_end);
      forest_.multiplicity.push_back(0);
    }
  }

  void fill_sample(int64_t node, int64_t num_scored) {
    const Node& last = forest_.nodes[static_cast<size_t>(node)];
    forest_.sample_last.push_back(last.end - 1);
    forest_.sample_lengths.push_back(last.depth + last.end - last.begin);
    std::vector<int64_t> scored;
    for (int64_t token = last.end - 1; token >= 0;
         token = forest_.previous[static_cast<size_t>(token)]) {
      ++forest_.multiplicity[static_cast<size_t>(token)];
      if (static_cast<int64_t>(scored.size()) < num_scored) scored.push_back(token);
    }
    forest_.scored.insert(forest_.scored.end(), scored.rbegin(), scored.rend());
    forest_.scored_offsets.push_back(static_cast<int64_t>(forest_.scored.size()));
  }

  PrefixForest forest_;
  std::vector<End> ends_;
};

/// One prompt and its responses, as lengths.
struct Group {
  int64_t prompt;
  std::vector<int64_t> responses;
};

/// Every group a tree of two levels.
inline PrefixForest star_forest(const std::vector<Group>& groups) {
  ForestWriter writer;
  for (const Group& group : groups) {
    const int64_t prompt = writer.add(-1, group.prompt);
    for (const int64_t response : group.responses)
      writer.end_sample(writer.add(prompt, response), response);
  }
  return writer.finish();
}

struct RandomForestShape {
  int64_t max_roots = 4;
  int64_t max_levels = 4;
  int64_t max_children = 3;
  int64_t max_length = 12;  ///< of a node; half of the nodes have 1 to 3 tokens
};

inline void grow(ForestWriter& writer, Random& random, const RandomForestShape& shape,
                 int64_t parent, int64_t level) {
  const int64_t longest =
      random.below(2) == 0 ? std::min<int64_t>(3, shape.max_length) : shape.max_length;
  const int64_t length = 1 + random.below(longest);
  const int64_t node = writer.add(parent, length);
  int64_t num_children = level < shape.max_levels ? random.below(shape.max_children + 1) : 0;
  if (num_children == 0 || random.below(4) == 0) writer.end_sample(node, level > 1 ? length : 0);
  for (; num_children > 0; --num_children) grow(writer, random, shape, node, level + 1);
}

/// Tries of uneven depth with odd lengths; samples end at leaves and at some inner nodes.
inline PrefixForest random_forest(Random& random, const RandomForestShape& shape = {}) {
  ForestWriter writer;
  for (int64_t roots = 1 + random.below(shape.max_roots); roots > 0; --roots)
    grow(writer, random, shape, -1, 1);
  return writer.finish();
}

/// The packed indices of every sample's tokens, first to last.
inline std::vector<std::vector<int64_t>> sample_paths(const PrefixForest& forest) {
  std::vector<std::vector<int64_t>> paths;
  for (const int64_t last : forest.sample_last) {
    std::vector<int64_t>& path = paths.emplace_back();
    for (int64_t token = last; token >= 0; token = forest.previous[static_cast<size_t>(token)])
      path.push_back(token);
    std::reverse(path.begin(), path.end());
  }
  return paths;
}

/// The naive batch of a forest: every sample a tree of its own.
inline PrefixForest replicated_forest(const PrefixForest& forest) {
  ForestWriter writer;
  for (size_t sample = 0; sample < forest.sample_lengths.size(); ++sample) {
    if (forest.sample_lengths[sample] == 0) continue;
    writer.end_sample(writer.add(-1, forest.sample_lengths[sample]),
                      forest.scored_offsets[sample + 1] - forest.scored_offsets[sample]);
  }
  return writer.finish();
}

}  // namespace zorro::reference
