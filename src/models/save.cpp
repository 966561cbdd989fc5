#include <fstream>
#include <system_error>

#include "models/decoder.h"
#include "models/tensor_names.h"
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

NamedTensors DecoderModel::by_checkpoint_name(const std::function<at::Tensor(const Weight&)>& of) {
  const std::vector<Weight> list = weights();
  std::vector<std::string> names;
  std::map<std::string, std::string> spelling;
  for (const CheckpointLayout::Shard& shard : layout_.shards)
    for (const std::string& name : shard.names) {
      names.push_back(name);
      spelling[without_wrapper(name)] = name;
    }
  std::map<const Weight*, at::Tensor> whole;
  for (const Weight& weight : list) whole[&weight] = of(weight);
  NamedTensors tensors;
  for (const auto& [name, part] : file_parts(list, names)) {
    const auto found = spelling.find(name);
    tensors.emplace_back(found == spelling.end() ? name : found->second,
                         part.view(whole[part.weight]).contiguous());
  }
  return tensors;
}

void DecoderModel::save(const std::filesystem::path& folder) const {
  // weights() hands out slots to set; here they are only read.
  std::vector<Weight> list = const_cast<DecoderModel*>(this)->weights();
  CheckpointWriter writer(folder);
  if (layout_.folder.empty()) {
    NamedTensors all;
    for (const Weight& weight : list) all.emplace_back(weight.name, weight.slot->detach());
    writer.write_shard("model.safetensors", all);
    writer.write_text("config.json", to_json(config_));
    writer.commit();
    return;
  }
  if (config_.tie_word_embeddings)  // some files hold both
    list.push_back({"lm_head.weight", {}, const_cast<at::Tensor*>(&embedding_)});
  std::vector<std::string> names;
  for (const CheckpointLayout::Shard& shard : layout_.shards)
    names.insert(names.end(), shard.names.begin(), shard.names.end());
  const std::map<std::string, FilePart> parts = file_parts(list, names);
  const CheckpointFolder source = CheckpointFolder::open(layout_.folder);
  for (const CheckpointLayout::Shard& shard : layout_.shards) {
    NamedTensors content;
    for (const std::string& name : shard.names) {
      const auto part = parts.find(without_wrapper(name));
      if (is_untouched(name))
        content.emplace_back(name, source.tensor(name));
      else if (part != parts.end())
        content.emplace_back(name, part->second.view(part->second.weight->slot->detach())
                                       .to(layout_.dtypes.at(name))
                                       .contiguous());
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
