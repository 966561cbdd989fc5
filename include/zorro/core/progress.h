#pragma once

#include <cstdint>
#include <string>

namespace zorro {

/// The text of a progress line; printing it is the caller's.
///
/// "1,536/9,216 tokens · 512 tokens/s · ETA 0:15". Without a known total: "1,536 tokens · 512
/// tokens/s". `unit` is the plural name of what is counted.
std::string progress_text(int64_t done, int64_t total, double seconds, const std::string& unit);

/// "1,234,567".
std::string with_thousands(int64_t number);

/// Seconds as "0:07", "12:34" or "1:02:03"; rounded to the nearest second, never negative.
std::string clock_text(double seconds);

}  // namespace zorro
