// Any bytes as a rollout line: a rollout whose arrays fit together, or one of our errors.
#include <cstdint>
#include <string>

#include "io/json_splice.h"
#include "zorro/core/error.h"
#include "zorro/io/rollouts.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string line(reinterpret_cast<const char*>(data), size);
  try {
    const zorro::Rollout rollout = zorro::parse_rollout(line, "fuzz", 1);
    const auto scored = static_cast<size_t>(rollout.num_scored());
    for (const auto* values : {&rollout.advantages, &rollout.old_logprobs, &rollout.ref_logprobs})
      ZORRO_ASSERT(values->empty() || values->size() == scored);
    ZORRO_ASSERT(rollout.loss_mask.size() == scored);
    ZORRO_ASSERT(rollout.scored_begin > 0);
    // What is written for it must be read again, with the added key.
    const std::string written = zorro::splice_json(line, {{"added", "[1]"}});
    ZORRO_ASSERT(zorro::parse_rollout(written, "round trip", 1).token_ids == rollout.token_ids);
  } catch (const zorro::RolloutError&) {
  }
  return 0;
}
