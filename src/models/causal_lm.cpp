#include "zorro/models/causal_lm.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>

#include <functional>
#include <map>

#include "models/decoder.h"
#include "models/family.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using LayerBuilder = std::vector<DecoderLayer> (*)(const ModelConfig&);

/// Every family by its model_type.
const std::map<std::string, LayerBuilder>& families() {
  static const std::map<std::string, LayerBuilder> table = {
      {"qwen3", qwen3_layers},    {"qwen3_moe", qwen3_layers},    {"qwen3_next", hybrid_layers},
      {"qwen3_5", hybrid_layers}, {"qwen3_5_moe", hybrid_layers}, {"qwen2", llama_layers},
      {"llama", llama_layers},    {"mistral", llama_layers}};
  return table;
}

std::unique_ptr<DecoderModel> build(const ModelConfig& config) {
  const auto family = families().find(config.model_type);
  ZORRO_CHECK_AS(NotSupported, family != families().end(),
                 "[model] model_type must be a family that is written, got \"", config.model_type,
                 "\". read_model_config lists them.");
  return std::make_unique<DecoderModel>(config, family->second(config));
}

void check_options(const ModelOptions& options) {
  ZORRO_CHECK(
      options.dtype == at::kFloat || options.dtype == at::kDouble || options.dtype == at::kBFloat16,
      "[model] dtype must be float32, float64 or bfloat16, got ", options.dtype, ".");
}

}  // namespace

Batch Batch::from(PrefixForest forest, at::Device device) {
  ForestTensors tensors = to_tensors(forest, device);
  return {std::move(forest), std::move(tensors)};
}

std::unique_ptr<CausalLM> CausalLM::load(const std::filesystem::path& folder,
                                         const ModelOptions& options) {
  check_options(options);
  std::unique_ptr<DecoderModel> model = build(read_model_config(folder));
  model->load_weights(folder, options);
  return model;
}

std::unique_ptr<CausalLM> CausalLM::random(const ModelConfig& config, uint64_t seed, double std,
                                           const ModelOptions& options) {
  check_options(options);
  std::unique_ptr<DecoderModel> model = build(config);
  model->fill_random(seed, std, options);
  return model;
}

LogprobResult CausalLM::score(const Batch& batch, const at::Tensor& temperature,
                              const ForwardOptions& options) const {
  return score_hidden(hidden_states(batch, options), batch, temperature, options.head);
}

LogprobResult CausalLM::score_hidden(const at::Tensor& hidden, const Batch& batch,
                                     const at::Tensor& temperature,
                                     const LinearLogprobOptions& head) const {
  const ForestTensors& forest = batch.tensors;
  return linear_logprob(hidden.index_select(0, forest.predictors), head_weight(), forest.row,
                        forest.label, temperature, head);
}

LogprobResult CausalLM::score(const Batch& batch, const ForwardOptions& options) const {
  const at::Tensor& head = head_weight();
  const auto dtype = head.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return score(batch, at::ones({}, head.options().requires_grad(false).dtype(dtype)), options);
}

at::Tensor CausalLM::logits(const Batch& batch, const ForwardOptions& options) const {
  return at::linear(at_predictors(hidden_states(batch, options), batch), head_weight());
}

at::Tensor at_predictors(const at::Tensor& x, const Batch& batch) {
  ZORRO_CHECK(x.dim() >= 1 && x.size(0) == batch.tensors.num_tokens(),
              "[at_predictors] x must have one row a packed token, ", batch.tensors.num_tokens(),
              ", got shape ", x.sizes(), ".");
  return x.index_select(0, batch.tensors.predictors.index_select(0, batch.tensors.row));
}

}  // namespace zorro
