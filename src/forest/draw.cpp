#include <algorithm>
#include <sstream>

#include "zorro/forest/prefix_forest.h"

namespace zorro {
namespace {

constexpr int64_t kTokensShown = 6;

std::string range(int64_t first, int64_t count, const char* one, const char* many) {
  std::ostringstream text;
  text << first << (count == 1 ? one : many);
  return text.str();
}

void describe(const PrefixForest& forest, const Node& node, std::ostream& out) {
  const int64_t length = node.end - node.begin;
  out << "[" << node.begin << ", " << node.end << ") " << range(length, length, " token", " tokens")
      << " x" << forest.multiplicity[static_cast<size_t>(node.begin)] << ":";
  for (int64_t token = node.begin; token < std::min(node.end, node.begin + kTokensShown); ++token)
    out << ' ' << forest.token_ids[static_cast<size_t>(token)];
  if (length > kTokensShown) out << " ...";
  const char* lead = "  ends sample ";
  for (size_t i = 0; i < forest.sample_last.size(); ++i) {
    if (forest.sample_last[i] != node.end - 1) continue;
    out << lead << i;
    lead = ", ";
  }
}

}  // namespace

std::string PrefixForest::draw(int64_t max_nodes) const {
  std::ostringstream out;
  out << num_samples() << " samples, " << num_replicated_tokens() << " tokens, packed into "
      << num_tokens() << "\n";
  std::vector<int64_t> open;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (static_cast<int64_t>(i) == max_nodes) {
      out << "... " << static_cast<int64_t>(nodes.size()) - max_nodes << " more nodes\n";
      break;
    }
    const Node& node = nodes[i];
    while (!open.empty() && open.back() <= node.begin) open.pop_back();
    // The line's prefix: a bar for every ancestor below which more nodes follow.
    for (size_t level = 1; level < open.size(); ++level)
      out << (open[level] < open[level - 1] ? "│  " : "   ");
    if (!open.empty()) out << (node.subtree_end < open.back() ? "├─ " : "└─ ");
    describe(*this, node, out);
    out << "\n";
    open.push_back(node.subtree_end);
  }
  return out.str();
}

}  // namespace zorro
