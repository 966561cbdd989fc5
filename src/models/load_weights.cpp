#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <set>

#include "models/decoder.h"
#include "zorro/core/error.h"
#include "zorro/core/random.h"
#include "zorro/io/safetensors.h"

namespace zorro {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

/// Buffers that old checkpoints carry and nobody needs.
bool is_skipped(const std::string& name) {
  constexpr std::string_view kSuffix = ".rotary_emb.inv_freq";
  return name.size() > kSuffix.size() && name.ends_with(kSuffix);
}

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

at::Tensor as_parameter(const at::Tensor& stored, const ModelOptions& options) {
  at::Tensor own =
      at::empty(stored.sizes(), stored.options().dtype(options.dtype).device(options.device));
  own.copy_(stored);
  return own.requires_grad_(true);
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
  const std::vector<int64_t> head_shape = {config_.vocab_size, config_.hidden_size};
  std::string embedding_name = kEmbedding;
  if (config_.tie_word_embeddings && folder.contains(kHead)) {
    check_tensor(folder, kHead, head_shape);
    if (!folder.contains(kEmbedding)) {
      embedding_name = kHead;
    } else {
      check_tensor(folder, kEmbedding, head_shape);
      if (!at::equal(folder.tensor(kEmbedding), folder.tensor(kHead)))
        untie(concat(path.string(),
                     ": tie_word_embeddings is true and lm_head.weight differs from ",
                     "the embedding: they are kept apart."));
    }
  }

  const std::vector<Weight> expected = weights();
  std::set<std::string> known = {kHead};  // checked above where it is not expected
  for (const Weight& weight : expected) {
    const bool is_embedding = weight.name == kEmbedding;
    check_tensor(folder, is_embedding ? embedding_name : weight.name, weight.shape);
    known.insert(weight.name);
  }
  for (const std::string& name : folder.names())
    if (known.count(name) == 0 && !is_skipped(name))
      fail(folder, name,
           concat("must be a weight of ", config_.model_type,
                  ", got a name that it does not have."));

  for (const Weight& weight : expected)
    *weight.slot = as_parameter(
        folder.tensor(weight.name == kEmbedding ? embedding_name : weight.name), options);
  layout_ = layout_of(folder);
}

void DecoderModel::fill_random(uint64_t seed, double std, const ModelOptions& options) {
  Random random(seed);
  for (const Weight& weight : weights()) {
    const bool is_norm = weight.name.find("norm.weight") != std::string::npos;
    at::Tensor values = at::empty(weight.shape, at::kDouble);
    auto* data = values.mutable_data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i)
      data[i] = (is_norm ? 1 : 0) + std * random.normal();
    *weight.slot = as_parameter(values, options);
  }
}

}  // namespace zorro
