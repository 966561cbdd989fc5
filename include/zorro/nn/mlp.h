#pragma once

#include "zorro/nn/mixer.h"

namespace zorro {

/// down(silu(gate(x)) * up(x)), no biases.
class Mlp final : public ChannelMixer {
 public:
  Mlp(int64_t hidden, int64_t intermediate) : hidden_(hidden), intermediate_(intermediate) {}
  at::Tensor forward(const at::Tensor& x) const override;
  std::vector<Weight> weights() override;

 private:
  int64_t hidden_, intermediate_;
  at::Tensor gate_, up_, down_;
};

}  // namespace zorro
