#include "io/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "zorro/core/error.h"

namespace zorro {

FileMapping::FileMapping(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ZORRO_CHECK_AS(CheckpointError, file >= 0, "[checkpoint] ", path.string(),
                 ": cannot be opened: ", std::strerror(errno), ".");
  struct stat status{};
  const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  size_ = regular ? static_cast<size_t>(status.st_size) : 0;
  void* mapped = size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  ::close(file);
  ZORRO_CHECK_AS(CheckpointError, regular && mapped != MAP_FAILED, "[checkpoint] ", path.string(),
                 ": must be a readable file.");
  data_ = static_cast<const std::byte*>(mapped);
}

FileMapping::~FileMapping() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace zorro
