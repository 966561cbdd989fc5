#include "zorro/forest/prefix_forest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "reference/samples.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using reference::OwnedSamples;

constexpr Sharing kEverySharing[] = {Sharing::kNone, Sharing::kPrompts, Sharing::kPrefixes};

/// The tokens of a sample as the forest holds them.
std::vector<int64_t> path_of(const PrefixForest& forest, size_t sample) {
  std::vector<int64_t> path;
  for (int64_t token = forest.sample_last[sample]; token >= 0;
       token = forest.previous[static_cast<size_t>(token)])
    path.insert(path.begin(), token);
  return path;
}

TEST(PrefixForest, EveryTokenSeesExactlyThePathBeforeIt) {
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    Random random(seed);
    const OwnedSamples samples = reference::random_samples(random, 1 + random.below(7), 6, 2);
    for (const Sharing sharing : kEverySharing) {
      const PrefixForest forest = samples.forest(sharing, 1 + random.below(3));
      forest.validate();
      for (int64_t query = 0; query < forest.num_tokens(); ++query) {
        std::set<int64_t> path;
        for (int64_t token = query; token >= 0; token = forest.previous[static_cast<size_t>(token)])
          path.insert(token);
        for (int64_t key = 0; key < forest.num_tokens(); ++key) {
          const bool visible =
              key <= query && query < forest.visible_until[static_cast<size_t>(key)];
          ASSERT_EQ(visible, path.count(key) == 1) << "seed " << seed;
        }
      }
    }
  }
}

TEST(PrefixForest, PathsSpellTheSamplesAndScoredTokensTheirResponses) {
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    Random random(seed);
    const OwnedSamples samples = reference::random_samples(random, 1 + random.below(7), 8, 3);
    for (const Sharing sharing : kEverySharing) {
      const PrefixForest forest = samples.forest(sharing, 1 + random.below(4));
      const std::vector<int64_t> replicated = forest.replicated_to_packed();
      size_t next = 0;
      for (size_t i = 0; i < samples.tokens.size(); ++i) {
        const std::vector<int64_t> path = path_of(forest, i);
        ASSERT_EQ(path.size(), samples.tokens[i].size());
        for (size_t t = 0; t < path.size(); ++t) {
          const auto packed = static_cast<size_t>(path[t]);
          ASSERT_EQ(forest.token_ids[packed], samples.tokens[i][t]);
          ASSERT_EQ(forest.positions[packed], static_cast<int64_t>(t));
          ASSERT_EQ(replicated[next++], path[t]);
        }
        const auto begin = path.begin() + samples.scored_begin[i];
        const auto offset = forest.scored.begin() + forest.scored_offsets[i];
        ASSERT_TRUE(std::equal(begin, path.end(), offset,
                               forest.scored.begin() + forest.scored_offsets[i + 1]));
      }
    }
  }
}

TEST(PrefixForest, EqualPromptsAreOneNodeAndIdenticalRowsBothCount) {
  OwnedSamples samples;
  samples.add({1, 2, 3, 9}, 3);
  samples.add({4, 5}, 1);
  samples.add({1, 2, 3, 9}, 3);
  samples.add({1, 2, 3}, 3);  // empty response
  const PrefixForest forest = samples.forest(Sharing::kPrompts);
  EXPECT_EQ(forest.token_ids, (std::vector<int64_t>{1, 2, 3, 9, 9, 4, 5}));
  EXPECT_EQ(forest.multiplicity, (std::vector<int64_t>{3, 3, 3, 1, 1, 1, 1}));
  EXPECT_EQ(forest.scored, (std::vector<int64_t>{3, 6, 4}));
  EXPECT_EQ(forest.scored_offsets, (std::vector<int64_t>{0, 1, 2, 3, 3}));
  EXPECT_EQ(forest.sample_last, (std::vector<int64_t>{3, 6, 4, 2}));
  const PrefixForest trie = samples.forest(Sharing::kPrefixes);
  EXPECT_EQ(trie.num_tokens(), 6);
  EXPECT_EQ(trie.scored, (std::vector<int64_t>{3, 5, 3}));
}

TEST(PrefixForest, AGroupOfOneIsOneNode) {
  OwnedSamples samples;
  samples.add({1, 2, 3, 4}, 2);
  for (const Sharing sharing : kEverySharing) EXPECT_EQ(samples.forest(sharing).nodes.size(), 1U);
}

