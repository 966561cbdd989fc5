#pragma once

#include "zorro/io/model_config.h"
#include "zorro/plan/cost.h"

namespace zorro {

/// FLOPs of a model by its config, any family. A sparse layer counts the chosen experts, a gated
/// delta net the three products of its recurrence with the state, without the chunks' overhead.
ModelCost model_cost(const ModelConfig& config);

}  // namespace zorro
