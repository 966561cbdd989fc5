#include "models/family.h"

namespace zorro {

std::vector<DecoderLayer> llama_layers(const ModelConfig& config) {
  AttentionModuleOptions attention = attention_options(config);
  attention.output_bias = config.model_type == "llama" && config.attention_bias;
  std::vector<DecoderLayer> layers;
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    layers.emplace_back(config.hidden_size, config.rms_norm_eps, NormKind::kPlain,
                        std::make_unique<Attention>(attention), channel_mixer(config, layer));
  return layers;
}

}  // namespace zorro
