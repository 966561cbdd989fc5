#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zorro {

/// One sample as the planner sees it.
struct PlanSample {
  int64_t group = 0;            ///< samples with equal numbers share their prompt
  int64_t prompt_length = 0;    ///< tokens shared inside the group
  int64_t response_length = 0;  ///< tokens of its own
};

struct MicroBatchOptions {
  /// Hard cap on the packed tokens of a micro-batch; 0: none.
  int64_t max_tokens = 0;
  /// Exactly this many parts (some may be empty when there are fewer samples); 0: as few as the cap
  /// allows.
  int64_t num_parts = 0;
};

/// Cuts samples into micro-batches: whole groups stay together, first fit in the caller's order; a
/// group that alone exceeds the cap is cut into the fewest parts. With num_parts, groups are cut
/// only if there are fewer groups than parts.
///
/// Returns indices into `samples`, ascending inside a micro-batch; every sample exactly once.
/// Throws  InvalidArgument naming the sample that alone exceeds the cap.
std::vector<std::vector<int64_t>> plan_micro_batches(std::span<const PlanSample> samples,
                                                     const MicroBatchOptions& options);

/// Packed tokens of a set of samples: each group's prompt once and every response.
int64_t packed_tokens(std::span<const PlanSample> samples, std::span<const int64_t> members);

}  // namespace zorro
