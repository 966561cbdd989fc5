#pragma once

#include "options.h"

namespace zorro::app {

// Each adds its subcommand to the parser and, when it is the chosen one, sets what to run.
void add_demo_command(CLI::App& app, Run& run);
void add_check_command(CLI::App& app, Run& run);
void add_logprobs_command(CLI::App& app, Run& run);
void add_train_command(CLI::App& app, Run& run);
void add_plan_command(CLI::App& app, Run& run);
void add_bench_command(CLI::App& app, Run& run);
void add_inspect_command(CLI::App& app, Run& run);

}  // namespace zorro::app
