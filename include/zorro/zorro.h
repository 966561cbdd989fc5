#pragma once

// Everything a program needs to score rollouts and update a policy.

#include "zorro/core/error.h"
#include "zorro/core/version.h"
#include "zorro/forest/prefix_forest.h"
#include "zorro/io/rollouts.h"
#include "zorro/models/causal_lm.h"
#include "zorro/plan/cost.h"
#include "zorro/plan/micro_batches.h"
#include "zorro/train/adamw.h"
#include "zorro/train/policy_loss.h"
#include "zorro/train/policy_update.h"
