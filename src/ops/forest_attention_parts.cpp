#include "ops/forest_attention_parts.h"

#include <algorithm>
#include <utility>

namespace zorro {
namespace {

// Evenly spaced equal nodes with this many tokens together are worth a call of their own on a view;
// shorter ones are copied and share a call.
constexpr int64_t kViewTokens = 512;

// A right-padded batch wastes the squares of what its shorter nodes lack: at most this share.
constexpr double kLargestWaste = 0.12;

// A node below this length costs about what one of this length does.
constexpr int64_t kShortNode = 64;

struct Span {
  int64_t begin, length;
};

void add(TriangleBatch& batch, const Span& node) {
  batch.begins.push_back(node.begin);
  batch.lengths.push_back(node.length);
  batch.max_length = std::max(batch.max_length, node.length);
}

/// The stride of a batch of equal, evenly spaced nodes, else 0.
int64_t even_stride(const TriangleBatch& batch) {
  if (batch.lengths.back() != batch.lengths.front()) return 0;
  if (batch.size() == 1) return batch.max_length;
  const int64_t stride = batch.begins[1] - batch.begins[0];
  for (size_t i = 2; i < batch.begins.size(); ++i)
    if (batch.begins[i] - batch.begins[i - 1] != stride) return 0;
  return stride;
}

void finish(TriangleBatch& batch, std::vector<TriangleBatch>& batches) {
  if (batch.begins.empty()) return;
  batch.stride = even_stride(batch);
  batches.push_back(std::exchange(batch, {}));
}

/// One past the longest run of equal, evenly spaced nodes that starts with `first`.
size_t run_end(const std::vector<Span>& nodes, size_t first) {
  const auto fits = [&](size_t i) {
    return i < nodes.size() && nodes[i].length == nodes[first].length &&
           nodes[i].begin - nodes[i - 1].begin == nodes[first + 1].begin - nodes[first].begin;
  };
  size_t end = first + 1;
  while (fits(end)) ++end;
  return end;
}

/// Takes the runs that are large enough for a view; returns the other nodes in their order.
std::vector<Span> take_views(const std::vector<Span>& nodes, std::vector<TriangleBatch>& batches) {
  std::vector<Span> rest;
  for (size_t first = 0; first < nodes.size();) {
    const size_t end = run_end(nodes, first);
    const bool large = static_cast<int64_t>(end - first) * nodes[first].length >= kViewTokens;
    TriangleBatch batch;
    for (; first < end; ++first) {
      if (large)
        add(batch, nodes[first]);
      else
        rest.push_back(nodes[first]);
    }
    finish(batch, batches);
  }
  return rest;
}

/// Nodes by falling length: neighbours share a batch while neither time nor memory is wasted.
void take_padded(const std::vector<Span>& nodes, std::vector<TriangleBatch>& batches) {
  TriangleBatch batch;
  double useful = 0;
  int64_t tokens = 0;
  for (const Span& node : nodes) {
    const auto cost = [](int64_t length) {
      const auto rows = static_cast<double>(std::max(length, kShortNode));
      return rows * rows;
    };
    const int64_t longest = std::max(batch.max_length, node.length);
    const double all = cost(longest) * static_cast<double>(batch.size() + 1);
    if (useful + cost(node.length) < (1 - kLargestWaste) * all ||
        longest * (batch.size() + 1) > 2 * (tokens + node.length) + kViewTokens) {
      finish(batch, batches);
      useful = 0;
      tokens = 0;
    }
    add(batch, node);
    useful += cost(node.length);
    tokens += node.length;
  }
  finish(batch, batches);
}

}  // namespace

AttentionParts attention_parts(const at::Tensor& nodes, int64_t q_begin, int64_t q_end) {
  AttentionParts parts;
  std::vector<Span> spans;
  const auto* cell = nodes.const_data_ptr<int64_t>();
  for (int64_t node = 0; node < nodes.size(0); ++node, cell += 5) {
    const int64_t begin = cell[0], end = cell[1], subtree_end = cell[2];
    if (begin >= q_begin && end > begin) spans.push_back({begin, end - begin});
    const Rectangle below{std::max(end, q_begin), std::min(subtree_end, q_end), begin, end};
    if (below.q_begin < below.q_end && begin < end) parts.rectangles.push_back(below);
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.length > b.length; });
  take_padded(take_views(spans, parts.triangles), parts.triangles);
  return parts;
}

}  // namespace zorro
