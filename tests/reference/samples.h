#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "zorro/core/random.h"
#include "zorro/forest/prefix_forest.h"

namespace zorro::reference {

/// Samples with their own memory.
struct OwnedSamples {
  std::vector<std::vector<int64_t>> tokens;
  std::vector<int64_t> scored_begin;

  void add(std::vector<int64_t> token_ids, int64_t first_scored) {
    tokens.push_back(std::move(token_ids));
    scored_begin.push_back(first_scored);
  }

  std::vector<Sample> views() const {
    std::vector<Sample> samples(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      samples[i].token_ids = tokens[i];
      samples[i].scored_begin = scored_begin[i];
    }
    return samples;
  }

  PrefixForest forest(Sharing sharing, int64_t min_shared_tokens = 1) const {
    ForestOptions options;
    options.sharing = sharing;
    options.min_shared_tokens = min_shared_tokens;
    return PrefixForest::build(views(), options);
  }
};

inline std::vector<int64_t> random_tokens(Random& random, int64_t length, int64_t vocabulary) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back(random.below(vocabulary));
  return tokens;
}

inline std::vector<int64_t> joined(std::vector<int64_t> first, const std::vector<int64_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// One prompt, `count` responses.
inline OwnedSamples star(Random& random, int64_t prompt, int64_t response, int64_t count,
                         int64_t vocabulary) {
  OwnedSamples samples;
  const std::vector<int64_t> shared = random_tokens(random, prompt, vocabulary);
  for (int64_t i = 0; i < count; ++i)
    samples.add(joined(shared, random_tokens(random, response, vocabulary)), prompt);
  return samples;
}

/// Samples that begin like earlier ones, end inside them, repeat them, or have nothing in common:
/// every shape a trie can take, with nodes from one token on.
inline OwnedSamples random_samples(Random& random, int64_t count, int64_t longest,
                                   int64_t vocabulary) {
  OwnedSamples samples;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int64_t> tokens;
    if (i > 0 && random.below(4) > 0) {
      tokens = samples.tokens[static_cast<size_t>(random.below(i))];
      tokens.resize(static_cast<size_t>(random.below(static_cast<int64_t>(tokens.size()) + 1)));
    }
    tokens =
        joined(std::move(tokens), random_tokens(random, random.below(longest + 1), vocabulary));
    const auto length = static_cast<int64_t>(tokens.size());
    samples.add(std::move(tokens), length == 0 ? 0 : 1 + random.below(length));
  }
  return samples;
}

/// Batch BA: eight rows, prompts A B A C B A A C of 9, 3 and 12 tokens, responses of 1 to 7.
inline OwnedSamples batch_ba(Random& random, int64_t vocabulary) {
  const std::vector<std::vector<int64_t>> prompts = {random_tokens(random, 9, vocabulary),
                                                     random_tokens(random, 3, vocabulary),
                                                     random_tokens(random, 12, vocabulary)};
  const size_t prompt_of_row[] = {0, 1, 0, 2, 1, 0, 0, 2};
  const int64_t response_lengths[] = {5, 1, 7, 2, 4, 7, 3, 6};
  OwnedSamples samples;
  for (size_t row = 0; row < 8; ++row) {
    const std::vector<int64_t>& prompt = prompts[prompt_of_row[row]];
    samples.add(joined(prompt, random_tokens(random, response_lengths[row], vocabulary)),
                static_cast<int64_t>(prompt.size()));
  }
  return samples;
}

}  // namespace zorro::reference
