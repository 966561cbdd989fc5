#pragma once

#include <memory>

#include "zorro/nn/mixer.h"
#include "zorro/nn/mlp.h"

namespace zorro {

struct SparseMoeOptions {
  int64_t hidden = 0;
  int64_t experts = 0, choices = 0, intermediate = 0;
  int64_t shared_intermediate = 0;  ///< 0: no shared expert
  bool normalize = false;           ///< weights of the chosen experts sum to 1
};

/// A router that sends each token to a few of many experts, and perhaps one expert for all.
///
/// p = softmax of the router's logits over all experts in float32 or better; the largest `choices`
/// of them weigh their experts. docs/math.md#experts.
class SparseMoe final : public ChannelMixer {
 public:
  explicit SparseMoe(const SparseMoeOptions& options);
  ChannelResult forward(const at::Tensor& x) const override;
  bool has_router() const override { return true; }
  std::vector<Weight> weights() override;

 private:
  SparseMoeOptions options_;
  at::Tensor router_, gate_up_, down_;
  std::unique_ptr<Mlp> shared_;
  at::Tensor shared_gate_;
};

}  // namespace zorro
