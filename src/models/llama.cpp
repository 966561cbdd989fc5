#include "models/family.h"

namespace zorro {

std::vector<DecoderLayer> llama_layers(const ModelConfig& config) {
  AttentionModuleOptions attention = attention_options(config);
  attention.output_bias = config.model_type == "llama" && config.attention_bias;
  return attention_layers(config, attention);
}

}  // namespace zorro
