#include "zorro/train/model_cost.h"

#include <vector>

namespace zorro {
namespace {

LayerWeights mixer_weights(const ModelConfig& config, size_t layer) {
  const auto hidden = static_cast<double>(config.hidden_size);
  const bool is_linear =
      !config.layer_types.empty() && config.layer_types[layer] == LayerType::kLinearAttention;
  if (is_linear) {
    const LinearAttentionConfig& linear = config.linear;
    const auto keys = static_cast<double>(linear.key_heads * linear.key_dim);
    const auto values = static_cast<double>(linear.value_heads * linear.value_dim);
    const auto heads = static_cast<double>(linear.value_heads);
    const double state = values * static_cast<double>(linear.key_dim);
    return {1, hidden * (2 * keys + 3 * values + 2 * heads) + 3 * state, 0};
  }
  const bool has_gate = config.linear.key_heads > 0;
  const auto queries = static_cast<double>(config.num_query_heads * config.head_dim);
  const auto keys = static_cast<double>(config.num_kv_heads * config.head_dim);
  return {1, hidden * ((has_gate ? 3 : 2) * queries + 2 * keys), queries};
}

double channel_weights(const ModelConfig& config, size_t layer) {
  const auto hidden = static_cast<double>(config.hidden_size);
  if (config.sparse_layers.empty() || !config.sparse_layers[layer])
    return 3 * hidden * static_cast<double>(config.intermediate_size);
  const MoeConfig& moe = config.moe;
  const auto inner =
      static_cast<double>(moe.choices * moe.intermediate_size + moe.shared_intermediate_size);
  const double gate = moe.shared_intermediate_size > 0 ? 1 : 0;
  return hidden * (3 * inner + static_cast<double>(moe.experts) + gate);
}

}  // namespace

ModelCost model_cost(const ModelConfig& config) {
  std::vector<LayerWeights> layers;
  for (size_t layer = 0; layer < static_cast<size_t>(config.num_layers); ++layer) {
    layers.push_back(mixer_weights(config, layer));
    layers.back().weights += channel_weights(config, layer);
  }
  return decoder_cost(layers, static_cast<double>(config.hidden_size),
                      static_cast<double>(config.vocab_size));
}

}  // namespace zorro
