#include "checker.h"
#include "zorro/core/error.h"

namespace zorro::app {
namespace {

/// Every first token of a node below another takes the token left of it in the packed order for its
/// predecessor; only the first child's is right.
bool break_labels(PrefixForest& forest) {
  bool changed = false;
  for (const Node& node : forest.nodes) {
    if (node.parent < 0) continue;
    int64_t& previous = forest.previous[static_cast<size_t>(node.begin)];
    changed = changed || previous != node.begin - 1;
    previous = node.begin - 1;
  }
  return changed;
}

bool break_mask(PrefixForest& forest) {
  bool changed = false;
  for (Node& node : forest.nodes) {
    changed = changed || node.subtree_end != node.end;
    for (int64_t token = node.begin; token < node.end; ++token)
      forest.visible_until[static_cast<size_t>(token)] = node.end;
    node.subtree_end = node.end;
    node.parent = -1;
    node.depth = 0;
  }
  return changed;
}

bool shift_positions(PrefixForest& forest) {
  bool changed = false;
  const int64_t num_tokens = forest.num_tokens();
  for (const Node& node : forest.nodes) {
    if (node.parent < 0) continue;
    changed = true;
    for (int64_t axis = 0; axis < forest.num_axes; ++axis)
      for (int64_t token = node.begin; token < node.end; ++token)
        ++forest.positions[static_cast<size_t>(axis * num_tokens + token)];
  }
  return changed;
}

}  // namespace

void plant_fault(PrefixForest& forest, const std::string& fault) {
  bool changed = false;
  if (fault == "label") changed = break_labels(forest);
  if (fault == "mask") changed = break_mask(forest);
  if (fault == "position") changed = shift_positions(forest);
  ZORRO_CHECK(changed, "[check] --fault must find a shared prompt with two responses, got none. ",
              "Use a file with several rollouts a prompt and --sharing prompts.");
}

}  // namespace zorro::app
