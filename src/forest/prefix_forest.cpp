#include "zorro/forest/prefix_forest.h"

#include <algorithm>
#include <numeric>

#include "forest/trie.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

void check_options(const ForestOptions& options) {
  ZORRO_CHECK(options.min_shared_tokens >= 1, "[forest] min_shared_tokens must be >= 1, got ",
              options.min_shared_tokens, ".");
  ZORRO_CHECK(options.max_levels >= 1, "[forest] max_levels must be >= 1, got ", options.max_levels,
              ".");
  ZORRO_CHECK(options.num_axes >= 1, "[forest] num_axes must be >= 1, got ", options.num_axes, ".");
}

void check_sample(const Sample& sample, size_t index, int64_t num_axes) {
  const auto length = static_cast<int64_t>(sample.token_ids.size());
  ZORRO_CHECK(sample.scored_begin >= 0 && sample.scored_begin <= length, "[forest] samples[", index,
              "].scored_begin must lie in [0, ", length, "], got ", sample.scored_begin, ".");
  ZORRO_CHECK(sample.scored_begin > 0 || length == 0, "[forest] samples[", index,
              "].scored_begin must be > 0, got 0: the first response token has no predecessor. "
              "Give the sample a prompt of at least one token.");
  ZORRO_CHECK(sample.prompt_length >= -1 && sample.prompt_length <= length, "[forest] samples[",
              index, "].prompt_length must lie in [0, ", length, "], got ", sample.prompt_length,
              ".");
  ZORRO_CHECK(sample.positions.empty() ||
                  static_cast<int64_t>(sample.positions.size()) == num_axes * length,
              "[forest] samples[", index, "].positions must have ", num_axes, " x ", length,
              " values, got ", sample.positions.size(), ".");
  ZORRO_CHECK(sample.content.empty() || static_cast<int64_t>(sample.content.size()) == length,
              "[forest] samples[", index, "].content must have ", length, " values, got ",
              sample.content.size(), ".");
  for (size_t i = 0; i < sample.token_ids.size(); ++i)
    ZORRO_CHECK(sample.token_ids[i] >= 0, "[forest] samples[", index, "].token_ids[", i,
                "] must not be negative, got ", sample.token_ids[i],
                ". Mark padding in the mask, not in the ids.");
}

/// The runs of a trie in depth-first order, children (and roots) in first-seen order of their
/// samples.
std::vector<int64_t> depth_first(const Trie& trie) {
  const size_t num_runs = trie.runs.size();
  std::vector<int64_t> by_sample(num_runs);  // a run's children appear in it in first-seen order
  std::iota(by_sample.begin(), by_sample.end(), int64_t{0});
  std::stable_sort(by_sample.begin(), by_sample.end(), [&](int64_t a, int64_t b) {
    return trie.runs[static_cast<size_t>(a)].sample < trie.runs[static_cast<size_t>(b)].sample;
  });
  std::vector<std::vector<int64_t>> children(num_runs);
  std::vector<int64_t> stack;
  for (const int64_t run : by_sample) {
    const int64_t parent = trie.runs[static_cast<size_t>(run)].parent;
    (parent < 0 ? stack : children[static_cast<size_t>(parent)]).push_back(run);
  }
  std::reverse(stack.begin(), stack.end());
  std::vector<int64_t> order;
  order.reserve(num_runs);
  while (!stack.empty()) {
    const int64_t run = stack.back();
    stack.pop_back();
    order.push_back(run);
    const std::vector<int64_t>& below = children[static_cast<size_t>(run)];
    stack.insert(stack.end(), below.rbegin(), below.rend());
  }
  return order;
}

/// Places the runs one after another; returns the node of each run.
std::vector<int64_t> place_nodes(const Trie& trie, PrefixForest& forest) {
  std::vector<int64_t> run_node(trie.runs.size());
  int64_t begin = 0;
  for (const int64_t run_index : depth_first(trie)) {
    const TrieRun& run = trie.runs[static_cast<size_t>(run_index)];
    const int64_t end = begin + run.end - run.begin;
    const int64_t parent = run.parent < 0 ? -1 : run_node[static_cast<size_t>(run.parent)];
    run_node[static_cast<size_t>(run_index)] = static_cast<int64_t>(forest.nodes.size());
    forest.nodes.push_back({begin, end, end, parent, run.begin});
    begin = end;
  }
  for (size_t i = forest.nodes.size(); i-- > 0;) {
    const Node& node = forest.nodes[i];
    if (node.parent < 0) continue;
    int64_t& parent_end = forest.nodes[static_cast<size_t>(node.parent)].subtree_end;
    parent_end = std::max(parent_end, node.subtree_end);
  }
  return run_node;
}

