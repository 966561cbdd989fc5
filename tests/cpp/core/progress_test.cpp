#include "zorro/core/progress.h"

#include <gtest/gtest.h>

namespace zorro {
namespace {

TEST(Progress, GroupsThousands) {
  EXPECT_EQ(with_thousands(0), "0");
  EXPECT_EQ(with_thousands(999), "999");
  EXPECT_EQ(with_thousands(1000), "1,000");
  EXPECT_EQ(with_thousands(1234567), "1,234,567");
  EXPECT_EQ(with_thousands(-1234), "-1,234");
  EXPECT_EQ(with_thousands(-123), "-123");
}

TEST(Progress, WritesClockTimes) {
  EXPECT_EQ(clock_text(0), "0:00");
  EXPECT_EQ(clock_text(-5), "0:00");
  EXPECT_EQ(clock_text(59.6), "1:00");
  EXPECT_EQ(clock_text(754), "12:34");
  EXPECT_EQ(clock_text(3723), "1:02:03");
  EXPECT_EQ(clock_text(1e30), "99:59:59");
}

TEST(Progress, ShowsRateAndRemainingTime) {
  EXPECT_EQ(progress_text(1536, 9216, 3, "tokens"), "1,536/9,216 tokens · 512 tokens/s · ETA 0:15");
  EXPECT_EQ(progress_text(9216, 9216, 18, "tokens"), "9,216/9,216 tokens · 512 tokens/s");
  EXPECT_EQ(progress_text(1536, 0, 3, "tokens"), "1,536 tokens · 512 tokens/s");
}

TEST(Progress, SaysNothingAboutRateBeforeAnythingIsDone) {
  EXPECT_EQ(progress_text(0, 10, 5, "lines"), "0/10 lines");
  EXPECT_EQ(progress_text(3, 10, 0, "lines"), "3/10 lines");
}

TEST(Progress, KeepsTwoDigitsOfSlowRates) {
  EXPECT_EQ(progress_text(1, 3, 8, "updates"), "1/3 updates · 0.12 updates/s · ETA 0:16");
}

}  // namespace
}  // namespace zorro
