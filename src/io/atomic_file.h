#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>

namespace zorro {

/// A file that appears whole or not at all: bytes go to a temporary file in the same folder,
/// `commit` flushes it to the disk and renames it. Destroyed without commit, the temporary file is
/// removed.
///
/// Throws  std::filesystem::filesystem_error with the path and the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path path_, temporary_;
  std::FILE* file_ = nullptr;
};

}  // namespace zorro
