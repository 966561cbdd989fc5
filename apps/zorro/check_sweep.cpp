#include <array>
#include <set>
#include <tuple>

#include "checker.h"

namespace zorro::app {
namespace {

constexpr size_t kNumFactors = 8;
/// Levels of: dtype, sharing, checkpointing, head, layout, permutation, micro-batches, attention.
/// Level 0 of each is the plainest run.
constexpr std::array<int, kNumFactors> kLevels{3, 2, 2, 3, 4, 2, 3, 2};
using Levels = std::array<int, kNumFactors>;
using Pair = std::tuple<size_t, int, size_t, int>;  // factor, level, later factor, level

// Short shared branches make deep tries, the harder case.
constexpr int64_t kSweepSharedTokens = 4;

// Composed attention holds [heads, T, T] scores: parts stay small enough for it.
constexpr int64_t kComposedTokens = 2048;

CheckSetting make_setting(const Levels& levels, const ArmOptions& base) {
  constexpr std::array kDtypes{at::kFloat, at::kDouble, at::kBFloat16};
  constexpr std::array kSharings{Sharing::kPrompts, Sharing::kPrefixes};
  constexpr std::array kHeads{HeadMode::kMemory, HeadMode::kNone, HeadMode::kCompute};
  constexpr std::array kLayouts{Layout::kRagged, Layout::kLeft, Layout::kRight, Layout::kBoth};
  constexpr std::array<int64_t, 3> kParts{1, 2, 8};
  const auto level = [&levels](size_t factor) { return static_cast<size_t>(levels[factor]); };
  CheckSetting setting{kDtypes[level(0)], base};
  setting.arm.forest.sharing = kSharings[level(1)];
  if (levels[1] == 1) setting.arm.forest.min_shared_tokens = kSweepSharedTokens;
  setting.arm.forward.checkpointing = levels[2] == 1;
  setting.arm.forward.head.mode = kHeads[level(3)];
  setting.arm.layout = kLayouts[level(4)];
  if (levels[5] == 1) setting.arm.permute_seed = 1;
  setting.arm.micro_batches = {0, kParts[level(6)]};
  const bool composed = levels[7] == 1;
  setting.arm.forward.attention = composed ? AttentionPath::kComposed : AttentionPath::kLevels;
  if (composed && kParts[level(6)] == 1) setting.arm.micro_batches = {kComposedTokens, 0};
  return setting;
}

std::set<Pair> all_pairs() {
  std::set<Pair> pairs;
  for (size_t a = 0; a < kNumFactors; ++a)
    for (size_t b = a + 1; b < kNumFactors; ++b)
      for (int x = 0; x < kLevels[a]; ++x)
        for (int y = 0; y < kLevels[b]; ++y) pairs.emplace(a, x, b, y);
  return pairs;
}

void remove_covered(std::set<Pair>& pairs, const Levels& row) {
  for (size_t a = 0; a < kNumFactors; ++a)
    for (size_t b = a + 1; b < kNumFactors; ++b) pairs.erase({a, row[a], b, row[b]});
}

/// Pairs that `level` of `factor` would newly cover together with the factors already fixed.
int64_t gain(const std::set<Pair>& pairs, const Levels& row,
             const std::array<bool, kNumFactors>& fixed, size_t factor, int level) {
  int64_t covered = 0;
  for (size_t other = 0; other < kNumFactors; ++other) {
    if (!fixed[other]) continue;
    const Pair pair = other < factor ? Pair{other, row[other], factor, level}
                                     : Pair{factor, level, other, row[other]};
    covered += static_cast<int64_t>(pairs.count(pair));
  }
  return covered;
}

/// A row around the first uncovered pair; every other factor takes the level that covers most.
Levels greedy_row(const std::set<Pair>& pairs) {
  Levels row{};
  std::array<bool, kNumFactors> fixed{};
  const auto& [a, x, b, y] = *pairs.begin();
  row[a] = x;
  row[b] = y;
  fixed[a] = fixed[b] = true;
  for (size_t factor = 0; factor < kNumFactors; ++factor) {
    if (fixed[factor]) continue;
    int64_t best = -1;
    for (int level = 0; level < kLevels[factor]; ++level) {
      const int64_t covered = gain(pairs, row, fixed, factor, level);
      if (covered <= best) continue;
      best = covered;
      row[factor] = level;
    }
    fixed[factor] = true;
  }
  return row;
}

}  // namespace

std::vector<CheckSetting> sweep_settings(const ArmOptions& base) {
  std::vector<Levels> rows{Levels{}};
  for (size_t factor = 0; factor < kNumFactors; ++factor)
    for (int level = 1; level < kLevels[factor]; ++level) {
      Levels row{};
      row[factor] = level;
      rows.push_back(row);
    }
  std::set<Pair> uncovered = all_pairs();
  for (const Levels& row : rows) remove_covered(uncovered, row);
  while (!uncovered.empty()) {
    rows.push_back(greedy_row(uncovered));
    remove_covered(uncovered, rows.back());
  }
  std::vector<CheckSetting> settings;
  for (const Levels& row : rows) settings.push_back(make_setting(row, base));
  return settings;
}

}  // namespace zorro::app
