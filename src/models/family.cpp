#include "models/family.h"

#include "zorro/nn/mlp.h"
#include "zorro/nn/sparse_moe.h"

namespace zorro {

AttentionModuleOptions attention_options(const ModelConfig& config) {
  AttentionModuleOptions options;
  options.hidden = config.hidden_size;
  options.query_heads = config.num_query_heads;
  options.kv_heads = config.num_kv_heads;
  options.head_dim = config.head_dim;
  options.bias = options.output_bias = config.attention_bias;
  options.norm_eps = config.rms_norm_eps;
  return options;
}

std::unique_ptr<ChannelMixer> channel_mixer(const ModelConfig& config, int64_t layer) {
  const bool is_sparse =
      !config.sparse_layers.empty() && config.sparse_layers[static_cast<size_t>(layer)];
  if (!is_sparse)
    return std::make_unique<Mlp>(config.hidden_size, config.intermediate_size, config.mlp_bias);
  const MoeConfig& moe = config.moe;
  return std::make_unique<SparseMoe>(SparseMoeOptions{config.hidden_size, moe.experts, moe.choices,
                                                      moe.intermediate_size,
                                                      moe.shared_intermediate_size, moe.normalize});
}

std::vector<DecoderLayer> attention_layers(const ModelConfig& config,
                                           const AttentionModuleOptions& attention) {
  std::vector<DecoderLayer> layers;
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    layers.emplace_back(config.hidden_size, config.rms_norm_eps, attention.norm,
                        std::make_unique<Attention>(attention), channel_mixer(config, layer));
  return layers;
}

}  // namespace zorro
