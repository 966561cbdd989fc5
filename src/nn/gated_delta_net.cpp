#include "zorro/nn/gated_delta_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>

#include "nn/lifted_dtype.h"
#include "zorro/core/error.h"
#include "zorro/nn/rms_norm.h"
#include "zorro/ops/forest_gated_delta.h"
#include "zorro/ops/forest_short_conv.h"

namespace zorro {
GatedDeltaNet::Projected GatedDeltaNet::project(const at::Tensor& x) const {
  const GatedDeltaNetOptions& o = options_;
  if (!o.grouped)
    return {at::linear(x, qkv_), at::linear(x, z_).unflatten(1, {o.value_heads, o.value_dim}),
            at::linear(x, b_), at::linear(x, a_)};
  // Per key head: q, k, the v of its value heads, their z; and their b, their a.
  const int64_t group = o.value_heads / o.key_heads, values = group * o.value_dim;
  const at::Tensor qkvz = at::linear(x, qkvz_).unflatten(1, {o.key_heads, -1});
  const auto part = [&](int64_t begin, int64_t size) {
    return qkvz.narrow(2, begin, size).flatten(1);
  };
  const at::Tensor ba = at::linear(x, ba_).unflatten(1, {o.key_heads, 2, group});
  return {at::cat({part(0, o.key_dim), part(o.key_dim, o.key_dim), part(2 * o.key_dim, values)}, 1),
          part(2 * o.key_dim + values, values).unflatten(1, {o.value_heads, o.value_dim}),
          ba.select(2, 0).flatten(1), ba.select(2, 1).flatten(1)};
}

std::pair<at::Tensor, MixerContext> GatedDeltaNet::forward(const at::Tensor& x,
                                                           const LayerInput& input,
                                                           const MixerContext& prefix) const {
  const GatedDeltaNetOptions& o = options_;
  const int64_t begin = input.q_begin, end = begin + x.size(0);
  ZORRO_ASSERT((prefix.empty() ? 0 : prefix[0].size(0)) == begin);
  const Projected in = project(x);
  const at::Tensor u = prefix.empty() ? in.u : at::cat({prefix[0], in.u});
  const at::Tensor mixed = at::silu(
      forest_short_conv(u, conv_.squeeze(1), input.forest.previous.slice(0, 0, end), begin));
  const int64_t keys = o.key_heads * o.key_dim;
  const auto heads = [&](int64_t first, int64_t count, int64_t dim) {
    return mixed.narrow(1, first, count * dim).unflatten(1, {count, dim});
  };
  // Decay and its parameters in float32 or better, whatever the activations are.
  const at::ScalarType dtype = lifted_dtype(x);
  const at::Tensor g = -a_log_.to(dtype).exp() * at::softplus(in.a.to(dtype) + dt_bias_.to(dtype));
  GatedDeltaOptions options;
  if (!prefix.empty()) options.initial = prefix[1];
  options.want_states = input.want_context;
  const GatedDeltaResult result =
      normalized_gated_delta(heads(0, o.key_heads, o.key_dim), heads(keys, o.key_heads, o.key_dim),
                             heads(2 * keys, o.value_heads, o.value_dim), g, at::sigmoid(in.b),
                             nodes_before(input.forest.nodes, end), options);
  const at::Tensor y = gated_rms_norm(result.out, in.z, norm_, o.norm_eps).flatten(1);
  MixerContext context;
  if (input.want_context) context = {u, result.states};
  return {at::linear(y, out_), std::move(context)};
}

std::vector<Weight> GatedDeltaNet::weights() {
  const GatedDeltaNetOptions& o = options_;
  const int64_t keys = o.key_heads * o.key_dim, values = o.value_heads * o.value_dim;
  std::vector<Weight> list;
  if (o.grouped)
    list = {{"in_proj_qkvz.weight", {2 * keys + 2 * values, o.hidden}, &qkvz_},
            {"in_proj_ba.weight", {2 * o.value_heads, o.hidden}, &ba_}};
  else
    list = {{"in_proj_qkv.weight", {2 * keys + values, o.hidden}, &qkv_},
            {"in_proj_z.weight", {values, o.hidden}, &z_},
            {"in_proj_b.weight", {o.value_heads, o.hidden}, &b_},
            {"in_proj_a.weight", {o.value_heads, o.hidden}, &a_}};
  const auto kept = [](const char* name, std::vector<int64_t> shape, at::Tensor* slot,
                       double mean) {
    return Weight{name, std::move(shape), slot, mean, /*keep_float32=*/true};
  };
  list.push_back({"conv1d.weight", {2 * keys + values, 1, o.conv_kernel}, &conv_});
  list.push_back(kept("dt_bias", {o.value_heads}, &dt_bias_, 1));
  list.push_back(kept("A_log", {o.value_heads}, &a_log_, 0));
  list.push_back(kept("norm.weight", {o.value_dim}, &norm_, 1));
  list.push_back({"out_proj.weight", {o.hidden, values}, &out_});
  return list;
}

}  // namespace zorro
