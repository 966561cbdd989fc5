#include <memory>

#include "models/decoder.h"
#include "zorro/nn/attention.h"
#include "zorro/nn/mlp.h"

namespace zorro {

std::vector<DecoderLayer> qwen3_layers(const ModelConfig& config) {
  AttentionModuleOptions attention;
  attention.hidden = config.hidden_size;
  attention.query_heads = config.num_query_heads;
  attention.kv_heads = config.num_kv_heads;
  attention.head_dim = config.head_dim;
  attention.bias = config.attention_bias;
  attention.qk_norm = true;
  attention.norm_eps = config.rms_norm_eps;

  std::vector<DecoderLayer> layers;
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    layers.emplace_back(config.hidden_size, config.rms_norm_eps,
                        std::make_unique<Attention>(attention),
                        std::make_unique<Mlp>(config.hidden_size, config.intermediate_size));
  return layers;
}

}  // namespace zorro
