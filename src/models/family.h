#pragma once

#include <memory>
#include <vector>

#include "zorro/io/model_config.h"
#include "zorro/nn/attention.h"
#include "zorro/nn/decoder_layer.h"

// A family is a file of its own: config -> mixers. What they share is here.
namespace zorro {

/// The attention that a config describes, without what only some families have.
AttentionModuleOptions attention_options(const ModelConfig& config);

/// Layers of full attention, all alike but for their channels.
std::vector<DecoderLayer> attention_layers(const ModelConfig& config,
                                           const AttentionModuleOptions& attention);

/// The dense or sparse channels of a layer, by config.sparse_layers.
std::unique_ptr<ChannelMixer> channel_mixer(const ModelConfig& config, int64_t layer);

/// qwen3, qwen3_moe: plain norms, a norm on every query and key head.
std::vector<DecoderLayer> qwen3_layers(const ModelConfig& config);
/// qwen2, llama, mistral: no norm on heads; biases by family.
std::vector<DecoderLayer> llama_layers(const ModelConfig& config);
/// qwen3_next, qwen3_5, qwen3_5_moe: gated delta nets and gated attention, zero-centred norms.
std::vector<DecoderLayer> hybrid_layers(const ModelConfig& config);

}  // namespace zorro
