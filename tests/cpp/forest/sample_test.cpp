#include "zorro/forest/sample.h"

#include <gtest/gtest.h>

#include "zorro/core/error.h"
#include "zorro/forest/prefix_forest.h"

namespace zorro {
namespace {

struct Rectangle {
  std::vector<int64_t> ids, mask, positions;
  PaddedBatch batch;

  Rectangle(int64_t rows, int64_t response, std::vector<int64_t> token_ids,
            std::vector<int64_t> attention_mask)
      : ids(std::move(token_ids)), mask(std::move(attention_mask)) {
    batch.num_rows = rows;
    batch.width = static_cast<int64_t>(ids.size()) / rows;
    batch.response_width = response;
    batch.token_ids = ids;
    batch.attention_mask = mask;
  }
};

std::vector<int64_t> ids(const Sample& sample) {
  return {sample.token_ids.begin(), sample.token_ids.end()};
}

TEST(PaddedSamples, EveryLayoutGivesTheSameSamples) {
  const Rectangle left(1, 3, {0, 7, 8, 0, 9, 6}, {0, 1, 1, 0, 1, 1});
  const Rectangle right(1, 3, {7, 8, 0, 9, 6, 0}, {1, 1, 0, 1, 1, 0});
  const Rectangle both(1, 3, {0, 7, 8, 9, 6, 0}, {0, 1, 1, 1, 1, 0});
  const Rectangle none(1, 2, {7, 8, 9, 6}, {});
  for (const Rectangle* layout : {&left, &right, &both, &none}) {
    const PaddedSamples padded = samples_from_padded(layout->batch);
    ASSERT_EQ(padded.samples.size(), 1U);
    EXPECT_EQ(ids(padded.samples[0]), (std::vector<int64_t>{7, 8, 9, 6}));
    EXPECT_EQ(padded.samples[0].scored_begin, 2);
  }
  EXPECT_EQ(samples_from_padded(both.batch).cells, (std::vector<int64_t>{1, 2, 3, 4}));
}

TEST(PaddedSamples, B04_TheMaskTellsWhatIsPaddingNotTheId) {
  // pad = eos = 0: a real 0 at the end, no eos at all, a real 0 in the middle.
  const Rectangle rows(3, 4, {5, 1, 2, 0, 0, 5, 1, 0, 0, 0, 5, 1, 0, 2, 3},
                       {1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1});
  const PaddedSamples padded = samples_from_padded(rows.batch);
  EXPECT_EQ(ids(padded.samples[0]), (std::vector<int64_t>{5, 1, 2, 0}));
  EXPECT_EQ(ids(padded.samples[1]), (std::vector<int64_t>{5, 1}));
  EXPECT_EQ(ids(padded.samples[2]), (std::vector<int64_t>{5, 1, 0, 2, 3}));
  const PrefixForest forest = PrefixForest::build(padded.samples, {});
  EXPECT_EQ(forest.scored_offsets, (std::vector<int64_t>{0, 3, 4, 8}));
}

TEST(PaddedSamples, ExplicitPositionsFollowTheirTokensOnEveryAxis) {
  Rectangle row(2, 1, {0, 4, 5, 6, 7, 8}, {0, 1, 1, 1, 1, 1});
  row.positions = {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15};
  row.batch.positions = row.positions;
  row.batch.num_axes = 2;
  const PaddedSamples padded = samples_from_padded(row.batch);
  const auto positions = [&](size_t i) {
    return std::vector<int64_t>(padded.samples[i].positions.begin(),
                                padded.samples[i].positions.end());
  };
  EXPECT_EQ(positions(0), (std::vector<int64_t>{1, 2, 11, 12}));
  EXPECT_EQ(positions(1), (std::vector<int64_t>{3, 4, 5, 13, 14, 15}));
}

TEST(PaddedSamples, RefusesWhatDoesNotFit) {
  const auto refused = [](const auto& edit) {
    Rectangle row(1, 1, {1, 2}, {1, 1});
    edit(row);
    EXPECT_THROW(samples_from_padded(row.batch), InvalidArgument);
  };
  refused([](Rectangle& r) { r.batch.response_width = 3; });
  refused([](Rectangle& r) { r.batch.response_width = -1; });
  refused([](Rectangle& r) { r.batch.num_rows = -1; });
  refused([](Rectangle& r) { r.batch.width = 3; });
  refused([](Rectangle& r) { r.batch.attention_mask = std::span<const int64_t>(r.mask).first(1); });
  refused([](Rectangle& r) { r.mask[1] = 2; });
  refused([](Rectangle& r) { r.batch.num_axes = 0; });
  refused([](Rectangle& r) { r.batch.positions = r.ids, r.batch.num_axes = 2; });
}

}  // namespace
}  // namespace zorro
