#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "zorro/ops/forest_attention.h"
#include "zorro/ops/forest_tensors.h"

namespace zorro {

/// A weight of a module: its checkpoint name (relative to the module), its shape and the slot that
/// holds it.
struct Weight {
  std::string name;
  std::vector<int64_t> shape;
  at::Tensor* slot;
};

/// What a prefix hands to later queries in one layer. Attention: keys and values of all its tokens.
struct MixerContext {
  at::Tensor key;    ///< [tokens, Hkv, D], after norm and RoPE; undefined: no prefix
  at::Tensor value;  ///< [tokens, Hkv, D]
};

/// What every layer of one forward call reads.
struct LayerInput {
  const ForestTensors& forest;
  at::Tensor cos;  ///< [T, rotary dims], activation dtype, of the whole packed order
  at::Tensor sin;
  int64_t q_begin =
      0;  ///< x holds packed tokens [q_begin, q_begin + x.size(0)); earlier ones come as context
  AttentionPath attention = AttentionPath::kFused;
};

/// Mixes tokens along the forest's paths: (x, context of the prefix) -> (y, context of prefix and
/// x).
class TokenMixer {
 public:
  virtual ~TokenMixer() = default;
  /// x [tokens, hidden] -> y [tokens, hidden] and the context of tokens [0, q_begin + tokens).
  virtual std::pair<at::Tensor, MixerContext> forward(const at::Tensor& x, const LayerInput& input,
                                                      const MixerContext& prefix) const = 0;
  /// The module's weights; slots stay valid as long as the module.
  virtual std::vector<Weight> weights() = 0;
};

/// Mixes channels of each token alone.
class ChannelMixer {
 public:
  virtual ~ChannelMixer() = default;
  virtual at::Tensor forward(
      const at::Tensor& x) const = 0;  ///< [tokens, hidden] -> [tokens, hidden]
  virtual std::vector<Weight> weights() = 0;
};

}  // namespace zorro
