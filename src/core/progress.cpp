#include "zorro/core/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace zorro {
namespace {

std::string rate_text(double rate) {
  if (rate >= 10) return with_thousands(std::llround(rate));
  char text[32];
  std::snprintf(text, sizeof text, "%.2g", rate);
  return text;
}

}  // namespace

std::string with_thousands(int64_t number) {
  std::string digits = std::to_string(number);
  const std::size_t first = number < 0 ? 1 : 0;
  for (std::size_t place = digits.size(); place > first + 3;) {
    place -= 3;
    digits.insert(place, ",");
  }
  return digits;
}

std::string clock_text(double seconds) {
  constexpr double kLongest = 359999;  // 99:59:59: beyond it the guess says nothing
  const auto whole = std::llround(std::clamp(seconds, 0.0, kLongest));
  const auto hours = whole / 3600, minutes = whole / 60 % 60, rest = whole % 60;
  char text[32];
  if (hours > 0)
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", hours, minutes, rest);
  else
    std::snprintf(text, sizeof text, "%lld:%02lld", minutes, rest);
  return text;
}

std::string progress_text(int64_t done, int64_t total, double seconds, const std::string& unit) {
  std::string text = with_thousands(done);
  if (total > 0) text += "/" + with_thousands(total);
  text += " " + unit;
  if (done <= 0 || !(seconds > 0)) return text;
  const double rate = static_cast<double>(done) / seconds;
  text += " · " + rate_text(rate) + " " + unit + "/s";
  if (total > done) text += " · ETA " + clock_text(static_cast<double>(total - done) / rate);
  return text;
}

}  // namespace zorro
