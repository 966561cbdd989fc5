#include "zorro/core/random.h"

#include <gtest/gtest.h>

#include <cmath>

#include "zorro/core/error.h"

namespace zorro {
namespace {

TEST(Random, RepeatsFromASeedAndDiffersBetweenSeeds) {
  Random first(7), second(7), other(8);
  const uint64_t word = first.next();
  EXPECT_EQ(word, second.next());
  EXPECT_NE(word, other.next());
}

TEST(Random, NormalsHaveMeanZeroAndVarianceOne) {
  Random random(1);
  const int count = 200000;
  double sum = 0, squares = 0;
  for (int i = 0; i < count; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / count, 0, 0.01);
  EXPECT_NEAR(squares / count, 1, 0.01);
}

TEST(Random, BelowStaysInRangeAndRefusesAnEmptyRange) {
  Random random(2);
  for (int i = 0; i < 1000; ++i) {
    const int64_t value = random.below(3);
    EXPECT_TRUE(value >= 0 && value < 3);
  }
  EXPECT_THROW(random.below(0), InvalidArgument);
}

}  // namespace
}  // namespace zorro
