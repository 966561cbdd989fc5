#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "zorro/io/rollouts.h"
#include "zorro/models/causal_lm.h"
#include "zorro/plan/cost.h"
#include "zorro/plan/micro_batches.h"
#include "zorro/train/adamw.h"
#include "zorro/train/score.h"

namespace zorro {

/// Reads of a memory counter that the caller has installed; empty functions: no memory figures.
struct MemoryProbe {
  std::function<int64_t()> live;  ///< bytes of tensors alive now
  std::function<int64_t()> peak;  ///< most bytes alive since the last reset
  std::function<void()> reset;    ///< starts a new peak
};

struct RaceOptions {
  ForwardOptions forward;
  ForestOptions forest;                      ///< of the dedup arm; the naive arm shares nothing
  MicroBatchOptions micro_batches{8192, 0};  ///< the same cap for both arms
  AdamWOptions optimizer;                    ///< timed apart from forward and backward
  double temperature = 1.0;
  int64_t warm_up = 1;    ///< pairs that are not counted, >= 0
  int64_t num_pairs = 3;  ///< interleaved pairs dedup, naive; medians are taken, >= 1
  MemoryProbe memory;
};

/// Seconds of an update's phases.
struct PhaseSeconds {
  double group = 0;    ///< planning and building the forests on the host
  double forward = 0;  ///< hidden states, head and loss
  double backward = 0;
  double optimizer = 0;
  double update() const { return forward + backward; }
};

/// One arm of a race.
struct ArmResult {
  std::vector<PhaseSeconds> runs;  ///< one a counted pair
  ForestWork work;                 ///< summed over micro-batches
  PartCost flops;                  ///< useful FLOPs of one forward and backward
  int64_t num_micro_batches = 0;
  int64_t peak_bytes = 0;  ///< above what lived before the update
  int64_t layer_bytes =
      0;  ///< alive after the layers' forward, kept for backward; sum of micro-batches
  int64_t head_bytes = 0;  ///< alive after head and loss beside these; sum of micro-batches

  /// The median of every phase.
  PhaseSeconds median() const;
};

struct RaceResult {
  ArmResult dedup, naive;
  double bound = 1;        ///< S: useful FLOPs of the naive arm over those of the dedup arm
  double token_ratio = 1;  ///< rho
  /// Median over the pairs of naive over dedup time of forward and backward.
  double speedup = 1;
  double slowest_speedup = 1, fastest_speedup = 1;
};

/// Times forward and backward of one update in two arms, dedup and naive, in turn: A B A B. Both
/// run the same kernels with the same options, the head on predictor rows only. The weights are
/// left as they were; gradients are dropped.
///
/// Throws  InvalidArgument: num_pairs < 1, over the cap, token id outside the vocabulary.
RaceResult race(CausalLM& model, std::span<const Rollout> rollouts, const RaceOptions& options,
                const TokenProgress& progress = {});

/// Operators with the shapes of their tensor arguments -> how often forward and backward of one
/// update call them. Equal maps: equal work.
std::map<std::string, int64_t> count_operators(CausalLM& model, std::span<const Rollout> rollouts,
                                               const RaceOptions& options);

/// Random rollouts: num_prompts prompts of prompt_length tokens with num_samples responses each of
/// response_length tokens; advantages N(0, 1). Same seed, same rollouts.
struct RolloutShape {
  int64_t num_prompts = 1, num_samples = 8, prompt_length = 1024, response_length = 128;
};
std::vector<Rollout> random_rollouts(const RolloutShape& shape, int64_t vocab_size, uint64_t seed);

/// FLOPs a second of at::mm on float32 (float64, bfloat16) matrices 2048 x 1024 x 1024, best of
/// several.
double measure_mm_rate(at::ScalarType dtype);

/// Attention of the naive batch, forward and backward of one layer, beside one plain call.
struct AttentionTimes {
  double arm = 0;  ///< forest_attention on num_samples sequences that share nothing
  double plain =
      0;  ///< one call of ATen's flash attention on [num_samples, heads, length, head_dim]
};
AttentionTimes measure_naive_attention(const ModelConfig& config, int64_t num_samples,
                                       int64_t length, at::ScalarType dtype, AttentionPath path);

}  // namespace zorro
