#include "zorro/nn/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>

#include "zorro/core/error.h"
#include "zorro/nn/rms_norm.h"
#include "zorro/nn/rope.h"

namespace zorro {
namespace {

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

at::Tensor after(const MixerContext& prefix, size_t part, const at::Tensor& x) {
  return prefix.empty() ? x : at::cat({prefix[part], x});
}

}  // namespace

at::Tensor Attention::heads(const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) const {
  return at::linear(x, weight, optional(bias)).view({x.size(0), -1, options_.head_dim});
}

std::pair<at::Tensor, MixerContext> Attention::forward(const at::Tensor& x, const LayerInput& input,
                                                       const MixerContext& prefix) const {
  const int64_t begin = input.q_begin, end = begin + x.size(0);
  ZORRO_ASSERT((prefix.empty() ? 0 : prefix[0].size(0)) == begin);
  const at::Tensor cos = input.cos.slice(0, begin, end), sin = input.sin.slice(0, begin, end);
  at::Tensor q = heads(x, q_, q_bias_), k = heads(x, k_, k_bias_), gate;
  if (options_.gate) {  // per head: the query, then its gate
    const at::Tensor both = q.unflatten(1, {options_.query_heads, 2});
    q = both.select(2, 0), gate = both.select(2, 1);
  }
  if (options_.qk_norm) {
    q = rms_norm(q, q_norm_, options_.norm_eps, options_.norm);
    k = rms_norm(k, k_norm_, options_.norm_eps, options_.norm);
  }
  MixerContext context = {after(prefix, 0, apply_rope(k, cos, sin)),
                          after(prefix, 1, heads(x, v_, v_bias_))};

  const ForestTensors& forest = input.forest;
  ForestAttentionOptions options;
  options.q_begin = begin;
  options.path = input.attention;
  at::Tensor mixed = forest_attention(apply_rope(q, cos, sin), context[0], context[1],
                                      forest.visible_until.slice(0, 0, end),
                                      nodes_before(forest.nodes, end), options)
                         .out;
  if (options_.gate) mixed = mixed * at::sigmoid(gate);
  return {at::linear(mixed.flatten(1), o_, optional(o_bias_)), std::move(context)};
}

std::vector<Weight> Attention::weights() {
  const int64_t hidden = options_.hidden;
  const int64_t q_rows = options_.query_heads * options_.head_dim;
  const int64_t kv_rows = options_.kv_heads * options_.head_dim;
  const int64_t q_proj_rows = options_.gate ? 2 * q_rows : q_rows;
  std::vector<Weight> list = {{"q_proj.weight", {q_proj_rows, hidden}, &q_},
                              {"k_proj.weight", {kv_rows, hidden}, &k_},
                              {"v_proj.weight", {kv_rows, hidden}, &v_},
                              {"o_proj.weight", {hidden, q_rows}, &o_}};
  if (options_.bias)
    list.insert(list.end(), {{"q_proj.bias", {q_proj_rows}, &q_bias_},
                             {"k_proj.bias", {kv_rows}, &k_bias_},
                             {"v_proj.bias", {kv_rows}, &v_bias_}});
  if (options_.output_bias) list.push_back({"o_proj.bias", {hidden}, &o_bias_});
  const double norm_mean = options_.norm == NormKind::kPlain ? 1 : 0;
  if (options_.qk_norm)
    list.insert(list.end(), {{"q_norm.weight", {options_.head_dim}, &q_norm_, norm_mean},
                             {"k_norm.weight", {options_.head_dim}, &k_norm_, norm_mean}});
  return list;
}

}  // namespace zorro
