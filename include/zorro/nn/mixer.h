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
  double mean = 0;            ///< of its values in a random model
  bool keep_float32 = false;  ///< held in float32 in a bfloat16 model, as serving engines do
};

/// What a prefix hands to later queries in one layer; empty: no prefix. Attention: keys and values
/// [tokens, Hkv, D] of all its tokens, after norm and RoPE. Gated delta net: inputs of the
/// convolution [tokens, channels] and the state after each node [nodes, Hv, dk, dv].
using MixerContext = std::vector<at::Tensor>;

/// What every layer of one forward call reads.
struct LayerInput {
  const ForestTensors& forest;
  at::Tensor cos;  ///< [T, rotary dims], activation dtype, of the whole packed order
  at::Tensor sin;
  int64_t q_begin =
      0;  ///< x holds packed tokens [q_begin, q_begin + x.size(0)); earlier ones come as context
  AttentionPath attention = AttentionPath::kFused;
  bool want_context = false;  ///< the context of a state costs memory: returned only when wanted
};

/// The weight under a longer name.
inline Weight prefixed(const std::string& prefix, Weight weight) {
  weight.name.insert(0, prefix);
  return weight;
}

/// Mixes tokens along the forest's paths: (x, context of the prefix) -> (y, context of prefix and
/// x).
class TokenMixer {
 public:
  virtual ~TokenMixer() = default;
  /// Where its weights stand in a layer: "self_attn." or "linear_attn.".
  virtual const char* name() const = 0;
  /// x [tokens, hidden] -> y [tokens, hidden] and the context of tokens [0, q_begin + tokens)
  /// (empty where it is costly and not wanted).
  virtual std::pair<at::Tensor, MixerContext> forward(const at::Tensor& x, const LayerInput& input,
                                                      const MixerContext& prefix) const = 0;
  /// The module's weights; slots stay valid as long as the module.
  virtual std::vector<Weight> weights() = 0;
};

struct ChannelResult {
  at::Tensor y;              ///< [tokens, hidden]
  at::Tensor router_logits;  ///< [tokens, experts]; undefined without a router
};

/// Mixes channels of each token alone.
class ChannelMixer {
 public:
  virtual ~ChannelMixer() = default;
  virtual ChannelResult forward(const at::Tensor& x) const = 0;  ///< x [tokens, hidden]
  virtual bool has_router() const { return false; }
  virtual std::vector<Weight> weights() = 0;
};

}  // namespace zorro
