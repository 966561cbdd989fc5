#include "zorro/nn/decoder_layer.h"

#include <ATen/TensorOperators.h>

#include "zorro/nn/checkpoint.h"
#include "zorro/nn/rms_norm.h"

namespace zorro {

DecoderLayer::DecoderLayer(int64_t hidden, double norm_eps, std::unique_ptr<TokenMixer> mixer,
                           std::unique_ptr<ChannelMixer> channels)
    : hidden_(hidden),
      norm_eps_(norm_eps),
      mixer_(std::move(mixer)),
      channels_(std::move(channels)) {}

std::pair<at::Tensor, MixerContext> DecoderLayer::run(const at::Tensor& x, const LayerInput& input,
                                                      const MixerContext& prefix) const {
  auto [mixed, context] = mixer_->forward(rms_norm(x, input_norm_, norm_eps_), input, prefix);
  const at::Tensor residual = x.add(mixed);
  return {residual.add(channels_->forward(rms_norm(residual, post_norm_, norm_eps_))),
          std::move(context)};
}

std::vector<at::Tensor> DecoderLayer::parameters() const {
  std::vector<at::Tensor> list;
  // weights() hands out slots to set; here they are only read.
  for (const Weight& weight : const_cast<DecoderLayer*>(this)->weights())
    list.push_back(*weight.slot);
  return list;
}

std::pair<at::Tensor, MixerContext> DecoderLayer::forward(const at::Tensor& x,
                                                          const LayerInput& input,
                                                          const MixerContext& prefix,
                                                          bool checkpointing) const {
  if (!checkpointing) return run(x, input, prefix);
  // The body outlives this call: it takes its own handles on the forest's tensors.
  const auto body = [this, forest = input.forest, cos = input.cos, sin = input.sin,
                     q_begin = input.q_begin,
                     attention = input.attention](const std::vector<at::Tensor>& inputs) {
    const LayerInput again{forest, cos, sin, q_begin, attention};
    auto [y, context] = run(inputs[0], again, {inputs[1], inputs[2]});
    return std::vector<at::Tensor>{y, context.key, context.value};
  };
  std::vector<at::Tensor> outputs = checkpoint(body, {x, prefix.key, prefix.value}, parameters());
  return {outputs[0], {outputs[1], outputs[2]}};
}

std::vector<Weight> DecoderLayer::weights() {
  std::vector<Weight> list = {{"input_layernorm.weight", {hidden_}, &input_norm_}};
  for (Weight& weight : mixer_->weights())
    list.push_back({"self_attn." + weight.name, std::move(weight.shape), weight.slot});
  list.push_back({"post_attention_layernorm.weight", {hidden_}, &post_norm_});
  for (Weight& weight : channels_->weights())
    list.push_back({"mlp." + weight.name, std::move(weight.shape), weight.slot});
  return list;
}

}  // namespace zorro
