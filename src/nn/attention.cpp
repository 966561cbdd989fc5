#include "zorro/nn/attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

#include "zorro/core/error.h"
#include "zorro/nn/rms_norm.h"
#include "zorro/nn/rope.h"

namespace zorro {
namespace {

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

at::Tensor after(const at::Tensor& prefix, const at::Tensor& x) {
  return prefix.defined() ? at::cat({prefix, x}) : x;
}

}  // namespace

at::Tensor Attention::heads(const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) const {
  return at::linear(x, weight, optional(bias)).view({x.size(0), -1, options_.head_dim});
}

std::pair<at::Tensor, MixerContext> Attention::forward(const at::Tensor& x, const LayerInput& input,
                                                       const MixerContext& prefix) const {
  const int64_t begin = input.q_begin, end = begin + x.size(0);
  ZORRO_ASSERT((prefix.key.defined() ? prefix.key.size(0) : 0) == begin);
  const at::Tensor cos = input.cos.slice(0, begin, end), sin = input.sin.slice(0, begin, end);
  at::Tensor q = heads(x, q_, q_bias_), k = heads(x, k_, k_bias_);
  if (options_.qk_norm) {
    q = rms_norm(q, q_norm_, options_.norm_eps);
    k = rms_norm(k, k_norm_, options_.norm_eps);
  }
  MixerContext context;
  context.key = after(prefix.key, apply_rope(k, cos, sin));
  context.value = after(prefix.value, heads(x, v_, v_bias_));

  const ForestTensors& forest = input.forest;
  ForestAttentionOptions options;
  options.q_begin = begin;
  options.path = input.attention;
  const at::Tensor mixed = forest_attention(apply_rope(q, cos, sin), context.key, context.value,
                                            forest.visible_until.slice(0, 0, end),
                                            nodes_before(forest.nodes, end), options)
                               .out;
  return {at::linear(mixed.flatten(1), o_, optional(o_bias_)), std::move(context)};
}

std::vector<Weight> Attention::weights() {
  const int64_t hidden = options_.hidden;
  const int64_t q_rows = options_.query_heads * options_.head_dim;
  const int64_t kv_rows = options_.kv_heads * options_.head_dim;
  std::vector<Weight> list = {{"q_proj.weight", {q_rows, hidden}, &q_},
                              {"k_proj.weight", {kv_rows, hidden}, &k_},
                              {"v_proj.weight", {kv_rows, hidden}, &v_},
                              {"o_proj.weight", {hidden, q_rows}, &o_}};
  if (options_.bias)
    list.insert(list.end(), {{"q_proj.bias", {q_rows}, &q_bias_},
                             {"k_proj.bias", {kv_rows}, &k_bias_},
                             {"v_proj.bias", {kv_rows}, &v_bias_},
                             {"o_proj.bias", {hidden}, &o_bias_}});
  if (options_.qk_norm)
    list.insert(list.end(), {{"q_norm.weight", {options_.head_dim}, &q_norm_},
                             {"k_norm.weight", {options_.head_dim}, &k_norm_}});
  return list;
}

}  // namespace zorro
