#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "io/json_text.h"
#include "zorro/core/error.h"
#include "zorro/io/safetensors.h"

namespace zorro {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

template <typename... Parts>
[[noreturn]] void fail(const fs::path& folder, const Parts&... what) {
  throw CheckpointError(concat("[checkpoint] ", folder.string(), ": ", what...));
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "cannot be read.");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// tensor -> file name, as the index says. Checked: plain file names only.
std::map<std::string, std::string> read_index(const fs::path& path) {
  nlohmann::json json;
  try {
    json = parse_json(read_text(path));
  } catch (const std::invalid_argument& error) {
    fail(path, "is not valid JSON: ", error.what(), ".");
  }
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
    fail(path, "must have a weight_map.");
  std::map<std::string, std::string> files;
  for (const auto& [name, value] : json["weight_map"].items()) {
    const std::string file = value.is_string() ? value.get<std::string>() : "";
    if (file.empty() || file == "." || file == ".." || fs::path(file).filename() != file ||
        file.find('\\') != std::string::npos)
      fail(path, "weight_map[\"", name, "\"] must be a plain file name, got ", value.dump(), ".");
    files[name] = file;
  }
  if (files.empty()) fail(path, "weight_map must not be empty.");
  return files;
}

std::vector<fs::path> files_without_index(const fs::path& folder) {
  if (fs::exists(folder / kSingle)) return {folder / kSingle};
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") found.push_back(entry.path());
  if (found.empty()) fail(folder, "must hold ", kSingle, " or ", kIndex, ", got neither.");
  if (found.size() > 1)
    fail(folder, "must have ", kIndex, " beside its ", found.size(), " safetensors files.");
  return found;
}

}  // namespace

CheckpointFolder CheckpointFolder::open(const fs::path& folder) {
  if (!fs::is_directory(folder)) fail(folder, "must be a folder of a model, got no folder.");
  CheckpointFolder result;
  result.path_ = folder;
  if (!fs::exists(folder / kIndex)) {
    for (const fs::path& path : files_without_index(folder)) {
      result.shards_.push_back(SafetensorsFile::open(path));
      for (const std::string& name : result.shards_.back().names()) result.shard_of_[name] = 0;
    }
    return result;
  }
  const std::map<std::string, std::string> files = read_index(folder / kIndex);
  std::map<std::string, size_t> shard_of_file;
  for (const auto& [name, file] : files) shard_of_file[file] = 0;
  for (auto& [file, shard] : shard_of_file) {
    if (!fs::exists(folder / file)) fail(folder, kIndex, " names ", file, ", which is not there.");
    shard = result.shards_.size();
    result.shards_.push_back(SafetensorsFile::open(folder / file));
  }
  for (const auto& [name, file] : files) {
    const size_t shard = shard_of_file.at(file);
    if (!result.shards_[shard].contains(name))
      fail(folder, kIndex, " says that tensor \"", name, "\" lies in ", file, ", which lacks it.");
    result.shard_of_[name] = shard;
  }
  for (const SafetensorsFile& shard : result.shards_)
    for (const std::string& name : shard.names())
      if (!result.contains(name) || &result.shards_[result.shard_of_.at(name)] != &shard)
        fail(folder, "tensor \"", name, "\" of ", shard.path().filename().string(),
             " must be listed in ", kIndex, ".");
  return result;
}

std::vector<std::string> CheckpointFolder::names() const {
  std::vector<std::string> list;
  for (const auto& [name, shard] : shard_of_) list.push_back(name);
  return list;
}

const SafetensorsFile::Entry& CheckpointFolder::entry(const std::string& name) const {
  const auto found = shard_of_.find(name);
  if (found == shard_of_.end()) fail(path_, "has no tensor \"", name, "\".");
  return shards_[found->second].entry(name);
}

at::Tensor CheckpointFolder::tensor(const std::string& name) const {
  const auto found = shard_of_.find(name);
  if (found == shard_of_.end()) fail(path_, "has no tensor \"", name, "\".");
  return shards_[found->second].tensor(name);
}

}  // namespace zorro
