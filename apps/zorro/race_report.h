#pragma once

#include "report.h"
#include "zorro/train/arms.h"

namespace zorro::app {

/// Both arms as the bench command's JSON: speedup, bound, achieved_over_bound, rho, times, bytes
/// and FLOP rates. mm_rate is the machine's own matrix rate of the same run.
Json race_json(const RaceResult& result, double mm_rate);

/// The same for people.
void print_race(const Json& race);

}  // namespace zorro::app
