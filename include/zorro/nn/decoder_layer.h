#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "zorro/nn/mixer.h"

namespace zorro {

/// Pre-norm residual layer: x += mixer(norm(x)); x += channels(norm(x)).
class DecoderLayer {
 public:
  DecoderLayer(int64_t hidden, double norm_eps, std::unique_ptr<TokenMixer> mixer,
               std::unique_ptr<ChannelMixer> channels);

  /// checkpointing: keep only x and the prefix's context for backward and recompute the rest; same
  /// bits.
  std::pair<at::Tensor, MixerContext> forward(const at::Tensor& x, const LayerInput& input,
                                              const MixerContext& prefix, bool checkpointing) const;

  /// Names relative to the layer: input_layernorm.weight, self_attn.*,
  /// post_attention_layernorm.weight, mlp.*.
  std::vector<Weight> weights();

 private:
  std::pair<at::Tensor, MixerContext> run(const at::Tensor& x, const LayerInput& input,
                                          const MixerContext& prefix) const;
  std::vector<at::Tensor> parameters() const;

  int64_t hidden_;
  double norm_eps_;
  at::Tensor input_norm_, post_norm_;
  std::unique_ptr<TokenMixer> mixer_;
  std::unique_ptr<ChannelMixer> channels_;
};

}  // namespace zorro