TEST(PrefixForest, DepthThreeAndDrawing) {
  OwnedSamples samples;
  samples.add({1, 1, 2, 2, 5}, 4);
  samples.add({1, 1, 2, 2, 6, 6}, 4);
  samples.add({1, 1, 3, 3, 7}, 4);
  samples.add({1, 1, 3, 3, 8}, 4);
  const PrefixForest forest = samples.forest(Sharing::kPrefixes);
  EXPECT_EQ(forest.draw(),
            "4 samples, 21 tokens, packed into 11\n"
            "[0, 2) 2 tokens x4: 1 1\n"
            "├─ [2, 4) 2 tokens x2: 2 2\n"
            "│  ├─ [4, 5) 1 token x1: 5  ends sample 0\n"
            "│  └─ [5, 7) 2 tokens x1: 6 6  ends sample 1\n"
            "└─ [7, 9) 2 tokens x2: 3 3\n"
            "   ├─ [9, 10) 1 token x1: 7  ends sample 2\n"
            "   └─ [10, 11) 1 token x1: 8  ends sample 3\n");
  EXPECT_NE(forest.draw(3).find("... 4 more nodes"), std::string::npos);
}

TEST(PrefixForest, ShortBranchesAndDeepTreesStayUnshared) {
  OwnedSamples samples;
  samples.add({1, 1, 2, 5}, 1);
  samples.add({1, 1, 2, 6}, 1);
  samples.add({1, 1, 3, 7}, 1);
  EXPECT_EQ(samples.forest(Sharing::kPrefixes, 1).num_tokens(), 7);
  EXPECT_EQ(samples.forest(Sharing::kPrefixes, 3).num_tokens(), 9);  // 1 1 2 shared by two
  EXPECT_EQ(samples.forest(Sharing::kPrefixes, 4).num_tokens(), 12);
  ForestOptions options;
  options.sharing = Sharing::kPrefixes;
  options.min_shared_tokens = 1;
  options.max_levels = 2;
  EXPECT_EQ(PrefixForest::build(samples.views(), options).num_tokens(), 8);
  options.max_levels = 1;
  EXPECT_EQ(PrefixForest::build(samples.views(), options).num_tokens(), 12);
}

TEST(PrefixForest, PositionsAndContentArePartOfATokensIdentity) {
  const std::vector<int64_t> tokens = {1, 2, 3}, shifted = {1000, 1001, 1002};
  const std::vector<uint64_t> image = {0, 7, 0}, other = {0, 8, 0};
  const auto tokens_of_two = [&](Sample a, Sample b, Sharing sharing) {
    ForestOptions options;
    options.sharing = sharing;
    options.min_shared_tokens = 1;
    a.scored_begin = b.scored_begin = 2;
    a.token_ids = b.token_ids = tokens;
    return PrefixForest::build(std::vector<Sample>{a, b}, options).num_tokens();
  };
  Sample plain, moved, one, two;
  moved.positions = shifted;
  one.content = image;
  two.content = other;
  EXPECT_EQ(tokens_of_two(plain, plain, Sharing::kPrompts), 4);
  EXPECT_EQ(tokens_of_two(plain, moved, Sharing::kPrompts), 6);
  EXPECT_EQ(tokens_of_two(one, one, Sharing::kPrompts), 4);
  EXPECT_EQ(tokens_of_two(one, two, Sharing::kPrompts), 6);
  EXPECT_EQ(tokens_of_two(one, two, Sharing::kPrefixes), 5);
  EXPECT_EQ(tokens_of_two(plain, moved, Sharing::kPrefixes), 6);
}

TEST(PrefixForest, ThreePositionAxesTravelWithTheirTokens) {
  const std::vector<int64_t> tokens = {5, 6}, positions = {0, 1, 10, 11, 20, 21};
  Sample sample;
  sample.token_ids = tokens;
  sample.positions = positions;
  sample.scored_begin = 1;
  ForestOptions options;
  options.num_axes = 3;
  const PrefixForest forest = PrefixForest::build(std::vector<Sample>{sample}, options);
  EXPECT_EQ(forest.positions, positions);
}

TEST(PrefixForest, B01_EmptyPromptNamesTheSample) {
  OwnedSamples samples;
  samples.add({1, 2}, 1);
  samples.add({3, 4}, 0);
  try {
    samples.forest(Sharing::kPrompts);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("samples[1]"), std::string::npos);
  }
}

TEST(PrefixForest, B02_OneValueForEachResponseToken) {
  Random random(2);
  const OwnedSamples samples = reference::batch_ba(random, 90);
  for (const Sharing sharing : kEverySharing) {
    const PrefixForest forest = samples.forest(sharing);
    EXPECT_EQ(forest.num_scored(), 35);
    EXPECT_EQ(forest.scored_offsets, (std::vector<int64_t>{0, 5, 6, 13, 15, 19, 26, 29, 35}));
  }
}

TEST(PrefixForest, B05_OrderOfRowsDoesNotMatter) {
  Random random(5);
  const OwnedSamples samples = reference::batch_ba(random, 90);
  const int64_t tokens = samples.forest(Sharing::kPrompts).num_tokens();
  EXPECT_EQ(tokens, 9 + 3 + 12 + 35);
  for (int round = 0; round < 20; ++round) {
    OwnedSamples shuffled = samples;
    for (size_t i = 8; i-- > 1;) {
      const auto j = static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1));
      std::swap(shuffled.tokens[i], shuffled.tokens[j]);
      std::swap(shuffled.scored_begin[i], shuffled.scored_begin[j]);
    }
    const PrefixForest forest = shuffled.forest(Sharing::kPrompts);
    forest.validate();
    EXPECT_EQ(forest.num_tokens(), tokens);
  }
}

