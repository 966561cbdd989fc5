#include "zorro/plan/cost.h"

#include <gtest/gtest.h>

#include "reference/samples.h"

namespace zorro {
namespace {

const DenseSizes kSizes{512, 8, 8, 4, 64, 1536, 8192};

TEST(Cost, CountsVisiblePairsAsBruteForceDoes) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const auto samples = reference::random_samples(random, 6, 7, 2);
    for (const Sharing sharing : {Sharing::kNone, Sharing::kPrompts, Sharing::kPrefixes}) {
      const PrefixForest forest = samples.forest(sharing);
      int64_t pairs = 0;
      for (int64_t key = 0; key < forest.num_tokens(); ++key)
        for (int64_t query = key; query < forest.visible_until[static_cast<size_t>(key)]; ++query)
          ++pairs;
      EXPECT_EQ(forest_work(forest).pairs, pairs);
    }
    EXPECT_EQ(replicated_work(samples.forest(Sharing::kPrefixes)).pairs,
              forest_work(samples.forest(Sharing::kNone)).pairs);
  }
}

TEST(Cost, BoundOfAStarIsTheClosedFormula) {
  const int64_t P = 100, R = 20, n = 5;
  Random random(1);
  const PrefixForest forest = reference::star(random, P, R, n, 1000).forest(Sharing::kPrompts);
  const ModelCost model = dense_cost(kSizes);
  const auto a = model.linear_per_token, b = model.attention_per_pair, h = model.head_per_row;
  const double total = 1.0 * n * (P + R) * a + b * n * (P + R) * (P + R + 1) / 2 + h * n * R;
  // The prompt's last row predicts the first token of every rollout: it is one row of the head.
  const double shared = a * (P + n * R) +
                        b * (P * (P + 1) / 2.0 + n * P * R + n * R * (R + 1) / 2.0) +
                        h * (n * (R - 1) + 1);
  EXPECT_NEAR(speedup_bound(forest, model), total / shared, 1e-12);
  EXPECT_NEAR(token_ratio(forest), 600.0 / 200.0, 1e-12);
}

TEST(Cost, NothingSharedGainsNothing) {
  Random random(2);
  const PrefixForest forest = reference::star(random, 9, 4, 3, 1000).forest(Sharing::kNone);
  EXPECT_EQ(token_ratio(forest), 1);
  EXPECT_EQ(speedup_bound(forest, dense_cost(kSizes)), 1);
  EXPECT_EQ(speedup_bound(PrefixForest::build({}, {}), dense_cost(kSizes)), 1);
  EXPECT_EQ(token_ratio(PrefixForest::build({}, {})), 1);
}

TEST(Cost, B26_PairsOfLongSequencesDoNotOverflow) {
  PrefixForest forest;
  forest.token_ids.resize(1);
  forest.nodes = {{0, 100'000, 100'000, -1, 0}};
  EXPECT_EQ(forest_work(forest).pairs, int64_t{100'000} * 100'001 / 2);
  forest.sample_lengths = {100'000, 100'000};
  EXPECT_EQ(replicated_work(forest).pairs, int64_t{100'000} * 100'001);
}

}  // namespace
}  // namespace zorro
