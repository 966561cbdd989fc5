#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zorro {

class FileMapping;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A safetensors file mapped into memory and checked strictly before any tensor is handed out.
///
/// Throws  CheckpointError (file, tensor, what was found): missing, empty, cut or too long file;
/// header over 100 MB, not
///         JSON, duplicate keys; offsets that overflow, overlap, leave holes or do not fit shape
///         and dtype; unknown dtype.
/// Source  the format's README and its reference reader's validate().
class SafetensorsFile {
 public:
  struct Entry {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    int64_t offset;  ///< bytes from the start of the file
    int64_t bytes;
  };

  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Names in the order of their bytes in the file.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return entries_.count(name) != 0; }
  const Entry& entry(const std::string& name) const;
  /// A read-only view on the mapping; it keeps the mapping alive and must not be written to.
  at::Tensor tensor(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::filesystem::path path_;
  std::shared_ptr<const FileMapping> mapping_;
  std::vector<std::string> names_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// Writes CPU tensors to a temporary file beside `path`, flushes it and renames it. Any strides;
/// bytes are row-major. Same input, same bytes. Throws CheckpointError when the disk refuses.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

/// The tensors of a Hugging Face folder: model.safetensors, or model.safetensors.index.json and its
/// shards.
class CheckpointFolder {
 public:
  /// Throws CheckpointError: no model file, two shards and no index, an index that names a missing
  /// file or a tensor that its shard lacks, a path separator in a shard's name.
  static CheckpointFolder open(const std::filesystem::path& folder);

  const std::filesystem::path& path() const { return path_; }
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return shard_of_.count(name) != 0; }
  const SafetensorsFile::Entry& entry(const std::string& name) const;
  at::Tensor tensor(const std::string& name) const;
  /// File name of each shard, in order, and the shard index of each tensor.
  const std::vector<SafetensorsFile>& shards() const { return shards_; }
  const std::map<std::string, size_t>& shard_of() const { return shard_of_; }

 private:
  std::filesystem::path path_;
  std::vector<SafetensorsFile> shards_;
  std::map<std::string, size_t> shard_of_;
};

}  // namespace zorro
