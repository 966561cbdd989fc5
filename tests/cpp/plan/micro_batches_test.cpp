#include "zorro/plan/micro_batches.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <set>

#include "zorro/core/error.h"

namespace zorro {
namespace {

std::vector<PlanSample> alone(const std::vector<int64_t>& lengths) {
  std::vector<PlanSample> samples;
  for (size_t i = 0; i < lengths.size(); ++i)
    samples.push_back({static_cast<int64_t>(i), 1, lengths[i] - 1});
  return samples;
}

TEST(MicroBatches, B35_TheCapIsHardAndAnItemOverItIsNamed) {
  EXPECT_EQ(plan_micro_batches(alone(std::vector<int64_t>(8, 7)), {8, 0}).size(), 8U);
  EXPECT_EQ(plan_micro_batches(alone({20}), {20, 0}).size(), 1U);
  try {
    plan_micro_batches(alone({3, 21}), {20, 0});
    FAIL();
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    for (const char* part : {"samples[1]", "20", "21"})
      EXPECT_NE(text.find(part), std::string::npos);
  }
  const std::vector<PlanSample> group(16, PlanSample{0, 400, 100});
  const auto parts = plan_micro_batches(group, {1000, 0});
  EXPECT_EQ(parts.size(), 3U);
  for (const auto& part : parts) EXPECT_LE(packed_tokens(group, part), 1000);
}

TEST(MicroBatches, ThePromptOfAGroupIsPaidOnce) {
  const std::vector<PlanSample> samples = {{7, 10, 1}, {8, 10, 2}, {7, 10, 3}};
  EXPECT_EQ(packed_tokens(samples, std::vector<int64_t>{0, 2}), 14);
  EXPECT_EQ(packed_tokens(samples, std::vector<int64_t>{0, 1}), 23);
}

TEST(MicroBatches, PropertiesHoldForAnyBatch) {
  EXPECT_TRUE(rc::check("every sample once, cap kept, groups whole, the same plan again", [] {
    const auto num_groups = *rc::gen::inRange<int64_t>(1, 6);
    const auto shapes = *rc::gen::container<std::vector<std::pair<int64_t, int64_t>>>(
        rc::gen::pair(rc::gen::inRange<int64_t>(0, num_groups), rc::gen::inRange<int64_t>(0, 20)));
    std::vector<PlanSample> samples;
    for (const auto& [group, response] : shapes) samples.push_back({group, 3 * group, response});
    const MicroBatchOptions options{*rc::gen::inRange<int64_t>(35, 80), 0};
    const auto parts = plan_micro_batches(samples, options);
    std::multiset<int64_t> seen;
    std::map<int64_t, std::set<size_t>> parts_of_group;
    std::map<int64_t, std::vector<int64_t>> members_of_group;
    for (size_t part = 0; part < parts.size(); ++part) {
      RC_ASSERT(std::is_sorted(parts[part].begin(), parts[part].end()));
      RC_ASSERT(packed_tokens(samples, parts[part]) <= options.max_tokens);
      for (const int64_t i : parts[part]) {
        seen.insert(i);
        parts_of_group[samples[static_cast<size_t>(i)].group].insert(part);
        members_of_group[samples[static_cast<size_t>(i)].group].push_back(i);
      }
    }
    RC_ASSERT(seen.size() == samples.size());
    RC_ASSERT(std::set<int64_t>(seen.begin(), seen.end()).size() == samples.size());
    for (const auto& [group, members] : members_of_group)
      if (packed_tokens(samples, members) <= options.max_tokens)
        RC_ASSERT(parts_of_group[group].size() == 1U);
    RC_ASSERT(parts == plan_micro_batches(samples, options));
  }));
}

TEST(MicroBatches, AskedForPartsAreBalanced) {
  EXPECT_TRUE(rc::check("exactly K parts, every sample once", [] {
    const auto lengths = *rc::gen::nonEmpty(
        rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(1, 50)));
    const auto num_parts = *rc::gen::inRange<int64_t>(1, 9);
    const auto samples = alone(lengths);
    const auto parts = plan_micro_batches(samples, {0, num_parts});
    RC_ASSERT(static_cast<int64_t>(parts.size()) == num_parts);
    int64_t count = 0, heaviest = 0, total = 0, longest = 0;
    for (const auto& part : parts) {
      count += static_cast<int64_t>(part.size());
      heaviest = std::max(heaviest, packed_tokens(samples, part));
    }
    for (const int64_t length : lengths) total += length, longest = std::max(longest, length);
    RC_ASSERT(count == static_cast<int64_t>(samples.size()));
    RC_ASSERT(heaviest <= total / num_parts + longest);  // longest first never does worse
  }));
}

TEST(MicroBatches, OneGroupIsCutOnlyWhenMorePartsAreAskedFor) {
  const std::vector<PlanSample> group(8, PlanSample{0, 10, 5});
  EXPECT_EQ(plan_micro_batches(group, {0, 1}).size(), 1U);
  for (const int64_t parts : {2, 8}) {
    const auto plan = plan_micro_batches(group, {0, parts});
    for (const auto& part : plan) EXPECT_EQ(static_cast<int64_t>(part.size()), 8 / parts);
  }
}

TEST(MicroBatches, PartsThatBalanceOverTheCapAreFilledInOrder) {
  // Longest first puts 5+3+3 | 4+3 in some order over the cap of 9; in the caller's order 5+4 |
  // 3+3+3 fits.
  const auto parts = plan_micro_batches(alone({5, 4, 3, 3, 3}), {9, 2});
  EXPECT_EQ(parts, (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3, 4}}));
  EXPECT_EQ(plan_micro_batches(alone({5, 4, 3, 3, 3}), {9, 3}).size(), 3U);
}

TEST(MicroBatches, RefusesWhatDoesNotFit) {
  EXPECT_THROW(plan_micro_batches({}, {-1, 0}), InvalidArgument);
  EXPECT_THROW(plan_micro_batches({}, {0, -1}), InvalidArgument);
  EXPECT_THROW(plan_micro_batches(std::vector<PlanSample>{{0, -1, 2}}, {}), InvalidArgument);
  EXPECT_THROW(plan_micro_batches(alone({8, 8, 8}), {10, 2}), InvalidArgument);
  EXPECT_TRUE(plan_micro_batches({}, {8, 0}).empty());
}

}  // namespace
}  // namespace zorro
