#include "io/line_source.h"

#include <zlib.h>

#include <algorithm>

#include "zorro/core/error.h"

namespace zorro {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kLongestLine = size_t{1} << 30;

gzFile handle(void* file) { return static_cast<gzFile>(file); }

}  // namespace

LineSource::LineSource(const std::filesystem::path& path) : path_(path) {
  ZORRO_CHECK_AS(RolloutError, std::filesystem::is_regular_file(path), "[rollouts] ", path.string(),
                 ": must be a readable file, got none.");
  file_ = gzopen(path.c_str(), "rbe");
  ZORRO_CHECK_AS(RolloutError, file_ != nullptr, "[rollouts] ", path.string(),
                 ": cannot be opened.");
  file_bytes_ = static_cast<int64_t>(std::filesystem::file_size(path));
  const bool plain = gzdirect(handle(file_)) != 0;
  if (path.extension() == ".gz" && plain && file_bytes_ > 0) {
    gzclose(handle(file_));
    throw RolloutError(
        concat("[rollouts] ", path.string(), ": must be gzip by its suffix, got something else."));
  }
}

LineSource::~LineSource() { gzclose(handle(file_)); }

bool LineSource::fill() {
  block_.erase(0, block_begin_);
  block_begin_ = 0;
  const size_t kept = block_.size();
  ZORRO_CHECK_AS(RolloutError, kept < kLongestLine, "[rollouts] ", path_.string(), ":",
                 line_number_ + 1, ": line must be shorter than 1 GiB.");
  block_.resize(kept + kBlockBytes);
  const int read = gzread(handle(file_), block_.data() + kept, static_cast<unsigned>(kBlockBytes));
  int code = Z_OK;
  const char* reason = gzerror(handle(file_), &code);
  ZORRO_CHECK_AS(RolloutError, read >= 0 && (code == Z_OK || code == Z_STREAM_END), "[rollouts] ",
                 path_.string(), ": cannot be read to its end (", reason, "). The file is cut.");
  block_.resize(kept + static_cast<size_t>(read));
  return read > 0;
}

bool LineSource::next(std::string& line) {
  size_t searched = block_begin_;
  size_t end = 0;
  while ((end = block_.find('\n', searched)) == std::string::npos) {
    searched = block_.size() - block_begin_;
    if (fill()) continue;
    if (block_.empty()) return false;
    end = block_.size();
    break;
  }
  line.assign(block_, block_begin_, end - block_begin_);
  if (!line.empty() && line.back() == '\r') line.pop_back();
  block_begin_ = std::min(end + 1, block_.size());
  ++line_number_;
  return true;
}

double LineSource::fraction_read() const {
  return file_bytes_ > 0
             ? static_cast<double>(gzoffset(handle(file_))) / static_cast<double>(file_bytes_)
             : 1.0;
}

}  // namespace zorro
