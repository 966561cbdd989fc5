#pragma once

#include "zorro/nn/mixer.h"

namespace zorro {

/// down(silu(gate(x)) * up(x)).
class Mlp final : public ChannelMixer {
 public:
  Mlp(int64_t hidden, int64_t intermediate, bool bias = false)
      : hidden_(hidden), intermediate_(intermediate), bias_(bias) {}
  ChannelResult forward(const at::Tensor& x) const override { return {apply(x), {}}; }
  at::Tensor apply(const at::Tensor& x) const;
  std::vector<Weight> weights() override;

 private:
  int64_t hidden_, intermediate_;
  bool bias_;
  at::Tensor gate_, up_, down_;
  at::Tensor gate_bias_, up_bias_, down_bias_;
};

}  // namespace zorro
