#pragma once

#include "zorro/nn/mixer.h"

namespace zorro {

struct GatedDeltaNetOptions {
  int64_t hidden = 0;
  int64_t key_heads = 0, value_heads = 0;
  int64_t key_dim = 0, value_dim = 0;
  int64_t conv_kernel = 0;
  double norm_eps = 1e-6;
  /// One projection for q, k, v, z and one for b, a, rows grouped by key head (Qwen3-Next), in
  /// place of four.
  bool grouped = false;
};

/// Linear attention: projections, short convolution with SiLU, gated delta rule, gated norm, output
/// projection. docs/math.md#gated-delta-rule.
class GatedDeltaNet final : public TokenMixer {
 public:
  explicit GatedDeltaNet(const GatedDeltaNetOptions& options) : options_(options) {}
  const char* name() const override { return "linear_attn."; }
  std::pair<at::Tensor, MixerContext> forward(const at::Tensor& x, const LayerInput& input,
                                              const MixerContext& prefix) const override;
  std::vector<Weight> weights() override;

 private:
  struct Projected {
    at::Tensor u;     ///< [tokens, 2 Hk dk + Hv dv] q, k, v before the convolution
    at::Tensor z;     ///< [tokens, Hv, dv]
    at::Tensor b, a;  ///< [tokens, Hv]
  };
  Projected project(const at::Tensor& x) const;

  GatedDeltaNetOptions options_;
  at::Tensor qkv_, z_, b_, a_;  // separate
  at::Tensor qkvz_, ba_;        // grouped
  at::Tensor conv_, dt_bias_, a_log_, norm_, out_;
};

}  // namespace zorro
