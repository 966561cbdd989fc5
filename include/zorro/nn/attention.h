#pragma once

#include "zorro/nn/mixer.h"
#include "zorro/nn/rms_norm.h"

namespace zorro {

struct AttentionModuleOptions {
  int64_t hidden = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool bias = false;         ///< biases on q, k and v
  bool output_bias = false;  ///< a bias on o
  bool qk_norm = false;      ///< root-mean-square norm of each query and key head
  NormKind norm = NormKind::kPlain;
  bool gate = false;  ///< q_proj holds a gate behind each head's query; its sigmoid scales the head
  double norm_eps = 1e-6;
};

/// Full attention: projections, per-head norm, RoPE, forest attention, output projection.
class Attention final : public TokenMixer {
 public:
  explicit Attention(const AttentionModuleOptions& options) : options_(options) {}
  const char* name() const override { return "self_attn."; }
  std::pair<at::Tensor, MixerContext> forward(const at::Tensor& x, const LayerInput& input,
                                              const MixerContext& prefix) const override;
  std::vector<Weight> weights() override;

 private:
  at::Tensor heads(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const;

  AttentionModuleOptions options_;
  at::Tensor q_, k_, v_, o_;
  at::Tensor q_bias_, k_bias_, v_bias_, o_bias_;
  at::Tensor q_norm_, k_norm_;
};

}  // namespace zorro
