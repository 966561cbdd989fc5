#include "zorro/plan/cost.h"

#include "zorro/core/error.h"

namespace zorro {
namespace {

// A product of an m x k and a k x n matrix takes 2 m k n FLOPs forward and twice that backward.
constexpr double kLinearPasses = 6;
// Attention, a pair and head: Q K^T and P V forward (2 D each); S, dP, dV, dK, dQ backward (2 D
// each).
constexpr double kAttentionProducts = 7;

}  // namespace

ModelCost decoder_cost(std::span<const LayerWeights> kinds, double hidden, double vocabulary) {
  ModelCost cost;
  for (const LayerWeights& kind : kinds) {
    const auto layers = static_cast<double>(kind.layers);
    cost.linear_per_token += kLinearPasses * layers * kind.weights;
    cost.attention_per_pair += 2 * kAttentionProducts * layers * kind.query_width;
  }
  cost.head_per_row = kLinearPasses * hidden * vocabulary;
  return cost;
}

ModelCost dense_cost(const DenseSizes& sizes) {
  const auto hidden = static_cast<double>(sizes.hidden);
  const auto heads = static_cast<double>(2 * sizes.query_heads + 2 * sizes.kv_heads);
  const auto head_dim = static_cast<double>(sizes.head_dim);
  const LayerWeights layers = {
      sizes.layers, hidden * (heads * head_dim + 3 * static_cast<double>(sizes.intermediate)),
      static_cast<double>(sizes.query_heads) * head_dim};
  return decoder_cost({&layers, 1}, hidden, static_cast<double>(sizes.vocabulary));
}

ForestWork forest_work(const PrefixForest& forest) {
  ForestWork work;
  work.tokens = forest.num_tokens();
  work.scored = forest.num_scored();
  for (const Node& node : forest.nodes) {
    const int64_t length = node.end - node.begin;
    work.pairs += length * (length + 1) / 2 + length * node.depth;
  }
  std::vector<bool> predicts(forest.token_ids.size(), false);
  for (const int64_t token : forest.scored) {
    const int64_t predictor = forest.previous[static_cast<size_t>(token)];
    ZORRO_ASSERT(predictor >= 0);
    work.predictors += predicts[static_cast<size_t>(predictor)] ? 0 : 1;
    predicts[static_cast<size_t>(predictor)] = true;
  }
  return work;
}

ForestWork replicated_work(const PrefixForest& forest) {
  ForestWork work;
  work.tokens = forest.num_replicated_tokens();
  for (const int64_t length : forest.sample_lengths) work.pairs += length * (length + 1) / 2;
  work.predictors = work.scored = forest.num_scored();
  return work;
}

PartCost cost(const ForestWork& work, const ModelCost& model) {
  return {model.linear_per_token * static_cast<double>(work.tokens),
          model.attention_per_pair * static_cast<double>(work.pairs),
          model.head_per_row * static_cast<double>(work.predictors)};
}

double speedup_bound(const PrefixForest& forest, const ModelCost& model) {
  const double shared = cost(forest_work(forest), model).total();
  return shared > 0 ? cost(replicated_work(forest), model).total() / shared : 1;
}

double token_ratio(const PrefixForest& forest) {
  return forest.num_tokens() > 0 ? static_cast<double>(forest.num_replicated_tokens()) /
                                       static_cast<double>(forest.num_tokens())
                                 : 1;
}

}  // namespace zorro
