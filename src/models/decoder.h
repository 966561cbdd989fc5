#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zorro/models/causal_lm.h"
#include "zorro/nn/decoder_layer.h"

namespace zorro {

/// How a checkpoint was laid out when it was read, so that a save writes it the same way.
struct CheckpointLayout {
  struct Shard {
    std::string file;
    std::vector<std::string> names;
  };
  std::filesystem::path folder;  ///< empty: the model was not loaded
  std::vector<Shard> shards;
  std::map<std::string, at::ScalarType> dtypes;
  bool has_index = false;
};

/// The shared machinery of all families: embedding, decoder layers, final norm, head.
class DecoderModel final : public CausalLM {
 public:
  DecoderModel(ModelConfig config, std::vector<DecoderLayer> layers);

  ForwardResult forward(const Batch& batch, const ForwardOptions& options) const override;
  std::vector<Weight> weights() override;
  NamedTensors by_checkpoint_name(const std::function<at::Tensor(const Weight&)>& of) override;
  const at::Tensor& head_weight() const override;
  const ModelConfig& config() const override { return config_; }
  const std::string& warning() const override { return warning_; }
  void save(const std::filesystem::path& folder) const override;

  /// Fills every weight from a folder; nothing is set when anything is wrong.
  void load_weights(const std::filesystem::path& folder, const ModelOptions& options);
  void fill_random(uint64_t seed, double std, const ModelOptions& options);

 private:
  void untie(const std::string& why);

  ModelConfig config_;
  at::Tensor embedding_, norm_, head_;
  std::vector<DecoderLayer> layers_;
  CheckpointLayout layout_;
  std::string warning_;
};

}  // namespace zorro
