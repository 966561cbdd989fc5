#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "zorro/io/safetensors.h"

namespace zorro {

/// Writes a model folder beside its target and renames it when everything is on the disk: it
/// appears whole or not at all.
///
/// Throws  CheckpointError: the target exists, its parent does not, or the disk refuses.
class CheckpointWriter {
 public:
  explicit CheckpointWriter(const std::filesystem::path& folder);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// The folder that becomes the target: other files may be put there before commit.
  const std::filesystem::path& staging() const { return staging_; }

  void write_shard(const std::string& file, const NamedTensors& tensors);
  /// model.safetensors.index.json of the shards written so far.
  void write_index();
  void write_text(const std::string& file, const std::string& text);
  void copy_file(const std::filesystem::path& from);
  /// config.json byte for byte, unless its tie_word_embeddings differs from `tied`: then that key
  /// alone is changed.
  void copy_config(const std::filesystem::path& folder, bool tied);
  void commit();

 private:
  std::filesystem::path target_, staging_;
  std::map<std::string, std::string> weight_map_;
  int64_t total_bytes_ = 0;
  bool committed_ = false;
};

}  // namespace zorro
