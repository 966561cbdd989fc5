#pragma once

#include <memory>
#include <vector>

#include "zorro/core/random.h"
#include "zorro/io/rollouts.h"
#include "zorro/models/causal_lm.h"

namespace zorro::testing {

/// Two layers, head_dim that is not hidden / heads, weights wide enough that logits are not flat.
inline ModelConfig tiny_config() {
  ModelConfig config;
  config.model_type = "qwen3";
  config.vocab_size = 97;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_layers = 2;
  config.num_query_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.max_positions = 512;
  return config;
}

inline std::unique_ptr<CausalLM> tiny_model(at::ScalarType dtype = at::kDouble) {
  ModelOptions options;
  options.dtype = dtype;
  return CausalLM::random(tiny_config(), 5, 0.25, options);
}

/// Rows of one prompt are not neighbours; one response is empty, advantages and old log-probs on
/// every row.
inline std::vector<Rollout> mixed_rollouts() {
  Random random(3);
  const auto draw = [&random](int64_t count) {
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(random.below(97));
    return tokens;
  };
  const std::vector<std::vector<int64_t>> prompts{draw(9), draw(1), draw(23)};
  std::vector<Rollout> rollouts;
  for (int64_t row = 0; row < 9; ++row) {
    Rollout rollout;
    rollout.token_ids = prompts[static_cast<size_t>(row % 3)];
    rollout.scored_begin = rollout.prompt_length = static_cast<int64_t>(rollout.token_ids.size());
    const std::vector<int64_t> response = draw(row == 4 ? 0 : 1 + random.below(7));
    rollout.token_ids.insert(rollout.token_ids.end(), response.begin(), response.end());
    rollout.advantages.assign(response.size(), random.normal());
    rollout.loss_mask.assign(response.size(), 1);
    for (size_t token = 0; token < response.size(); ++token)
      rollout.old_logprobs.push_back(-4 + 0.1 * random.normal());
    rollout.line = row + 1;
    rollout.id = std::to_string(row + 1);
    rollouts.push_back(rollout);
  }
  return rollouts;
}

}  // namespace zorro::testing