void fill_tokens(const Trie& trie, std::span<const Sample> samples,
                 const std::vector<int64_t>& run_node, PrefixForest& forest) {
  const auto num_tokens = static_cast<size_t>(forest.nodes.empty() ? 0 : forest.nodes.back().end);
  forest.token_ids.resize(num_tokens);
  forest.positions.resize(num_tokens * static_cast<size_t>(forest.num_axes));
  forest.previous.resize(num_tokens);
  forest.visible_until.resize(num_tokens);
  forest.multiplicity.resize(num_tokens);
  for (size_t i = 0; i < trie.runs.size(); ++i) {
    const TrieRun& run = trie.runs[i];
    const Sample& sample = samples[static_cast<size_t>(run.sample)];
    const Node& node = forest.nodes[static_cast<size_t>(run_node[i])];
    const int64_t before =
        node.parent < 0 ? -1 : forest.nodes[static_cast<size_t>(node.parent)].end - 1;
    for (int64_t token = node.begin; token < node.end; ++token) {
      const auto t = static_cast<size_t>(token);
      const int64_t on_path = run.begin + token - node.begin;
      forest.token_ids[t] = sample.token_ids[static_cast<size_t>(on_path)];
      forest.previous[t] = token == node.begin ? before : token - 1;
      forest.visible_until[t] = node.subtree_end;
      forest.multiplicity[t] = run.num_samples;
      for (int64_t axis = 0; axis < forest.num_axes; ++axis)
        forest.positions[static_cast<size_t>(axis) * num_tokens + t] =
            position_of(sample, axis, on_path);
    }
  }
}

int64_t node_of_token(const PrefixForest& forest, int64_t token) {
  const auto after = std::upper_bound(forest.nodes.begin(), forest.nodes.end(), token,
                                      [](int64_t t, const Node& node) { return t < node.begin; });
  return after - forest.nodes.begin() - 1;
}

/// Calls visit(packed index) for tokens [begin, length) of a sample, in order.
template <typename Visit>
void walk_path(const PrefixForest& forest, int64_t last_token, int64_t begin, int64_t length,
               const Visit& visit) {
  if (begin >= length) return;
  std::vector<int64_t> path;
  for (int64_t node = node_of_token(forest, last_token); node >= 0;
       node = forest.nodes[static_cast<size_t>(node)].parent)
    path.push_back(node);
  std::reverse(path.begin(), path.end());
  for (const int64_t step : path) {
    const Node& node = forest.nodes[static_cast<size_t>(step)];
    const int64_t skipped = std::max<int64_t>(begin - node.depth, 0);
    for (int64_t token = node.begin + skipped; token < node.end; ++token) visit(token);
  }
}

}  // namespace

int64_t PrefixForest::num_replicated_tokens() const {
  return std::accumulate(sample_lengths.begin(), sample_lengths.end(), int64_t{0});
}

PrefixForest PrefixForest::build(std::span<const Sample> samples, const ForestOptions& options) {
  check_options(options);
  for (size_t i = 0; i < samples.size(); ++i) check_sample(samples[i], i, options.num_axes);
  const Trie trie = build_trie(samples, options);

  PrefixForest forest;
  forest.num_axes = options.num_axes;
  const std::vector<int64_t> run_node = place_nodes(trie, forest);
  fill_tokens(trie, samples, run_node, forest);
  forest.scored_offsets.push_back(0);
  for (size_t i = 0; i < samples.size(); ++i) {
    const int64_t run = trie.sample_run[i];
    const int64_t last =
        run < 0 ? -1
                : forest.nodes[static_cast<size_t>(run_node[static_cast<size_t>(run)])].end - 1;
    const auto length = static_cast<int64_t>(samples[i].token_ids.size());
    forest.sample_last.push_back(last);
    forest.sample_lengths.push_back(length);
    walk_path(forest, last, samples[i].scored_begin, length,
              [&](int64_t token) { forest.scored.push_back(token); });
    forest.scored_offsets.push_back(static_cast<int64_t>(forest.scored.size()));
  }
  return forest;
}

std::vector<int64_t> PrefixForest::replicated_to_packed() const {
  std::vector<int64_t> packed;
  packed.reserve(static_cast<size_t>(num_replicated_tokens()));
  for (size_t i = 0; i < sample_lengths.size(); ++i)
    walk_path(*this, sample_last[i], 0, sample_lengths[i],
              [&](int64_t token) { packed.push_back(token); });
  return packed;
}

}  // namespace zorro
