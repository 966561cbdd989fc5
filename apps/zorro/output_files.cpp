#include "output_files.h"

#include <unistd.h>

#include "zorro/core/error.h"

namespace zorro::app {
namespace {

namespace fs = std::filesystem;

fs::path beside(const fs::path& target, const char* suffix) {
  fs::path name = target.filename();
  name += std::string(".") + suffix + "-" + std::to_string(getpid());
  return target.parent_path() / name;
}

/// "out/" names the folder "out".
fs::path without_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

}  // namespace

void check_output(const fs::path& path, bool force) {
  ZORRO_CHECK(!path.empty(), "[output] path must not be empty, got nothing.");
  const fs::path target = without_slash(path);
  ZORRO_CHECK(force || !fs::exists(fs::symlink_status(target)), "[output] ", path.string(),
              " must not exist, got an existing one. Pass --force to replace it.");
  const fs::path parent = target.has_parent_path() ? target.parent_path() : fs::path(".");
  ZORRO_CHECK(fs::is_directory(parent), "[output] folder of ", path.string(),
              " must exist, got none at ", parent.string(), ". Create it first.");
}

StagedFolder::StagedFolder(const fs::path& target)
    : target_(without_slash(target)), staging_(beside(target_, "partial")) {}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  fs::remove_all(staging_, ignored);
}

void StagedFolder::commit() {
  const fs::path old = beside(target_, "old");
  const bool replaces = fs::exists(fs::symlink_status(target_));
  if (replaces) fs::rename(target_, old);
  fs::rename(staging_, target_);
  if (replaces) fs::remove_all(old);
}

}  // namespace zorro::app
