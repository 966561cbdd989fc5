#include <fstream>
#include <system_error>

#include "models/decoder.h"
#include "zorro/core/error.h"
#include "zorro/io/checkpoint_writer.h"

namespace zorro {
namespace {

/// Files beside the weights that belong to a model folder and that we carry over unread.
bool is_companion(const std::string& name) {
  for (const char* prefix : {"tokenizer", "chat_template"})
    if (name.starts_with(prefix)) return true;
  for (const char* exact : {"generation_config.json", "special_tokens_map.json", "vocab.json",
                            "merges.txt", "added_tokens.json"})
    if (name == exact) return true;
  return false;
}

}  // namespace

void DecoderModel::save(const std::filesystem::path& folder) const {
  std::map<std::string, at::Tensor> tensors;
  // weights() hands out slots to set; here they are only read.
  for (const Weight& weight : const_cast<DecoderModel*>(this)->weights())
    tensors[weight.name] = weight.slot->detach();
  if (config_.tie_word_embeddings) tensors["lm_head.weight"] = embedding_.detach();

  CheckpointWriter writer(folder);
  if (layout_.folder.empty()) {
    NamedTensors all;
    for (auto& [name, tensor] : tensors)
      if (name != "lm_head.weight" || !config_.tie_word_embeddings) all.emplace_back(name, tensor);
    writer.write_shard("model.safetensors", all);
    writer.write_text("config.json", to_json(config_));
    writer.commit();
    return;
  }
  for (const CheckpointLayout::Shard& shard : layout_.shards) {
    NamedTensors content;
    for (const std::string& name : shard.names) {
      const auto found = tensors.find(name);
      if (found == tensors.end()) continue;  // a skipped buffer
      content.emplace_back(name, found->second.to(layout_.dtypes.at(name)));
    }
    writer.write_shard(shard.file, content);
  }
  if (layout_.has_index) writer.write_index();
  writer.copy_config(layout_.folder, config_.tie_word_embeddings);
  for (const auto& entry : std::filesystem::directory_iterator(layout_.folder))
    if (entry.is_regular_file() && is_companion(entry.path().filename().string()))
      writer.copy_file(entry.path());
  writer.commit();
}

}  // namespace zorro