TEST(PrefixForest, NothingAtAllIsAForest) {
  const PrefixForest none = PrefixForest::build({}, {});
  none.validate();
  EXPECT_EQ(none.num_tokens(), 0);
  OwnedSamples samples;
  samples.add({}, 0);
  samples.add({1, 2}, 1);
  const PrefixForest forest = samples.forest(Sharing::kPrefixes);
  forest.validate();
  EXPECT_EQ(forest.sample_last, (std::vector<int64_t>{-1, 1}));
}

TEST(PrefixForest, RefusesWhatDoesNotFit) {
  const std::vector<int64_t> tokens = {1, 2}, negative = {1, -2};
  const std::vector<uint64_t> content = {1};
  const auto refused = [&](const auto& edit, const ForestOptions& options = {}) {
    Sample sample;
    sample.token_ids = tokens;
    sample.scored_begin = 1;
    edit(sample);
    EXPECT_THROW(PrefixForest::build(std::vector<Sample>{sample}, options), InvalidArgument);
  };
  refused([](Sample& s) { s.scored_begin = 3; });
  refused([](Sample& s) { s.scored_begin = -1; });
  refused([](Sample& s) { s.prompt_length = 3; });
  refused([&](Sample& s) { s.positions = std::span(tokens).first(1); });
  refused([&](Sample& s) { s.content = content; });
  refused([&](Sample& s) { s.token_ids = negative; });
  refused([](Sample&) {}, {Sharing::kPrompts, 0, 64, 1});
  refused([](Sample&) {}, {Sharing::kPrompts, 64, 0, 1});
  refused([](Sample&) {}, {Sharing::kPrompts, 64, 64, 0});
}

TEST(PrefixForest, ValidateSeesEveryCorruptedVector) {
  Random random(11);
  const PrefixForest good = reference::star(random, 4, 3, 3, 9).forest(Sharing::kPrompts);
  const auto broken = [&](const auto& edit) {
    PrefixForest forest = good;
    edit(forest);
    EXPECT_THROW(forest.validate(), InternalError);
  };
  broken([](PrefixForest& f) { f.num_axes = 0; });
  broken([](PrefixForest& f) { f.token_ids[1] = -1; });
  broken([](PrefixForest& f) { f.positions.pop_back(); });
  broken([](PrefixForest& f) { f.previous[5] = 0; });
  broken([](PrefixForest& f) { f.previous.pop_back(); });
  broken([](PrefixForest& f) { f.visible_until[0] = 4; });
  broken([](PrefixForest& f) { f.visible_until.pop_back(); });
  broken([](PrefixForest& f) { f.multiplicity[0] = 2; });
  broken([](PrefixForest& f) { f.multiplicity.pop_back(); });
  broken([](PrefixForest& f) { f.nodes[1].begin = 5; });
  broken([](PrefixForest& f) { f.nodes[0].subtree_end = 7; });
  broken([](PrefixForest& f) { f.nodes[0].subtree_end = 9; });
  broken([](PrefixForest& f) { f.nodes[2].parent = 1; });
  broken([](PrefixForest& f) { f.nodes[2].depth = 3; });
  broken([](PrefixForest& f) { f.nodes.pop_back(); });
  broken([](PrefixForest& f) { std::swap(f.scored[0], f.scored[3]); });
  broken([](PrefixForest& f) { f.scored_offsets[1] = 4; });
  broken([](PrefixForest& f) { f.scored_offsets.pop_back(); });
  broken([](PrefixForest& f) { f.sample_last[0] = 5; });
  broken([](PrefixForest& f) { f.sample_last[0] = 99; });
  broken([](PrefixForest& f) { f.sample_lengths[0] = 6; });
}

TEST(PrefixForest, B08_GroupingGrowsWithTheTokensNotWithTheirSquare) {
  // Counted in work, not in seconds: rows that differ only in their last prompt token are the worst
  // case for hashing schemes that compare every pair. 40 times the rows would take 1,600 times as
  // long; a minute would not do.
  Random random(8);
  std::vector<int64_t> prompt = reference::random_tokens(random, 64, 1000);
  OwnedSamples samples;
  for (int64_t row = 0; row < 40000; ++row) {
    std::vector<int64_t> tokens = prompt;
    tokens.back() = 1000 + row;
    tokens.push_back(1);
    samples.add(std::move(tokens), 64);
  }
  EXPECT_EQ(samples.forest(Sharing::kPrompts).num_tokens(), 40000 * 65);
  EXPECT_EQ(samples.forest(Sharing::kPrefixes, 16).num_tokens(), 63 + 40000 * 2);
}

}  // namespace
}  // namespace zorro
