#include "zorro/ops/forest_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "zorro/core/error.h"

namespace zorro {
namespace {

at::Tensor to_tensor(const std::vector<int64_t>& values, at::IntArrayRef shape, at::Device device) {
  at::Tensor tensor = at::empty(shape, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor.to(device);
}

at::Tensor to_tensor(const std::vector<int64_t>& values, at::Device device) {
  return to_tensor(values, {static_cast<int64_t>(values.size())}, device);
}

at::Tensor node_table(const std::vector<Node>& nodes) {
  at::Tensor table = at::empty({static_cast<int64_t>(nodes.size()), 5}, at::kLong);
  auto* cell = table.mutable_data_ptr<int64_t>();
  for (const Node& node : nodes) {
    const int64_t row[] = {node.begin, node.end, node.subtree_end, node.parent, node.depth};
    cell = std::copy(std::begin(row), std::end(row), cell);
  }
  return table;
}

/// Marks the predictors of the scored tokens and numbers them in packed order.
void derive_predictors(const PrefixForest& forest, std::vector<int64_t>& predictors,
                       std::vector<int64_t>& row, std::vector<int64_t>& label) {
  std::vector<int64_t> number(forest.token_ids.size(), -1);
  for (const int64_t token : forest.scored) {
    const int64_t predictor = forest.previous[static_cast<size_t>(token)];
    ZORRO_ASSERT(predictor >= 0);
    number[static_cast<size_t>(predictor)] = 0;
  }
  for (size_t token = 0; token < number.size(); ++token) {
    if (number[token] < 0) continue;
    number[token] = static_cast<int64_t>(predictors.size());
    predictors.push_back(static_cast<int64_t>(token));
  }
  for (const int64_t token : forest.scored) {
    const auto predictor = static_cast<size_t>(forest.previous[static_cast<size_t>(token)]);
    row.push_back(number[predictor]);
    label.push_back(forest.token_ids[static_cast<size_t>(token)]);
  }
}

std::vector<int64_t> first_copies(const std::vector<int64_t>& replicated, int64_t num_tokens) {
  std::vector<int64_t> first(static_cast<size_t>(num_tokens), -1);
  for (size_t i = replicated.size(); i-- > 0;)
    first[static_cast<size_t>(replicated[i])] = static_cast<int64_t>(i);
  return first;
}

}  // namespace

ForestTensors to_tensors(const PrefixForest& forest, at::Device device) {
  std::vector<int64_t> predictors, row, label;
  derive_predictors(forest, predictors, row, label);
  const std::vector<int64_t> replicated = forest.replicated_to_packed();

  ForestTensors tensors;
  tensors.token_ids = to_tensor(forest.token_ids, device);
  tensors.positions = to_tensor(forest.positions, {forest.num_axes, forest.num_tokens()}, device);
  tensors.previous = to_tensor(forest.previous, device);
  tensors.visible_until = to_tensor(forest.visible_until, device);
  tensors.multiplicity = to_tensor(forest.multiplicity, device);
  tensors.nodes = node_table(forest.nodes);
  tensors.scored = to_tensor(forest.scored, device);
  tensors.scored_offsets = to_tensor(forest.scored_offsets, at::kCPU);
  tensors.predictors = to_tensor(predictors, device);
  tensors.row = to_tensor(row, device);
  tensors.label = to_tensor(label, device);
  tensors.replicated = to_tensor(replicated, device);
  tensors.first_copy = to_tensor(first_copies(replicated, forest.num_tokens()), device);
  return tensors;
}

at::Tensor nodes_before(const at::Tensor& nodes, int64_t end) {
  const auto* cell = nodes.const_data_ptr<int64_t>();
  int64_t count = 0;
  while (count < nodes.size(0) && cell[5 * count] < end) ++count;
  if (count == nodes.size(0)) return nodes;
  at::Tensor cut = nodes.slice(0, 0, count).clone();
  cut.select(1, 2).clamp_max_(end);
  return cut;
}

at::Tensor packed_to_replicated(const at::Tensor& packed, const ForestTensors& forest) {
  ZORRO_CHECK(packed.dim() >= 1 && packed.size(0) == forest.num_tokens(),
              "[packed_to_replicated] packed must have ", forest.num_tokens(), " rows, got shape ",
              packed.sizes(), ".");
  return packed.index_select(0, forest.replicated);
}

at::Tensor replicated_to_packed(const at::Tensor& replicated, const ForestTensors& forest) {
  ZORRO_CHECK(replicated.dim() >= 1 && replicated.size(0) == forest.replicated.size(0),
              "[replicated_to_packed] replicated must have ", forest.replicated.size(0),
              " rows, got shape ", replicated.sizes(), ".");
  return replicated.index_select(0, forest.first_copy);
}

at::Tensor to_padded(const at::Tensor& valid, const at::Tensor& cells, int64_t num_rows,
                     int64_t width) {
  ZORRO_CHECK(valid.dim() >= 1 && cells.dim() == 1 && valid.size(0) == cells.size(0),
              "[to_padded] valid must have one row a cell, got shapes ", valid.sizes(), " and ",
              cells.sizes(), ".");
  std::vector<int64_t> shape = valid.sizes().vec();
  shape[0] = num_rows * width;
  at::Tensor padded = at::zeros(shape, valid.options()).index_copy(0, cells, valid);
  shape[0] = num_rows;
  shape.insert(shape.begin() + 1, width);
  return padded.view(shape);
}

at::Tensor from_padded(const at::Tensor& padded, const at::Tensor& cells) {
  ZORRO_CHECK(padded.dim() >= 2 && cells.dim() == 1,
              "[from_padded] padded must be [rows, width, ...] and cells [N], got shapes ",
              padded.sizes(), " and ", cells.sizes(), ".");
  return padded.flatten(0, 1).index_select(0, cells);
}

}  // namespace zorro
