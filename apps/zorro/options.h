#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zorro/forest/prefix_forest.h"
#include "zorro/io/rollouts.h"
#include "zorro/models/causal_lm.h"

namespace zorro::app {

/// What a chosen subcommand does after parsing; returns the exit code.
using Run = std::function<int()>;

/// Flags that several subcommands share. A subcommand adds only those that it honours.
struct CommonOptions {
  std::string model, rollouts;
  std::string dtype = "float32", sharing = "prompts", attention = "fused", head = "memory";
  int64_t threads = 0;  ///< 0: the physical cores that this process may use
  int64_t max_tokens = 8192, min_shared_tokens = 64;
  uint64_t seed = 0;
  double temperature = 1;
  bool checkpointing = false, skip_bad = false, json = false, quiet = false, force = false;

  at::ScalarType scalar_type() const;
  ForestOptions forest() const;
  ForwardOptions forward() const;
  /// The attention path that will run, for people.
  std::string attention_text() const;
  std::vector<Rollout> read() const;
};

void add_model_option(CLI::App& command, CommonOptions& options, bool required);
void add_rollouts_option(CLI::App& command, CommonOptions& options);
/// --dtype, and all of add_engine_options.
void add_run_options(CLI::App& command, CommonOptions& options);
/// --threads --attention --head --checkpointing
void add_engine_options(CLI::App& command, CommonOptions& options);
/// --sharing --min-shared-tokens --max-tokens
void add_packing_options(CLI::App& command, CommonOptions& options);
void add_temperature_option(CLI::App& command, CommonOptions& options);
void add_seed_option(CLI::App& command, CommonOptions& options);
/// --json --quiet
void add_output_options(CLI::App& command, CommonOptions& options);
void add_force_option(CLI::App& command, CommonOptions& options);

/// Accepts numbers > 0 only; NaN is none.
CLI::Validator above_zero();
/// Accepts numbers >= 0 only; NaN is none.
CLI::Validator not_negative();

at::ScalarType parse_dtype(const std::string& name);
Sharing parse_sharing(const std::string& name);
HeadMode parse_head(const std::string& name);
AttentionPath parse_attention(const std::string& name);

/// Sets ATen's thread count from --threads, else to the physical cores that this process may use.
void apply_threads(const CommonOptions& options);

/// Loads --model; a warning of the loader goes to stderr.
std::unique_ptr<CausalLM> load_model(const CommonOptions& options, at::ScalarType dtype);

}  // namespace zorro::app
