#include "io/atomic_file.h"

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace zorro {

AtomicFile::AtomicFile(const std::filesystem::path& path)
    : path_(path), temporary_(path.string() + ".partial" + std::to_string(::getpid())) {
  file_ = std::fopen(temporary_.c_str(), "wbe");
  if (file_ == nullptr) fail("cannot create the file");
}

AtomicFile::~AtomicFile() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

void AtomicFile::fail(const char* what) const {
  throw std::filesystem::filesystem_error(what, path_,
                                          std::error_code(errno, std::generic_category()));
}

void AtomicFile::write(const void* data, size_t bytes) {
  if (bytes > 0 && std::fwrite(data, 1, bytes, file_) != bytes) fail("cannot write the file");
}

void AtomicFile::commit() {
  if (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0) fail("cannot flush the file");
  if (std::fclose(std::exchange(file_, nullptr)) != 0) fail("cannot close the file");
  std::filesystem::rename(temporary_, path_);
}

}  // namespace zorro
