#include "forest/trie.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "zorro/core/error.h"

namespace zorro {
namespace {

int64_t length_of(const Sample& sample) { return static_cast<int64_t>(sample.token_ids.size()); }

int64_t prompt_length_of(const Sample& sample) {
  return sample.prompt_length < 0 ? sample.scored_begin : sample.prompt_length;
}

uint64_t content_of(const Sample& sample, int64_t i) {
  return sample.content.empty() ? 0 : sample.content[static_cast<size_t>(i)];
}

/// Do two samples agree at token i in everything but the id?
bool same_surroundings(const Sample& a, const Sample& b, int64_t i, int64_t num_axes) {
  for (int64_t axis = 0; axis < num_axes; ++axis)
    if (position_of(a, axis, i) != position_of(b, axis, i)) return false;
  return content_of(a, i) == content_of(b, i);
}

/// Length of the run of equal tokens of a and b from `begin`, at most up to `end`; returns where it
/// stops.
int64_t agree_until(const Sample& a, const Sample& b, int64_t begin, int64_t end,
                    int64_t num_axes) {
  const auto* first = a.token_ids.data();
  const auto* second = b.token_ids.data();
  const int64_t stop = std::mismatch(first + begin, first + end, second + begin).first - first;
  const bool plain =
      a.positions.empty() && b.positions.empty() && a.content.empty() && b.content.empty();
  if (plain) return stop;
  int64_t i = begin;
  while (i < stop && same_surroundings(a, b, i, num_axes)) ++i;
  return i;
}

class TrieBuilder {
 public:
  TrieBuilder(std::span<const Sample> samples, const ForestOptions& options)
      : samples_(samples), options_(options) {
    trie_.sample_run.assign(samples.size(), -1);
  }

  Trie build() && {
    switch (options_.sharing) {
      case Sharing::kNone:
        for (int64_t i = 0; i < num_samples(); ++i) add_own_run(i, 0, -1);
        break;
      case Sharing::kPrompts:
        share_prompts();
        break;
      case Sharing::kPrefixes:
        share_prefixes();
        break;
    }
    return std::move(trie_);
  }

 private:
  /// Samples that agree on tokens [0, compared); a run for them would begin at run_begin below
  /// `parent`.
  struct Task {
    std::vector<int64_t> members;
    int64_t run_begin, compared, parent, level;
  };

  int64_t num_samples() const { return static_cast<int64_t>(samples_.size()); }
  const Sample& sample(int64_t i) const { return samples_[static_cast<size_t>(i)]; }

  int64_t add_run(int64_t first, int64_t begin, int64_t end, int64_t parent, int64_t count) {
    trie_.runs.push_back({first, begin, end, parent, count});
    return static_cast<int64_t>(trie_.runs.size()) - 1;
  }

  /// The rest of a sample from `begin` as a run that nobody shares.
  void add_own_run(int64_t i, int64_t begin, int64_t parent) {
    const int64_t end = length_of(sample(i));
    trie_.sample_run[static_cast<size_t>(i)] =
        begin < end ? add_run(i, begin, end, parent, 1) : parent;
  }

  bool same_prompt(int64_t i, int64_t j) const {
    const int64_t length = prompt_length_of(sample(i));
    return length == prompt_length_of(sample(j)) &&
           agree_until(sample(i), sample(j), 0, length, options_.num_axes) == length;
  }

  void share_prompts() {
    std::vector<std::vector<int64_t>> groups;  // sample indices, groups in first-seen order
    std::unordered_map<uint64_t, std::vector<size_t>> groups_by_hash;
    for (int64_t i = 0; i < num_samples(); ++i) {
      const auto length = static_cast<size_t>(prompt_length_of(sample(i)));
      const uint64_t hash = XXH3_64bits(sample(i).token_ids.data(), length * sizeof(int64_t));
      std::vector<size_t>& candidates = groups_by_hash[hash];
      const auto found = std::find_if(candidates.begin(), candidates.end(), [&](size_t group) {
        return same_prompt(groups[group].front(), i);
      });
      if (found != candidates.end()) {
        groups[*found].push_back(i);
      } else {
        candidates.push_back(groups.size());
        groups.push_back({i});
      }
    }
    for (const std::vector<int64_t>& group : groups) {
      const int64_t prompt_length = prompt_length_of(sample(group.front()));
      const bool shared = group.size() > 1 && prompt_length > 0;
      const int64_t prompt =
          shared ? add_run(group.front(), 0, prompt_length, -1, static_cast<int64_t>(group.size()))
                 : -1;
      for (const int64_t i : group) add_own_run(i, shared ? prompt_length : 0, prompt);
    }
  }

  void share_prefixes() {
    std::vector<int64_t> all;
    for (int64_t i = 0; i < num_samples(); ++i)
      if (length_of(sample(i)) > 0) all.push_back(i);
    std::vector<Task> tasks;
    split(all, 0, 0, -1, 1, tasks);
    while (!tasks.empty()) {
      const Task task = std::move(tasks.back());
      tasks.pop_back();
      grow(task, tasks);
    }
  }

  /// Sorts members (none of which ends at `compared`) by their token there and makes a task of each
  /// class.
  void split(const std::vector<int64_t>& members, int64_t run_begin, int64_t compared,
             int64_t parent, int64_t level, std::vector<Task>& tasks) {
    std::unordered_map<int64_t, std::vector<size_t>> classes_by_token;
    std::vector<std::vector<int64_t>> classes;
    for (const int64_t i : members) {
      std::vector<size_t>& candidates =
          classes_by_token[sample(i).token_ids[static_cast<size_t>(compared)]];
      const auto found = std::find_if(candidates.begin(), candidates.end(), [&](size_t c) {
        return same_surroundings(sample(classes[c].front()), sample(i), compared,
                                 options_.num_axes);
      });
      if (found != candidates.end()) {
        classes[*found].push_back(i);
      } else {
        candidates.push_back(classes.size());
        classes.push_back({i});
      }
    }
    for (std::vector<int64_t>& members_of_class : classes)
      tasks.push_back({std::move(members_of_class), run_begin, compared, parent, level});
  }

  void grow(const Task& task, std::vector<Task>& tasks) {
    const std::vector<int64_t>& members = task.members;
    if (members.size() == 1 || task.level >= options_.max_levels) {
      for (const int64_t i : members) add_own_run(i, task.run_begin, task.parent);
      return;
    }
    const Sample& first = sample(members.front());
    int64_t stop = length_of(first);
    for (const int64_t i : members)
      stop = agree_until(first, sample(i), task.compared, std::min(stop, length_of(sample(i))),
                         options_.num_axes);

    const bool shared = stop - task.run_begin >= options_.min_shared_tokens;
    const int64_t run = shared ? add_run(members.front(), task.run_begin, stop, task.parent,
                                         static_cast<int64_t>(members.size()))
                               : -1;
    std::vector<int64_t> longer;
    for (const int64_t i : members) {
      if (length_of(sample(i)) > stop) {
        longer.push_back(i);
      } else if (shared) {
        trie_.sample_run[static_cast<size_t>(i)] = run;
      } else {
        add_own_run(i, task.run_begin, task.parent);
      }
    }
    if (shared) {
      split(longer, stop, stop, run, task.level + 1, tasks);
    } else {
      split(longer, task.run_begin, stop, task.parent, task.level, tasks);
    }
  }

  std::span<const Sample> samples_;
  const ForestOptions& options_;
  Trie trie_;
};

}  // namespace

Trie build_trie(std::span<const Sample> samples, const ForestOptions& options) {
  return TrieBuilder(samples, options).build();
}

}  // namespace zorro
