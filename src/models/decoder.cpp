#include "models/decoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>

#include "zorro/core/error.h"
#include "zorro/nn/rms_norm.h"
#include "zorro/nn/rope.h"

namespace zorro {
namespace {

NormKind norm_kind(const ModelConfig& config) {
  return config.linear.key_heads > 0 ? NormKind::kZeroCentered : NormKind::kPlain;
}

RotaryOptions rotary_options(const RopeConfig& rope) {
  using Scaling = RotaryOptions::Scaling;
  const Scaling scaling = rope.type == "linear"   ? Scaling::kLinear
                          : rope.type == "llama3" ? Scaling::kLlama3
                          : rope.type == "yarn"   ? Scaling::kYarn
                                                  : Scaling::kNone;
  return {rope.theta,           scaling,
          rope.factor,          rope.original_max_positions,
          rope.low_freq_factor, rope.high_freq_factor,
          rope.beta_fast,       rope.beta_slow,
          rope.truncate,        rope.attention_factor,
          rope.mrope_section};
}

}  // namespace

DecoderModel::DecoderModel(ModelConfig config, std::vector<DecoderLayer> layers)
    : config_(std::move(config)), layers_(std::move(layers)) {}

ForwardResult DecoderModel::forward(const Batch& batch, const ForwardOptions& options) const {
  const ForestTensors& forest = batch.tensors;
  for (size_t token = 0; token < batch.forest.token_ids.size(); ++token)
    ZORRO_CHECK(batch.forest.token_ids[token] < config_.vocab_size, "[model] token_ids[", token,
                "] must be below vocab_size ", config_.vocab_size, ", got ",
                batch.forest.token_ids[token], ". Is this the model's tokenizer?");
  const auto rotary_dims = static_cast<int64_t>(static_cast<double>(config_.head_dim) *
                                                config_.rope.partial_rotary_factor);
  const auto [cos, sin] = rotary_table(forest.positions, rotary_dims, rotary_options(config_.rope),
                                       embedding_.scalar_type());
  const LayerInput input{forest, cos, sin, /*q_begin=*/0, options.attention};
  at::Tensor x = at::embedding(embedding_, forest.token_ids, config_.pad_token_id);
  ForwardResult result;
  for (const DecoderLayer& layer : layers_) {
    DecoderLayer::Result made = layer.forward(x, input, MixerContext{}, options.checkpointing);
    x = made.y;
    if (made.router_logits.defined()) result.router_logits.push_back(made.router_logits);
  }
  result.hidden = rms_norm(x, norm_, config_.rms_norm_eps, norm_kind(config_));
  return result;
}

std::vector<Weight> DecoderModel::weights() {
  const int64_t hidden = config_.hidden_size;
  std::vector<Weight> list = {
      {"model.embed_tokens.weight", {config_.vocab_size, hidden}, &embedding_}};
  for (size_t i = 0; i < layers_.size(); ++i)
    for (Weight& weight : layers_[i].weights())
      list.push_back(prefixed(concat("model.layers.", i, "."), std::move(weight)));
  const double norm_mean = norm_kind(config_) == NormKind::kPlain ? 1 : 0;
  list.push_back({"model.norm.weight", {hidden}, &norm_, norm_mean});
  if (!config_.tie_word_embeddings)
    list.push_back({"lm_head.weight", {config_.vocab_size, hidden}, &head_});
  return list;
}

const at::Tensor& DecoderModel::head_weight() const {
  return config_.tie_word_embeddings ? embedding_ : head_;
}

}  // namespace zorro
