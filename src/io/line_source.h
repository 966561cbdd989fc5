#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace zorro {

/// The lines of a text file, gzip by the suffix .gz; holds one line and one block of the file.
///
/// Throws  RolloutError with the path: missing, unreadable, not gzip, cut, or a line over 1 GiB.
class LineSource {
 public:
  explicit LineSource(const std::filesystem::path& path);
  ~LineSource();

  /// The following line without its end (\n or \r\n). False at the end of the file.
  bool next(std::string& line);
  int64_t line_number() const { return line_number_; }
  double fraction_read() const;

 private:
  bool fill();

  std::filesystem::path path_;
  void* file_ = nullptr;  // gzFile; zlib reads plain files too
  int64_t file_bytes_ = 0, line_number_ = 0;
  std::string block_;
  size_t block_begin_ = 0;
};

}  // namespace zorro
