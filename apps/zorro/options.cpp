#include "options.h"

#include <ATen/Parallel.h>
#include <sched.h>

#include <fstream>
#include <iostream>
#include <map>
#include <set>

#include "zorro/core/error.h"

namespace zorro::app {
namespace {

template <typename Value>
Value parse_name(const std::map<std::string, Value>& names, const std::string& name) {
  const auto found = names.find(name);
  ZORRO_ASSERT(found != names.end());  // the parser has checked it
  return found->second;
}

const std::map<std::string, at::ScalarType> kDtypes{
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}};
const std::map<std::string, Sharing> kSharings{
    {"none", Sharing::kNone}, {"prompts", Sharing::kPrompts}, {"prefixes", Sharing::kPrefixes}};
const std::map<std::string, HeadMode> kHeads{
    {"none", HeadMode::kNone}, {"compute", HeadMode::kCompute}, {"memory", HeadMode::kMemory}};
const std::map<std::string, AttentionPath> kPaths{{"composed", AttentionPath::kComposed},
                                                  {"levels", AttentionPath::kLevels},
                                                  {"fused", AttentionPath::kFused}};

template <typename Value>
CLI::IsMember one_of(const std::map<std::string, Value>& names) {
  std::vector<std::string> keys;
  for (const auto& [name, value] : names) keys.push_back(name);
  return CLI::IsMember(keys);
}

/// Cores of this process's CPUs: hardware threads of one core count once.
int64_t physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    std::string siblings;
    if (!std::getline(file, siblings)) siblings = std::to_string(cpu);
    cores.insert(siblings);
  }
  return std::max<int64_t>(1, static_cast<int64_t>(cores.size()));
}

CLI::Validator number_rule(const std::string& rule, bool (*accepts)(double)) {
  return CLI::Validator(
      [rule, accepts](std::string& text) {
        double value = 0;
        if (CLI::detail::lexical_cast(text, value) && accepts(value)) return std::string();
        return "must be a number " + rule + ", got " + text;
      },
      rule);
}

}  // namespace

CLI::Validator above_zero() {
  return number_rule("> 0", [](double value) { return value > 0 && value <= 1e300; });
}

CLI::Validator not_negative() {
  return number_rule(">= 0", [](double value) { return value >= 0 && value <= 1e300; });
}

at::ScalarType parse_dtype(const std::string& name) { return parse_name(kDtypes, name); }
Sharing parse_sharing(const std::string& name) { return parse_name(kSharings, name); }
HeadMode parse_head(const std::string& name) { return parse_name(kHeads, name); }
AttentionPath parse_attention(const std::string& name) { return parse_name(kPaths, name); }

at::ScalarType CommonOptions::scalar_type() const { return parse_dtype(dtype); }

ForestOptions CommonOptions::forest() const {
  ForestOptions options;
  options.sharing = parse_sharing(sharing);
  options.min_shared_tokens = min_shared_tokens;
  return options;
}

ForwardOptions CommonOptions::forward() const {
  ForwardOptions options;
  options.attention = parse_attention(attention);
  options.checkpointing = checkpointing;
  options.head.mode = parse_head(head);
  return options;
}

std::string CommonOptions::attention_text() const {
  const AttentionPath path =
      resolve_attention_path(parse_attention(attention), scalar_type(), at::kCPU);
  for (const auto& [name, value] : kPaths)
    if (value == path) return name;
  return attention;
}

std::vector<Rollout> CommonOptions::read() const {
  RolloutReadOptions options;
  options.skip_bad = skip_bad;
  RolloutReader reader(rollouts, options);
  std::vector<Rollout> lines;
  while (std::optional<Rollout> line = reader.next()) lines.push_back(std::move(*line));
  if (reader.num_skipped() > 0)
    std::cerr << "zorro: skipped " << reader.num_skipped() << " bad lines of " << rollouts << "\n";
  return lines;
}

void add_model_option(CLI::App& command, CommonOptions& options, bool required) {
  command.add_option("--model", options.model, "Hugging Face folder")->required(required);
}

void add_rollouts_option(CLI::App& command, CommonOptions& options) {
  command
      .add_option("--rollouts", options.rollouts, "JSON lines, one sample a line (.gz by suffix)")
      ->required();
  command.add_flag("--skip-bad", options.skip_bad, "Skip and count bad lines");
}

void add_run_options(CLI::App& command, CommonOptions& options) {
  command.add_option("--dtype", options.dtype, "Type of weights and activations")
      ->check(one_of(kDtypes))
      ->capture_default_str();
  add_engine_options(command, options);
}

void add_engine_options(CLI::App& command, CommonOptions& options) {
  command.add_option("--threads", options.threads, "Threads [the physical cores allowed]")
      ->check(CLI::Range(1, 4096));
  command.add_option("--attention", options.attention, "fused: the best there is for the dtype")
      ->check(one_of(kPaths))
      ->capture_default_str();
  command.add_option("--head", options.head, "How the output head is computed")
      ->check(one_of(kHeads))
      ->capture_default_str();
  command.add_flag("--checkpointing", options.checkpointing,
                   "Keep only each layer's input for backward");
}

void add_packing_options(CLI::App& command, CommonOptions& options) {
  command.add_option("--sharing", options.sharing, "Which tokens are computed once")
      ->check(one_of(kSharings))
      ->capture_default_str();
  command
      .add_option("--min-shared-tokens", options.min_shared_tokens,
                  "With --sharing prefixes: shortest branch that is shared")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      .add_option("--max-tokens", options.max_tokens, "Hard cap on a micro-batch's packed tokens")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

void add_temperature_option(CLI::App& command, CommonOptions& options) {
  command
      .add_option("--temperature", options.temperature,
                  "Divides the logits; a line's own value wins")
      ->check(above_zero())
      ->capture_default_str();
}

void add_seed_option(CLI::App& command, CommonOptions& options) {
  command.add_option("--seed", options.seed, "Seed of everything random")->capture_default_str();
}

void add_output_options(CLI::App& command, CommonOptions& options) {
  command.add_flag("--json", options.json, "Print one JSON object on stdout");
  command.add_flag("--quiet", options.quiet, "No progress on stderr");
}

void add_force_option(CLI::App& command, CommonOptions& options) {
  command.add_flag("--force", options.force, "Replace output that exists");
}

void apply_threads(const CommonOptions& options) {
  at::set_num_threads(static_cast<int>(options.threads > 0 ? options.threads : physical_cores()));
}

std::unique_ptr<CausalLM> load_model(const CommonOptions& options, at::ScalarType dtype) {
  ModelOptions model_options;
  model_options.dtype = dtype;
  std::unique_ptr<CausalLM> model = CausalLM::load(options.model, model_options);
  if (!model->warning().empty() && !options.quiet)
    std::cerr << "zorro: warning: " << model->warning() << "\n";
  return model;
}

}  // namespace zorro::app
