#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zorro/io/model_config.h"
#include "zorro/io/safetensors.h"
#include "zorro/nn/mixer.h"
#include "zorro/ops/linear_logprob.h"

namespace zorro {

/// A micro-batch as a model takes it: the forest and its device view.
struct Batch {
  PrefixForest forest;
  ForestTensors tensors;

  static Batch from(PrefixForest forest, at::Device device = at::kCPU);
};

struct ForwardOptions {
  AttentionPath attention = AttentionPath::kFused;
  /// Keep only each layer's input for backward and recompute the rest. Changes no gradient.
  bool checkpointing = false;
  LinearLogprobOptions head;
};

struct ForwardResult {
  at::Tensor hidden;                      ///< [T, hidden]
  std::vector<at::Tensor> router_logits;  ///< [T, experts] of each sparse layer
};

struct ModelOptions {
  at::ScalarType dtype =
      at::kFloat;  ///< float32, float64 or bfloat16; parameters are converted on load
  at::Device device = at::kCPU;
};

/// A decoder-only language model: embedding, layers, final norm and head. Families differ only in
/// their layers.
class CausalLM {
 public:
  virtual ~CausalLM() = default;

  /// Loads a Hugging Face folder. Every tensor of the file must be expected and every expected one
  /// there.
  ///
  /// Throws  CheckpointError (file, tensor, both shapes) before any weight is set; NotSupported by
  /// family name.
  static std::unique_ptr<CausalLM> load(const std::filesystem::path& folder,
                                        const ModelOptions& options = {});

  /// A model of given sizes with seeded random weights N(0, std) (norms 1 + N(0, std)).
  static std::unique_ptr<CausalLM> random(const ModelConfig& config, uint64_t seed,
                                          double std = 0.02, const ModelOptions& options = {});

  /// Final hidden rows of every packed token, after the last norm: [T, hidden].
  at::Tensor hidden_states(const Batch& batch, const ForwardOptions& options = {}) const {
    return forward(batch, options).hidden;
  }
  /// The same with the router logits of the sparse layers.
  virtual ForwardResult forward(const Batch& batch, const ForwardOptions& options = {}) const = 0;

  /// Log-probabilities and entropies of every scored token, sample after sample: [M] each.
  /// temperature: [] or [M].
  LogprobResult score(const Batch& batch, const at::Tensor& temperature,
                      const ForwardOptions& options = {}) const;
  /// The same at temperature 1.
  LogprobResult score(const Batch& batch, const ForwardOptions& options = {}) const;

  /// The head on hidden rows that forward has computed.
  LogprobResult score_hidden(const at::Tensor& hidden, const Batch& batch,
                             const at::Tensor& temperature, const LinearLogprobOptions& head) const;

  /// Logits of every scored token's predictor: [M, V] (tests and exports; needs M * V memory).
  at::Tensor logits(const Batch& batch, const ForwardOptions& options = {}) const;

  /// Every weight once, in checkpoint order; a tied head is not listed. Slots are leaf tensors that
  /// require gradients.
  virtual std::vector<Weight> weights() = 0;
  /// One tensor a weight under the names of the checkpoint that was read: a stack of experts comes
  /// apart where the file has them one by one. `of` gives a tensor of the weight's shape.
  virtual NamedTensors by_checkpoint_name(const std::function<at::Tensor(const Weight&)>& of) = 0;
  virtual const at::Tensor& head_weight()
      const = 0;  ///< [V, hidden]; the embedding itself when tied
  virtual const ModelConfig& config() const = 0;
  /// One line a person should see about the load (a tied flag with a head that differs), else
  /// empty.
  virtual const std::string& warning() const = 0;

  /// Writes a Hugging Face folder: the names, dtypes and shards that were read (model.safetensors
  /// and the run dtype for a random model), the same config.json, tokenizer and generation files
  /// copied. Written to a temporary folder, renamed.
  virtual void save(const std::filesystem::path& folder) const = 0;
};

/// Picks rows of x [T, ...] at the predictors of the scored tokens: [M, ...]. For critic and reward
/// heads.
at::Tensor at_predictors(const at::Tensor& x, const Batch& batch);

}  // namespace zorro
