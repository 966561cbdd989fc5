#include "models/family.h"
#include "zorro/nn/gated_delta_net.h"

namespace zorro {

std::vector<DecoderLayer> hybrid_layers(const ModelConfig& config) {
  AttentionModuleOptions attention = attention_options(config);
  attention.qk_norm = attention.gate = true;
  attention.norm = NormKind::kZeroCentered;
  const LinearAttentionConfig& linear = config.linear;
  const GatedDeltaNetOptions delta = {config.hidden_size,  linear.key_heads,
                                      linear.value_heads,  linear.key_dim,
                                      linear.value_dim,    linear.conv_kernel,
                                      config.rms_norm_eps, config.model_type == "qwen3_next"};
  std::vector<DecoderLayer> layers;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    std::unique_ptr<TokenMixer> mixer;
    if (config.layer_types[static_cast<size_t>(layer)] == LayerType::kFullAttention)
      mixer = std::make_unique<Attention>(attention);
    else
      mixer = std::make_unique<GatedDeltaNet>(delta);
    layers.emplace_back(config.hidden_size, config.rms_norm_eps, NormKind::kZeroCentered,
                        std::move(mixer), channel_mixer(config, layer));
  }
  return layers;
}

}  // namespace zorro
