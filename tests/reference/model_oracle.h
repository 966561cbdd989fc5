#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "zorro/models/causal_lm.h"

namespace zorro::reference {

/// A Qwen3 forward pass of one row by the plain formulas: no packing, no neighbours, no kernels of
/// ours, float64. Gradients come from autograd over these few lines.
class RowOracle {
 public:
  /// Copies the model's weights as float64 leaves.
  explicit RowOracle(CausalLM& model) : config_(model.config()) {
    for (const Weight& weight : model.weights())
      weights_[weight.name] = weight.slot->detach().to(at::kDouble).requires_grad_(true);
  }

  /// [length, V]
  at::Tensor logits(const std::vector<int64_t>& tokens) const {
    const auto length = static_cast<int64_t>(tokens.size());
    at::Tensor x = w("model.embed_tokens.weight").index_select(0, at::tensor(tokens, at::kLong));
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      const std::string p = "model.layers." + std::to_string(layer) + ".";
      x = x + attention(norm(x, w(p + "input_layernorm.weight")), p + "self_attn.", length);
      const at::Tensor h = norm(x, w(p + "post_attention_layernorm.weight"));
      const at::Tensor gate = h.matmul(w(p + "mlp.gate_proj.weight").t());
      const at::Tensor up = h.matmul(w(p + "mlp.up_proj.weight").t());
      x = x + (gate * gate.sigmoid() * up).matmul(w(p + "mlp.down_proj.weight").t());
    }
    const bool tied = weights_.count("lm_head.weight") == 0;
    const at::Tensor head = w(tied ? "model.embed_tokens.weight" : "lm_head.weight");
    return norm(x, w("model.norm.weight")).matmul(head.t());
  }

  struct Scores {
    at::Tensor logprob, entropy;
  };
  /// Of the tokens from `begin` on.
  Scores score(const std::vector<int64_t>& tokens, int64_t begin, double temperature = 1) const {
    const auto length = static_cast<int64_t>(tokens.size());
    const at::Tensor all = (logits(tokens) / temperature).log_softmax(-1);
    const at::Tensor rows = all.slice(0, begin - 1, length - 1);
    const at::Tensor labels = at::tensor(tokens, at::kLong).slice(0, begin);
    return {rows.gather(1, labels.unsqueeze(1)).squeeze(1), -(rows.exp() * rows).sum(1)};
  }

  const std::map<std::string, at::Tensor>& weights() const { return weights_; }

 private:
  const at::Tensor& w(const std::string& name) const { return weights_.at(name); }

  at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const {
    return x / ((x * x).mean(-1, true) + config_.rms_norm_eps).sqrt() * weight;
  }

  at::Tensor rope(const at::Tensor& x) const {
    const int64_t dim = config_.head_dim, half = dim / 2;
    const at::Tensor i = at::arange(half, at::kDouble);
    const at::Tensor frequency = at::pow(config_.rope.theta, -2.0 * i / static_cast<double>(dim));
    const at::Tensor angle =
        at::arange(x.size(0), at::kDouble).unsqueeze(1) * frequency.unsqueeze(0);
    const at::Tensor c = angle.cos().unsqueeze(1), s = angle.sin().unsqueeze(1);
    const at::Tensor a = x.slice(2, 0, half), b = x.slice(2, half);
    return at::cat({a * c - b * s, b * c + a * s}, 2);
  }

  at::Tensor project(const at::Tensor& x, const std::string& name) const {
    const at::Tensor y = x.matmul(w(name + ".weight").t());
    return weights_.count(name + ".bias") != 0 ? y + w(name + ".bias") : y;
  }

  at::Tensor attention(const at::Tensor& x, const std::string& p, int64_t length) const {
    const auto heads = [&](const char* name) {
      return project(x, p + name).view({length, -1, config_.head_dim});
    };
    const at::Tensor q = rope(norm(heads("q_proj"), w(p + "q_norm.weight"))).transpose(0, 1);
    const int64_t group = config_.num_query_heads / config_.num_kv_heads;
    const at::Tensor k = rope(norm(heads("k_proj"), w(p + "k_norm.weight")))
                             .transpose(0, 1)
                             .repeat_interleave(group, 0);
    const at::Tensor v = heads("v_proj").transpose(0, 1).repeat_interleave(group, 0);
    at::Tensor scores =
        q.matmul(k.transpose(1, 2)) / std::sqrt(static_cast<double>(config_.head_dim));
    const at::Tensor future = at::ones({length, length}, at::kBool).triu(1);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
    const at::Tensor mixed = scores.softmax(-1).matmul(v).transpose(0, 1).reshape({length, -1});
    return project(mixed, p + "o_proj");
  }

  ModelConfig config_;
  std::map<std::string, at::Tensor> weights_;
};

}  // namespace zorro::reference
