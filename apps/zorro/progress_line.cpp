#include "progress_line.h"

#include <unistd.h>

#include <iostream>

#include "interrupt.h"
#include "zorro/core/progress.h"

namespace zorro::app {
namespace {

constexpr std::chrono::milliseconds kLivePeriod{100}, kPlainPeriod{5000};

}  // namespace

ProgressLine::ProgressLine(bool quiet, std::string label, std::string unit)
    : quiet_(quiet),
      live_(isatty(STDERR_FILENO) != 0),
      label_(std::move(label)),
      unit_(std::move(unit)),
      start_(Clock::now()),
      last_(start_) {}

ProgressLine::~ProgressLine() {
  if (shown_ && live_) std::cerr << "\r\033[K" << std::flush;
}

void ProgressLine::update(int64_t done, int64_t all) {
  poll_interrupt();
  if (quiet_) return;
  const Clock::time_point now = Clock::now();
  if (now - last_ < (live_ ? kLivePeriod : kPlainPeriod)) return;
  last_ = now;
  shown_ = true;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const std::string text = label_ + ": " + progress_text(done, all, seconds, unit_);
  if (live_)
    std::cerr << "\r\033[K" << text << std::flush;
  else
    std::cerr << text << "\n";
}

}  // namespace zorro::app
