#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "reference/model_oracle.h"
#include "reference/samples.h"
#include "zorro/models/causal_lm.h"

namespace zorro {

/// Hidden 32, heads 4/2 of 16 (so heads x dim is not hidden), 2 layers, vocabulary 97.
inline ModelConfig tiny_config(bool tied = false, bool bias = false) {
  ModelConfig config;
  config.model_type = "qwen3";
  config.vocab_size = 97;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_layers = 2;
  config.num_query_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.max_positions = 4096;
  config.tie_word_embeddings = tied;
  config.attention_bias = bias;
  return config;
}

/// Wide weights: the logits are not flat, so that a wrong token shows.
inline std::unique_ptr<CausalLM> tiny_model(const ModelConfig& config = tiny_config(),
                                            at::ScalarType dtype = at::kDouble) {
  return CausalLM::random(config, 7, 0.25, {dtype, at::kCPU});
}

using Gradients = std::map<std::string, at::Tensor>;

struct ModelNumbers {
  at::Tensor logprob, entropy;
  Gradients gradients;
};

/// Weights of the test loss: sum w logprob + 0.1 sum u entropy.
inline std::pair<at::Tensor, at::Tensor> loss_weights(int64_t count, uint64_t seed = 0) {
  Random random(seed);
  at::Tensor w = at::empty({count}, at::kDouble), u = at::empty({count}, at::kDouble);
  for (int64_t i = 0; i < count; ++i) {
    w.mutable_data_ptr<double>()[i] = random.normal();
    u.mutable_data_ptr<double>()[i] = random.normal();
  }
  return {w, u};
}

inline ModelNumbers run(CausalLM& model, PrefixForest forest, const ForwardOptions& options = {},
                        const at::Tensor& temperature = at::ones({}, at::kDouble)) {
  const Batch batch = Batch::from(std::move(forest));
  const LogprobResult scores = model.score(batch, temperature, options);
  const auto [w, u] = loss_weights(scores.logprob.size(0));
  const at::Tensor loss = (w * scores.logprob).sum() + 0.1 * (u * scores.entropy).sum();
  std::vector<at::Tensor> leaves;
  std::vector<Weight> weights;
  for (Weight& weight : model.weights())
    if (weight.slot->requires_grad()) {
      leaves.push_back(*weight.slot);
      weights.push_back(std::move(weight));
    }
  const auto grads = torch::autograd::grad({loss}, leaves);
  ModelNumbers numbers{scores.logprob.detach(), scores.entropy.detach(), {}};
  for (size_t i = 0; i < grads.size(); ++i) numbers.gradients[weights[i].name] = grads[i];
  return numbers;
}

/// Row by row through the oracle.
inline ModelNumbers alone(CausalLM& model, const reference::OwnedSamples& samples) {
  const reference::RowOracle oracle(model);
  std::vector<at::Tensor> logprob, entropy;
  for (size_t i = 0; i < samples.tokens.size(); ++i) {
    if (samples.scored_begin[i] == static_cast<int64_t>(samples.tokens[i].size())) continue;
    const auto scores = oracle.score(samples.tokens[i], samples.scored_begin[i]);
    logprob.push_back(scores.logprob);
    entropy.push_back(scores.entropy);
  }
  const at::Tensor all_logprob = at::cat(logprob), all_entropy = at::cat(entropy);
  const auto [w, u] = loss_weights(all_logprob.size(0));
  std::vector<at::Tensor> leaves;
  std::vector<std::string> names;
  for (const auto& [name, leaf] : oracle.weights()) {
    leaves.push_back(leaf);
    names.push_back(name);
  }
  const auto grads =
      torch::autograd::grad({(w * all_logprob).sum() + 0.1 * (u * all_entropy).sum()}, leaves);
  ModelNumbers numbers{all_logprob.detach(), all_entropy.detach(), {}};
  for (size_t i = 0; i < grads.size(); ++i) numbers.gradients[names[i]] = grads[i];
  return numbers;
}

/// max |x - y| / max(|y|, 1)
inline double score_error(const at::Tensor& x, const at::Tensor& y) {
  const at::Tensor truth = y.to(at::kDouble);
  if (truth.numel() == 0) return 0;
  return ((x.to(at::kDouble) - truth).abs() / truth.abs().clamp_min(1)).max().item<double>();
}

/// The tensors whose gradients are judged together: one layer, or one tensor outside the layers.
inline std::string gradient_group(const std::string& name) {
  const std::string prefix = "model.layers.";
  if (name.rfind(prefix, 0) != 0) return name;
  return name.substr(0, name.find('.', prefix.size()));
}

/// max over parameters of ||x - y|| / max(||y||, 1e-3 ||group||)
inline double gradient_error(const Gradients& x, const Gradients& y) {
  std::map<std::string, double> squares;
  for (const auto& [name, gradient] : y)
    squares[gradient_group(name)] += std::pow(gradient.norm().item<double>(), 2);
  double worst = 0;
  for (const auto& [name, gradient] : y) {
    const double norm = gradient.norm().item<double>();
    const double scale = std::max(norm, 1e-3 * std::sqrt(squares[gradient_group(name)]));
    const double error =
        (x.at(name).to(at::kDouble) - gradient.to(at::kDouble)).norm().item<double>();
    worst = std::max(worst, scale > 0 ? error / scale : error);
  }
  return worst;
}

inline double worst_error(const ModelNumbers& x, const ModelNumbers& y) {
  return std::max({score_error(x.logprob, y.logprob), score_error(x.entropy, y.entropy),
                   gradient_error(x.gradients, y.gradients)});
}

}  // namespace zorro
