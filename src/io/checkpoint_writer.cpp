#include "zorro/io/checkpoint_writer.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>

#include "io/atomic_file.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

namespace fs = std::filesystem;

template <typename... Parts>
[[noreturn]] void fail(const fs::path& folder, const Parts&... what) {
  throw CheckpointError(concat("[checkpoint] ", folder.string(), ": ", what...));
}

fs::path without_trailing_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

}  // namespace

CheckpointWriter::CheckpointWriter(const fs::path& folder)
    : target_(without_trailing_slash(folder)),
      staging_(target_.string() + ".partial" + std::to_string(::getpid())) {
  if (fs::exists(target_)) fail(target_, "must not exist yet. Choose another folder.");
  std::error_code error;
  fs::create_directory(staging_, error);
  if (error) fail(target_, "cannot be created: ", error.message(), ".");
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(staging_, ignored);
}

void CheckpointWriter::write_shard(const std::string& file, const NamedTensors& tensors) {
  write_safetensors(staging_ / file, tensors);
  for (const auto& [name, tensor] : tensors) {
    weight_map_[name] = file;
    total_bytes_ += static_cast<int64_t>(tensor.nbytes());
  }
}

void CheckpointWriter::write_index() {
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes_}}},
                                        {"weight_map", weight_map_}};
  write_text("model.safetensors.index.json", index.dump(2) + "\n");
}

void CheckpointWriter::write_text(const std::string& file, const std::string& text) {
  try {
    AtomicFile out(staging_ / file);
    out.write(text.data(), text.size());
    out.commit();
  } catch (const fs::filesystem_error& error) {
    fail(target_, file, " could not be written: ", error.code().message(), ".");
  }
}

void CheckpointWriter::copy_file(const fs::path& from) {
  std::error_code error;
  fs::copy_file(from, staging_ / from.filename(), error);
  if (error)
    fail(target_, from.filename().string(), " could not be copied: ", error.message(), ".");
}

void CheckpointWriter::copy_config(const fs::path& folder, bool tied) {
  std::ifstream file(folder / "config.json", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  auto config = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) fail(folder, "config.json cannot be read any more.");
  // Whoever speaks last decides: the outer file, else its text part, else nobody.
  const char* key = "tie_word_embeddings";
  nlohmann::ordered_json* owner = &config;
  if (!config.contains(key) && config.contains("text_config") &&
      config["text_config"].contains(key))
    owner = &config["text_config"];
  if (owner->value(key, false) == tied) return write_text("config.json", text);
  (*owner)[key] = tied;
  write_text("config.json", config.dump(2) + "\n");
}

void CheckpointWriter::commit() {
  std::error_code error;
  fs::rename(staging_, target_, error);
  if (error) fail(target_, "could not be put in place: ", error.message(), ".");
  committed_ = true;
}

}  // namespace zorro
