#pragma once

#include <cstddef>
#include <filesystem>

namespace zorro {

/// A whole file mapped read-only.
///
/// Throws  CheckpointError with the path: missing, not a regular file, unreadable.
class FileMapping {
 public:
  explicit FileMapping(const std::filesystem::path& path);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace zorro
