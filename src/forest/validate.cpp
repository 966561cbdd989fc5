#include <algorithm>

#include "zorro/core/error.h"
#include "zorro/forest/prefix_forest.h"

namespace zorro {
namespace {

#define ZORRO_INVARIANT(condition, ...) \
  ZORRO_CHECK_AS(InternalError, condition, "[forest] ", __VA_ARGS__)

void check_sizes(const PrefixForest& forest) {
  const size_t num_tokens = forest.token_ids.size();
  ZORRO_INVARIANT(forest.num_axes >= 1, "num_axes must be >= 1, got ", forest.num_axes, ".");
  ZORRO_INVARIANT(forest.positions.size() == num_tokens * static_cast<size_t>(forest.num_axes),
                  "positions must have num_axes x T values.");
  ZORRO_INVARIANT(forest.previous.size() == num_tokens, "previous must have T values.");
  ZORRO_INVARIANT(forest.visible_until.size() == num_tokens, "visible_until must have T values.");
  ZORRO_INVARIANT(forest.multiplicity.size() == num_tokens, "multiplicity must have T values.");
  ZORRO_INVARIANT(forest.sample_last.size() == forest.sample_lengths.size(),
                  "sample_last and sample_lengths must have equal sizes.");
  ZORRO_INVARIANT(forest.scored_offsets.size() == forest.sample_lengths.size() + 1 &&
                      forest.scored_offsets.front() == 0 &&
                      forest.scored_offsets.back() == forest.num_scored(),
                  "scored_offsets must run from 0 to M over samples + 1 values.");
}

void check_nodes(const PrefixForest& forest) {
  std::vector<int64_t> open;  // the path of nodes whose subtree is not finished
  int64_t begin = 0;
  for (size_t i = 0; i < forest.nodes.size(); ++i) {
    const Node& node = forest.nodes[i];
    ZORRO_INVARIANT(node.begin == begin && node.end > node.begin, "nodes[", i,
                    "] must begin where the one before it ends and hold a token.");
    begin = node.end;
    while (!open.empty() &&
           forest.nodes[static_cast<size_t>(open.back())].subtree_end <= node.begin)
      open.pop_back();
    ZORRO_INVARIANT(node.parent == (open.empty() ? -1 : open.back()), "nodes[", i,
                    "].parent must be the innermost subtree around it, got ", node.parent, ".");
    int64_t depth = 0, limit = forest.num_tokens();
    if (node.parent >= 0) {
      const Node& parent = forest.nodes[static_cast<size_t>(node.parent)];
      depth = parent.depth + parent.end - parent.begin;
      limit = parent.subtree_end;
    }
    ZORRO_INVARIANT(node.depth == depth, "nodes[", i, "].depth must be ", depth, ", got ",
                    node.depth, ".");
    ZORRO_INVARIANT(node.subtree_end >= node.end && node.subtree_end <= limit, "nodes[", i,
                    "].subtree_end must lie in [", node.end, ", ", limit, "], got ",
                    node.subtree_end, ".");
    open.push_back(static_cast<int64_t>(i));
  }
  ZORRO_INVARIANT(begin == forest.num_tokens(), "nodes must end at T.");
  // A subtree ends where a node ends, so that the next node is no half descendant.
  for (size_t i = 0; i < forest.nodes.size(); ++i) {
    const Node& node = forest.nodes[i];
    const auto next = std::lower_bound(
        forest.nodes.begin(), forest.nodes.end(), node.subtree_end,
        [](const Node& candidate, int64_t token) { return candidate.begin < token; });
    ZORRO_INVARIANT(
        next == forest.nodes.end() ? node.subtree_end == begin : next->begin == node.subtree_end,
        "nodes[", i, "].subtree_end must be a node's end.");
  }
}

void check_tokens(const PrefixForest& forest) {
  for (size_t i = 0; i < forest.nodes.size(); ++i) {
    const Node& node = forest.nodes[i];
    const int64_t before =
        node.parent < 0 ? -1 : forest.nodes[static_cast<size_t>(node.parent)].end - 1;
    for (int64_t token = node.begin; token < node.end; ++token) {
      const auto t = static_cast<size_t>(token);
      ZORRO_INVARIANT(forest.token_ids[t] >= 0, "token_ids[", t, "] must not be negative.");
      ZORRO_INVARIANT(forest.previous[t] == (token == node.begin ? before : token - 1), "previous[",
                      t, "] must be the token before it on its path, got ", forest.previous[t],
                      ".");
      ZORRO_INVARIANT(forest.visible_until[t] == node.subtree_end, "visible_until[", t,
                      "] must be its node's subtree_end ", node.subtree_end, ", got ",
                      forest.visible_until[t], ".");
    }
  }
}

void check_samples(const PrefixForest& forest) {
  std::vector<int64_t> count(forest.token_ids.size(), 0);
  for (size_t i = 0; i < forest.sample_lengths.size(); ++i) {
    const int64_t last = forest.sample_last[i];
    ZORRO_INVARIANT(last >= -1 && last < forest.num_tokens(), "sample_last[", i,
                    "] must be a packed index or -1, got ", last, ".");
    const int64_t num_scored = forest.scored_offsets[i + 1] - forest.scored_offsets[i];
    ZORRO_INVARIANT(num_scored >= 0, "scored_offsets must not fall at sample ", i, ".");
    int64_t length = 0;
    for (int64_t token = last; token >= 0; token = forest.previous[static_cast<size_t>(token)]) {
      ++count[static_cast<size_t>(token)];
      if (length < num_scored) {
        const auto slot = static_cast<size_t>(forest.scored_offsets[i + 1] - 1 - length);
        ZORRO_INVARIANT(forest.scored[slot] == token, "scored[", slot,
                        "] must be on the path of sample ", i, ": ", token, ", got ",
                        forest.scored[slot], ".");
        ZORRO_INVARIANT(forest.previous[static_cast<size_t>(token)] >= 0, "scored[", slot,
                        "] must have a predecessor.");
      }
      ++length;
    }
    ZORRO_INVARIANT(length == forest.sample_lengths[i], "sample_lengths[", i, "] must be ", length,
                    ", got ", forest.sample_lengths[i], ".");
    ZORRO_INVARIANT(num_scored < length || num_scored == 0, "sample ", i,
                    " must have more tokens than scored ones.");
  }
  for (size_t token = 0; token < count.size(); ++token)
    ZORRO_INVARIANT(forest.multiplicity[token] == count[token] && count[token] > 0, "multiplicity[",
                    token, "] must be ", count[token], " and > 0, got ", forest.multiplicity[token],
                    ".");
  for (size_t i = 0; i < forest.nodes.size(); ++i) {
    const Node& node = forest.nodes[i];
    ZORRO_INVARIANT(
        count[static_cast<size_t>(node.begin)] == count[static_cast<size_t>(node.end - 1)],
        "nodes[", i, "] must be passed by the same samples from begin to end.");
  }
}

#undef ZORRO_INVARIANT

}  // namespace

void PrefixForest::validate() const {
  check_sizes(*this);
  check_nodes(*this);
  check_tokens(*this);
  check_samples(*this);
}

}  // namespace zorro
