#pragma once

#include <cstdint>
#include <span>

#include "zorro/forest/prefix_forest.h"

namespace zorro {

/// FLOPs of forward and backward by part, from a model's sizes (a multiply-add is 2 FLOPs).
struct ModelCost {
  double linear_per_token = 0;    ///< all matrix products of the layers, a token
  double attention_per_pair = 0;  ///< all layers and heads, a visible (query, key) pair
  double head_per_row =
      0;  ///< one row of the output head: 2 forward + 4 backward times hidden * vocabulary
};

/// What a layer kind multiplies, in weights a token: products with these many weights each.
struct LayerWeights {
  int64_t layers = 0;      ///< how many of the kind
  double weights = 0;      ///< weights of the matrix products of one, a token
  double query_width = 0;  ///< query heads * head_dim; 0: linear attention
};
/// The cost of any decoder from its kinds of layers.
ModelCost decoder_cost(std::span<const LayerWeights> kinds, double hidden, double vocabulary);

/// Sizes of a dense decoder, enough for its cost.
struct DenseSizes {
  int64_t hidden = 0, layers = 0, query_heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0,
          vocabulary = 0;
};
ModelCost dense_cost(const DenseSizes& sizes);

/// What a forest asks of a model.
struct ForestWork {
  int64_t tokens = 0;      ///< packed tokens
  int64_t pairs = 0;       ///< visible (query, key) pairs
  int64_t predictors = 0;  ///< distinct rows of the head
  int64_t scored = 0;
};
ForestWork forest_work(const PrefixForest& forest);
/// The same for the naive batch of the forest's samples; its head runs on one row per scored token.
ForestWork replicated_work(const PrefixForest& forest);

struct PartCost {
  double linear = 0, attention = 0, head = 0;
  double total() const { return linear + attention + head; }
};
PartCost cost(const ForestWork& work, const ModelCost& model);

/// S: the largest possible speed-up of forward + backward over the naive batch with equally good
/// kernels.
double speedup_bound(const PrefixForest& forest, const ModelCost& model);
/// rho: tokens of the naive batch over packed tokens.
double token_ratio(const PrefixForest& forest);

}  // namespace zorro
