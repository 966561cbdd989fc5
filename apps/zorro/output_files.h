#pragma once

#include <filesystem>

namespace zorro::app {

/// Refuses a path that exists, unless forced, and one whose folder does not. Before any work.
void check_output(const std::filesystem::path& path, bool force);

/// A folder that is filled under another name and takes its place when complete. Without commit
/// nothing remains.
class StagedFolder {
 public:
  explicit StagedFolder(const std::filesystem::path& target);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  /// Where to write; the folder itself does not exist at first.
  const std::filesystem::path& path() const { return staging_; }
  /// Puts the folder in its place; an older one gives way.
  void commit();

 private:
  std::filesystem::path target_, staging_;
};

}  // namespace zorro::app
