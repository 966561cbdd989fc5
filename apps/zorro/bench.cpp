#include <ATen/Parallel.h>

#include <algorithm>
#include <iostream>

#include "commands.h"
#include "memory.h"
#include "progress_line.h"
#include "race_report.h"
#include "zorro/core/version.h"
#include "zorro/train/arms.h"

namespace zorro::app {
namespace {

// A difference of a few percent is only seen over many interleaved pairs.
constexpr int64_t kPairsWhenNothingIsShared = 9;

struct BenchOptions {
  CommonOptions common;
  RolloutShape shape;
  int64_t pairs = 0, warm_up = 1;

  bool shares_nothing() const { return shape.num_samples == 1 || common.sharing == "none"; }
};

ModelConfig default_config() {
  ModelConfig config;
  config.model_type = "qwen3";
  config.vocab_size = 8192;
  config.hidden_size = 512;
  config.intermediate_size = 1536;
  config.num_layers = 8;
  config.num_query_heads = 8;
  config.num_kv_heads = 4;
  config.head_dim = 64;
  config.max_positions = int64_t{1} << 20;
  return config;
}

std::unique_ptr<CausalLM> make_model(const BenchOptions& options) {
  const at::ScalarType dtype = options.common.scalar_type();
  if (!options.common.model.empty()) return load_model(options.common, dtype);
  ModelOptions model_options;
  model_options.dtype = dtype;
  return CausalLM::random(default_config(), options.common.seed, 0.02, model_options);
}

RaceOptions race_options(const BenchOptions& options) {
  RaceOptions race;
  race.forward = options.common.forward();
  race.forest = options.common.forest();
  race.micro_batches = {options.common.max_tokens, 0};
  race.warm_up = options.warm_up;
  race.num_pairs = options.pairs;
  if (race.num_pairs == 0)
    race.num_pairs = options.shares_nothing() ? kPairsWhenNothingIsShared : 3;
  race.memory = tensor_memory();
  return race;
}

/// Both arms' operator calls when nothing is shared: they must be the same.
Json compare_operators(CausalLM& model, const std::vector<Rollout>& rollouts,
                       const RaceOptions& options) {
  RaceOptions naive = options;
  naive.forest.sharing = Sharing::kNone;
  const auto dedup_counts = count_operators(model, rollouts, options);
  const auto naive_counts = count_operators(model, rollouts, naive);
  int64_t calls = 0;
  for (const auto& [name, count] : dedup_counts) calls += count;
  return {{"calls", calls}, {"identical", dedup_counts == naive_counts}};
}

Json settings_json(const BenchOptions& options) {
  const RolloutShape& shape = options.shape;
  return {{"version", version()},
          {"prompt", shape.prompt_length},
          {"response", shape.response_length},
          {"rollouts_per_prompt", shape.num_samples},
          {"prompts", shape.num_prompts},
          {"model", options.common.model.empty() ? "random" : options.common.model},
          {"dtype", options.common.dtype},
          {"threads", at::get_num_threads()},
          {"sharing", options.common.sharing},
          {"attention", options.common.attention_text()},
          {"head", options.common.head},
          {"checkpointing", options.common.checkpointing},
          {"max_tokens", options.common.max_tokens},
          {"seed", options.common.seed},
          {"malloc", "mmap_threshold 1 GiB, trim never, top_pad 64 MiB; both arms"}};
}

void print_bench(const Json& json) {
  const Json& settings = json["settings"];
  std::cout << "P " << settings["prompt"] << ", R " << settings["response"] << ", n "
            << settings["rollouts_per_prompt"] << ", prompts " << settings["prompts"] << "; "
            << settings["dtype"].get<std::string>() << ", " << settings["threads"]
            << " threads, attention " << settings["attention"].get<std::string>() << ", head "
            << settings["head"].get<std::string>() << "\n";
  print_race(json);
  const Json& attention = json["attention"];
  std::cout << "naive attention, one layer: " << seconds_text(attention["arm_seconds"]) << ", "
            << number_text("%.3f", attention["ratio"]) << " of one plain flash call ("
            << seconds_text(attention["plain_seconds"]) << ")\n";
  if (json.contains("operators"))
    std::cout << "nothing shared: " << json["operators"]["calls"] << " operator calls, "
              << (json["operators"]["identical"].get<bool>() ? "the same in both arms"
                                                             : "DIFFERENT in the arms")
              << "\n";
}

int run_bench(const BenchOptions& options) {
  apply_threads(options.common);
  const RaceOptions race_settings = race_options(options);  // counts tensors from here on
  const std::unique_ptr<CausalLM> model = make_model(options);
  const std::vector<Rollout> rollouts =
      random_rollouts(options.shape, model->config().vocab_size, options.common.seed);
  const double mm_before = measure_mm_rate(options.common.scalar_type());
  ProgressLine line(options.common.quiet, "bench", "arms");
  const RaceResult result = race(*model, rollouts, race_settings,
                                 [&line](int64_t done, int64_t all) { line.update(done, all); });
  const double mm_after =
      measure_mm_rate(options.common.scalar_type());  // a neighbour may slow one
  Json json = race_json(result, std::max(mm_before, mm_after));
  json["settings"] = settings_json(options);
  const AttentionTimes attention =
      measure_naive_attention(model->config(), options.shape.num_samples,
                              options.shape.prompt_length + options.shape.response_length,
                              options.common.scalar_type(), race_settings.forward.attention);
  json["attention"] = {{"arm_seconds", attention.arm},
                       {"plain_seconds", attention.plain},
                       {"ratio", attention.arm / attention.plain}};
  bool as_expected = true;
  if (options.shares_nothing()) {
    json["operators"] = compare_operators(*model, rollouts, race_settings);
    as_expected = json["operators"]["identical"].get<bool>();
  }
  if (options.common.json)
    print_json(json);
  else
    print_bench(json);
  return as_expected ? 0 : 1;
}

}  // namespace

void add_bench_command(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "bench", "Time forward and backward of dedup and naive batch in turn, on random rollouts");
  auto options = std::make_shared<BenchOptions>();
  const auto add_size = [command](const char* flag, int64_t& value, const char* text) {
    command->add_option(flag, value, text)->check(CLI::PositiveNumber)->capture_default_str();
  };
  add_size("--prompt", options->shape.prompt_length, "Tokens of a prompt");
  add_size("--response", options->shape.response_length, "Tokens of a response");
  add_size("--rollouts-per-prompt", options->shape.num_samples, "Responses to a prompt");
  add_size("--prompts", options->shape.num_prompts, "Prompts");
  command->add_option("--model", options->common.model,
                      "Hugging Face folder [random: hidden 512, 8 layers, 8/4 heads of 64, "
                      "intermediate 1536, vocabulary 8192]");
  command->add_option("--pairs", options->pairs, "Timed pairs [3; 9 when nothing is shared]")
      ->check(CLI::PositiveNumber);
  command->add_option("--warm-up", options->warm_up, "Pairs before the timed ones")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  add_run_options(*command, options->common);
  add_packing_options(*command, options->common);
  add_seed_option(*command, options->common);
  add_output_options(*command, options->common);
  command->footer(
      "Examples:\n"
      "  zorro bench --prompt 1024 --response 128 --rollouts-per-prompt 8\n"
      "  zorro bench --prompt 512 --response 64 --rollouts-per-prompt 1   (nothing shared)");
  command->callback([options, &run] { run = [options] { return run_bench(*options); }; });
}

}  // namespace zorro::app
