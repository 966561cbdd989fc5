#include <ATen/ops/full.h>

#include <algorithm>
#include <numeric>

#include "ops/gated_delta_chunks.h"
#include "zorro/core/error.h"

namespace zorro::gated_delta {
namespace {

int64_t num_chunks(const Span& span) { return (span.end - span.begin + kChunk - 1) / kChunk; }

}  // namespace

std::vector<int64_t> Plan::chunks_of(const Level& level, int64_t place) const {
  std::vector<int64_t> chunks;
  int64_t first = level.first_chunk;
  for (const int64_t count : level.active) {
    if (place >= count) break;
    chunks.push_back(first + place);
    first += count;
  }
  return chunks;
}

Plan make_plan(const at::Tensor& nodes, int64_t nodes_before) {
  const auto table = nodes.accessor<int64_t, 2>();
  Plan plan;
  plan.num_nodes = nodes.size(0);
  plan.nodes_before = nodes_before;
  std::vector<int64_t> level_of;
  for (int64_t node = 0; node < plan.num_nodes; ++node) {
    const int64_t parent = table[node][3];
    plan.spans.push_back({table[node][0], table[node][1]});
    plan.parents.push_back(parent);
    const bool is_first = parent < nodes_before;  // a root, or a child of a node computed elsewhere
    level_of.push_back(is_first ? 0 : level_of[static_cast<size_t>(parent)] + 1);
    if (node < nodes_before) continue;
    const auto level = static_cast<size_t>(level_of.back());
    if (level >= plan.levels.size()) plan.levels.resize(level + 1);
    plan.levels[level].nodes.push_back(node);
  }

  const auto span = [&](int64_t node) { return plan.spans[static_cast<size_t>(node)]; };
  const int64_t token_begin = nodes_before < plan.num_nodes ? span(nodes_before).begin : int64_t{0};
  const int64_t num_tokens =
      plan.num_nodes > nodes_before ? plan.spans.back().end - token_begin : 0;
  plan.places = at::full({num_tokens}, -1, at::kLong);
  auto* place = plan.places.mutable_data_ptr<int64_t>();
  for (Level& level : plan.levels) {
    std::stable_sort(level.nodes.begin(), level.nodes.end(), [&](int64_t a, int64_t b) {
      return num_chunks(span(a)) > num_chunks(span(b));
    });
    level.first_chunk = plan.num_chunks;
    const int64_t steps = num_chunks(span(level.nodes.front()));
    for (int64_t step = 0; step < steps; ++step) {
      const auto past = std::find_if(level.nodes.begin(), level.nodes.end(),
                                     [&](int64_t node) { return num_chunks(span(node)) <= step; });
      level.active.push_back(past - level.nodes.begin());
      level.num_chunks += level.active.back();
    }
    level.tokens = at::full({level.num_chunks * kChunk}, num_tokens, at::kLong);
    auto* token = level.tokens.mutable_data_ptr<int64_t>();
    int64_t chunk = 0;
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t i = 0; i < level.active[static_cast<size_t>(step)]; ++i, ++chunk) {
        const Span node = span(level.nodes[static_cast<size_t>(i)]);
        const int64_t begin = node.begin + step * kChunk;
        for (int64_t t = begin; t < std::min(begin + kChunk, node.end); ++t) {
          token[chunk * kChunk + t - begin] = t - token_begin;
          place[t - token_begin] = (plan.num_chunks + chunk) * kChunk + t - begin;
        }
      }
    plan.num_chunks += level.num_chunks;
  }
  for (Span& each : plan.spans) each.begin -= token_begin, each.end -= token_begin;
  return plan;
}

}  // namespace zorro::gated_delta
