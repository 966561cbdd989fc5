#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <map>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/tensor_names.h"
#include "zorro/core/error.h"
#include "zorro/core/random.h"
#include "zorro/io/safetensors.h"

namespace zorro {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

[[noreturn]] void fail(const CheckpointFolder& folder, const std::string& name,
                       const std::string& what) {
  throw CheckpointError(
      concat("[model] ", folder.path().string(), ": tensor \"", name, "\" ", what));
}

void check_tensor(const CheckpointFolder& folder, const std::string& name,
                  const std::vector<int64_t>& shape) {
  if (!folder.contains(name))
    fail(folder, name, "must be there, got nothing. The folder lacks a weight of the model.");
  const SafetensorsFile::Entry& entry = folder.entry(name);
  if (entry.shape != shape)
    fail(folder, name,
         concat("must have shape ", at::IntArrayRef(shape), " by config.json, got ",
                at::IntArrayRef(entry.shape), "."));
  if (!at::isFloatingType(entry.dtype))
    fail(folder, name, concat("must hold floating-point numbers, got ", entry.dtype, "."));
}

/// An empty parameter of a weight, in the model's dtype or float32 if the weight is kept in it.
at::Tensor empty_parameter(const Weight& weight, const ModelOptions& options) {
  const bool lift = weight.keep_float32 && options.dtype == at::kBFloat16;
  return at::empty(weight.shape,
                   at::TensorOptions(options.device).dtype(lift ? at::kFloat : options.dtype));
}

/// The tensors of a file that are weights, by their names without wrapper.
std::map<std::string, std::string> own_tensors(const CheckpointFolder& folder) {
  std::map<std::string, std::string> spelling;
  for (const std::string& name : folder.names()) {
    if (is_forgotten(name) || is_untouched(name)) continue;
    const auto [entry, is_new] = spelling.emplace(without_wrapper(name), name);
    if (!is_new)
      fail(folder, name, concat("must be there once, got \"", entry->second, "\" as well."));
  }
  return spelling;
}

CheckpointLayout layout_of(const CheckpointFolder& folder) {
  CheckpointLayout layout;
  layout.folder = folder.path();
  for (const SafetensorsFile& shard : folder.shards())
    layout.shards.push_back({shard.path().filename().string(), shard.names()});
  for (const std::string& name : folder.names()) layout.dtypes[name] = folder.entry(name).dtype;
  layout.has_index = std::filesystem::exists(folder.path() / "model.safetensors.index.json");
  return layout;
}

}  // namespace

void DecoderModel::untie(const std::string& why) {
  config_.tie_word_embeddings = false;
  warning_ = why;
}

void DecoderModel::load_weights(const std::filesystem::path& path, const ModelOptions& options) {
  const CheckpointFolder folder = CheckpointFolder::open(path);
  std::map<std::string, std::string> spelling = own_tensors(folder);
  if (config_.tie_word_embeddings && spelling.count(kHead) != 0) {
    const std::vector<int64_t> head_shape = {config_.vocab_size, config_.hidden_size};
    const std::string head = spelling[kHead];
    check_tensor(folder, head, head_shape);
    if (spelling.count(kEmbedding) == 0) {
      spelling[kEmbedding] = head;
    } else {
      check_tensor(folder, spelling[kEmbedding], head_shape);
      if (!at::equal(folder.tensor(spelling[kEmbedding]), folder.tensor(head)))
        untie(concat(path.string(),
                     ": tie_word_embeddings is true and lm_head.weight differs from ",
                     "the embedding: they are kept apart."));
    }
    if (config_.tie_word_embeddings) spelling.erase(kHead);  // nothing more to say about it
  }

  const std::vector<Weight> expected = weights();
  const std::map<std::string, FilePart> parts = file_parts(expected, folder.names());
  for (const Weight& weight : expected)  // in the model's order: the first that is wrong is named
    for (const auto& [name, part] : parts) {
      if (part.weight != &weight) continue;
      const auto found = spelling.find(name);
      check_tensor(folder, found == spelling.end() ? name : found->second, part.shape());
    }
  for (const auto& [name, original] : spelling)
    if (parts.count(name) == 0)
      fail(folder, original,
           concat("must be a weight of ", config_.model_type,
                  ", got a name that it does not have."));

  std::map<const at::Tensor*, at::Tensor> filled;
  for (const Weight& weight : expected) filled[weight.slot] = empty_parameter(weight, options);
  for (const auto& [name, part] : parts)
    part.view(filled[part.weight->slot]).copy_(folder.tensor(spelling[name]));
  for (const Weight& weight : expected) *weight.slot = filled[weight.slot].requires_grad_(true);
  layout_ = layout_of(folder);
}

void DecoderModel::fill_random(uint64_t seed, double std, const ModelOptions& options) {
  Random random(seed);
  for (const Weight& weight : weights()) {
    at::Tensor values = at::empty(weight.shape, at::kDouble);
    auto* data = values.mutable_data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i) data[i] = weight.mean + std * random.normal();
    *weight.slot = empty_parameter(weight, options).copy_(values).requires_grad_(true);
  }
}

}  // namespace zorro
