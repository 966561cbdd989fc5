#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace zorro::app {

/// Progress on stderr: one live line on a terminal, else a plain line every few seconds.
class ProgressLine {
 public:
  ProgressLine(bool quiet, std::string label, std::string unit);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Shows what is done so far. Throws Interrupted after Ctrl-C, whether quiet or not.
  void update(int64_t done, int64_t all);

 private:
  using Clock = std::chrono::steady_clock;
  bool quiet_, live_, shown_ = false;
  std::string label_, unit_;
  Clock::time_point start_, last_;
};

}  // namespace zorro::app
