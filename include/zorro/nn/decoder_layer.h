#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "zorro/nn/mixer.h"
#include "zorro/nn/rms_norm.h"

namespace zorro {

/// Pre-norm residual layer: x += mixer(norm(x)); x += channels(norm(x)).
class DecoderLayer {
 public:
  struct Result {
    at::Tensor y;
    MixerContext context;
    at::Tensor router_logits;  ///< [tokens, experts]; undefined without a router
  };

  DecoderLayer(int64_t hidden, double norm_eps, NormKind norm, std::unique_ptr<TokenMixer> mixer,
               std::unique_ptr<ChannelMixer> channels);

  /// checkpointing: keep only x and the prefix's context for backward and recompute the rest; same
  /// bits.
  Result forward(const at::Tensor& x, const LayerInput& input, const MixerContext& prefix,
                 bool checkpointing) const;

  /// Names relative to the layer: input_layernorm.weight, self_attn.* or linear_attn.*,
  /// post_attention_layernorm.weight, mlp.*.
  std::vector<Weight> weights();

 private:
  Result run(const at::Tensor& x, const LayerInput& input, const MixerContext& prefix) const;
  std::vector<at::Tensor> parameters() const;

  int64_t hidden_;
  double norm_eps_;
  NormKind norm_;
  at::Tensor input_norm_, post_norm_;
  std::unique_ptr<TokenMixer> mixer_;
  std::unique_ptr<ChannelMixer> channels_;
};

}  // namespace zorro
