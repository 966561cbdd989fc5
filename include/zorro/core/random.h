#pragma once

#include <cstdint>

namespace zorro {

/// Seeded random numbers that are the same on every platform and compiler.
///
/// Source  xoshiro256** with splitmix64 seeding (Blackman and Vigna, 2018); normals by Box-Muller.
class Random {
 public:
  explicit Random(uint64_t seed);

  uint64_t next();
  /// Uniform in [0, 1), 53 bits.
  double uniform();
  /// Uniform integer in [0, bound); bound must be > 0.
  int64_t below(int64_t bound);
  /// Standard normal.
  double normal();

 private:
  uint64_t state_[4];
  double spare_ = 0;
  bool has_spare_ = false;
};

}  // namespace zorro
