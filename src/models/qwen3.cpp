#include "models/family.h"

namespace zorro {

std::vector<DecoderLayer> qwen3_layers(const ModelConfig& config) {
  AttentionModuleOptions attention = attention_options(config);
  attention.qk_norm = true;
  return attention_layers(config, attention);
}

}  // namespace zorro
