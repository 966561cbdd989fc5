#include "zorro/plan/micro_batches.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "zorro/core/error.h"

namespace zorro {
namespace {

using Members = std::vector<int64_t>;

/// Samples that stay together: a group, or a piece of one that had to be cut.
struct Item {
  Members members;
  int64_t tokens;
};

const PlanSample& at(std::span<const PlanSample> samples, int64_t index) {
  return samples[static_cast<size_t>(index)];
}

std::vector<Members> groups_of(std::span<const PlanSample> samples) {
  std::vector<Members> groups;
  std::unordered_map<int64_t, size_t> index;
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto [entry, is_first] = index.try_emplace(samples[i].group, groups.size());
    if (is_first) groups.emplace_back();
    groups[entry->second].push_back(static_cast<int64_t>(i));
  }
  return groups;
}

void check(std::span<const PlanSample> samples, const MicroBatchOptions& options) {
  ZORRO_CHECK(options.max_tokens >= 0, "[plan] max_tokens must not be negative, got ",
              options.max_tokens, ".");
  ZORRO_CHECK(options.num_parts >= 0, "[plan] num_parts must not be negative, got ",
              options.num_parts, ".");
  for (size_t i = 0; i < samples.size(); ++i) {
    const PlanSample& sample = samples[i];
    ZORRO_CHECK(sample.prompt_length >= 0 && sample.response_length >= 0, "[plan] samples[", i,
                "] lengths must not be negative, got ", sample.prompt_length, " and ",
                sample.response_length, ".");
    const int64_t tokens = sample.prompt_length + sample.response_length;
    ZORRO_CHECK(options.max_tokens == 0 || tokens <= options.max_tokens, "[plan] samples[", i,
                "] must fit the cap of ", options.max_tokens, " tokens, got ", tokens,
                ". Raise max_tokens or shorten the sample.");
  }
}

/// Packs response lengths into bins of `room` tokens; first fit over samples in the order given.
std::vector<Members> first_fit(std::span<const PlanSample> samples, const Members& order,
                               int64_t room) {
  std::vector<Members> bins;
  std::vector<int64_t> used;
  for (const int64_t i : order) {
    const int64_t size = at(samples, i).response_length;
    size_t bin = 0;
    while (bin < bins.size() && used[bin] + size > room) ++bin;
    if (bin == bins.size()) {
      bins.emplace_back();
      used.push_back(0);
    }
    bins[bin].push_back(i);
    used[bin] += size;
  }
  return bins;
}

/// Cuts a group that exceeds the cap: the better of first fit in order and in order of falling
/// length.
std::vector<Members> cut_group(std::span<const PlanSample> samples, const Members& group,
                               int64_t max_tokens) {
  const int64_t room = max_tokens - at(samples, group.front()).prompt_length;
  std::vector<Members> in_order = first_fit(samples, group, room);
  Members falling = group;
  std::stable_sort(falling.begin(), falling.end(), [&](int64_t a, int64_t b) {
    return at(samples, a).response_length > at(samples, b).response_length;
  });
  std::vector<Members> by_length = first_fit(samples, falling, room);
  std::vector<Members>& best = by_length.size() < in_order.size() ? by_length : in_order;
  for (Members& members : best) std::sort(members.begin(), members.end());
  return std::move(best);
}

std::vector<Item> items_of(std::span<const PlanSample> samples, int64_t max_tokens) {
  std::vector<Item> items;
  for (const Members& group : groups_of(samples)) {
    const int64_t tokens = packed_tokens(samples, group);
    if (max_tokens == 0 || tokens <= max_tokens) {
      items.push_back({group, tokens});
      continue;
    }
    for (Members& part : cut_group(samples, group, max_tokens)) {
      const int64_t part_tokens = packed_tokens(samples, part);
      items.push_back({std::move(part), part_tokens});
    }
  }
  return items;
}

void append(Members& to, const Members& from) { to.insert(to.end(), from.begin(), from.end()); }

std::vector<Members> fewest_parts(const std::vector<Item>& items, int64_t max_tokens) {
  std::vector<Members> parts;
  std::vector<int64_t> used;
  for (const Item& item : items) {
    size_t part = 0;
    while (part < parts.size() && max_tokens > 0 && used[part] + item.tokens > max_tokens) ++part;
    if (part == parts.size()) {
      parts.emplace_back();
      used.push_back(0);
    }
    append(parts[part], item.members);
    used[part] += item.tokens;
  }
  return parts;
}

/// Halves the item with the most samples until there are `count` of them or none can be cut.
void cut_until(std::span<const PlanSample> samples, std::vector<Item>& items, size_t count) {
  while (items.size() < count) {
    const auto largest = std::max_element(
        items.begin(), items.end(),
        [](const Item& a, const Item& b) { return a.members.size() < b.members.size(); });
    if (largest == items.end() || largest->members.size() < 2) return;
    const auto half =
        largest->members.begin() + static_cast<std::ptrdiff_t>(largest->members.size() / 2);
    Members second(half, largest->members.end());
    largest->members.erase(half, largest->members.end());
    largest->tokens = packed_tokens(samples, largest->members);
    const int64_t tokens = packed_tokens(samples, second);
    items.push_back({std::move(second), tokens});
  }
}

/// Longest item first, each to the lightest part; empty when that exceeds the cap.
std::vector<Members> balanced_parts(std::vector<Item> items, const MicroBatchOptions& options) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.tokens > b.tokens; });
  std::vector<Members> parts(static_cast<size_t>(options.num_parts));
  std::vector<int64_t> used(parts.size(), 0);
  for (const Item& item : items) {
    const auto part =
        static_cast<size_t>(std::min_element(used.begin(), used.end()) - used.begin());
    append(parts[part], item.members);
    used[part] += item.tokens;
    if (options.max_tokens > 0 && used[part] > options.max_tokens) return {};
  }
  return parts;
}

std::vector<Members> exact_parts(std::span<const PlanSample> samples, std::vector<Item> items,
                                 const MicroBatchOptions& options) {
  cut_until(samples, items, static_cast<size_t>(options.num_parts));
  std::vector<Members> parts = balanced_parts(items, options);
  if (!parts.empty()) return parts;
  parts = fewest_parts(items, options.max_tokens);
  ZORRO_CHECK(parts.size() <= static_cast<size_t>(options.num_parts),
              "[plan] num_parts must leave every part within ", options.max_tokens, " tokens, got ",
              options.num_parts, " where ", parts.size(),
              " are needed. Ask for more parts or raise max_tokens.");
  parts.resize(static_cast<size_t>(options.num_parts));
  return parts;
}

}  // namespace

int64_t packed_tokens(std::span<const PlanSample> samples, std::span<const int64_t> members) {
  int64_t tokens = 0;
  std::unordered_map<int64_t, bool> seen;
  for (const int64_t i : members) {
    const PlanSample& sample = at(samples, i);
    tokens += sample.response_length;
    if (seen.try_emplace(sample.group, true).second) tokens += sample.prompt_length;
  }
  return tokens;
}

std::vector<std::vector<int64_t>> plan_micro_batches(std::span<const PlanSample> samples,
                                                     const MicroBatchOptions& options) {
  check(samples, options);
  std::vector<Item> items = items_of(samples, options.max_tokens);
  std::vector<Members> parts = options.num_parts > 0
                                   ? exact_parts(samples, std::move(items), options)
                                   : fewest_parts(items, options.max_tokens);
  for (Members& part : parts) std::sort(part.begin(), part.end());
  return parts;
}

}  // namespace zorro
