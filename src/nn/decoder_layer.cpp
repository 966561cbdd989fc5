#include "zorro/nn/decoder_layer.h"

#include <ATen/TensorOperators.h>

#include "zorro/nn/checkpoint.h"
#include "zorro/nn/rms_norm.h"

namespace zorro {

DecoderLayer::DecoderLayer(int64_t hidden, double norm_eps, NormKind norm,
                           std::unique_ptr<TokenMixer> mixer,
                           std::unique_ptr<ChannelMixer> channels)
    : hidden_(hidden),
      norm_eps_(norm_eps),
      norm_(norm),
      mixer_(std::move(mixer)),
      channels_(std::move(channels)) {}

DecoderLayer::Result DecoderLayer::run(const at::Tensor& x, const LayerInput& input,
                                       const MixerContext& prefix) const {
  auto [mixed, context] =
      mixer_->forward(rms_norm(x, input_norm_, norm_eps_, norm_), input, prefix);
  const at::Tensor residual = x.add(mixed);
  const ChannelResult channels =
      channels_->forward(rms_norm(residual, post_norm_, norm_eps_, norm_));
  return {residual.add(channels.y), std::move(context), channels.router_logits};
}

std::vector<at::Tensor> DecoderLayer::parameters() const {
  std::vector<at::Tensor> list;
  // weights() hands out slots to set; here they are only read.
  for (const Weight& weight : const_cast<DecoderLayer*>(this)->weights())
    list.push_back(*weight.slot);
  return list;
}

DecoderLayer::Result DecoderLayer::forward(const at::Tensor& x, const LayerInput& input,
                                           const MixerContext& prefix, bool checkpointing) const {
  if (!checkpointing) return run(x, input, prefix);
  // The body outlives this call: it takes its own handles on the forest's tensors.
  const auto body = [this, forest = input.forest,
                     again = input](const std::vector<at::Tensor>& inputs) {
    const LayerInput own{forest,        again.cos,       again.sin,
                         again.q_begin, again.attention, again.want_context};
    const MixerContext before(inputs.begin() + 1, inputs.end());
    Result result = run(inputs[0], own, before);
    std::vector<at::Tensor> outputs = {result.y};
    if (result.router_logits.defined()) outputs.push_back(result.router_logits);
    outputs.insert(outputs.end(), result.context.begin(), result.context.end());
    return outputs;
  };
  std::vector<at::Tensor> inputs = {x};
  inputs.insert(inputs.end(), prefix.begin(), prefix.end());
  std::vector<at::Tensor> outputs = checkpoint(body, inputs, parameters());
  Result result;
  result.y = outputs[0];
  auto next = outputs.begin() + 1;
  if (channels_->has_router()) result.router_logits = *next++;
  result.context.assign(next, outputs.end());
  return result;
}

std::vector<Weight> DecoderLayer::weights() {
  const double norm_mean = norm_ == NormKind::kPlain ? 1 : 0;
  std::vector<Weight> list = {{"input_layernorm.weight", {hidden_}, &input_norm_, norm_mean}};
  for (Weight& weight : mixer_->weights())
    list.push_back(prefixed(mixer_->name(), std::move(weight)));
  list.push_back({"post_attention_layernorm.weight", {hidden_}, &post_norm_, norm_mean});
  for (Weight& weight : channels_->weights()) list.push_back(prefixed("mlp.", std::move(weight)));
  return list;
}

}  // namespace zorro
