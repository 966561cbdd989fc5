#include <chrono>
#include <filesystem>
#include <iostream>

#include "checker.h"
#include "commands.h"
#include "memory.h"
#include "progress_line.h"
#include "race_report.h"
#include "zorro/core/error.h"
#include "zorro/train/arms.h"

namespace zorro::app {
namespace {

namespace fs = std::filesystem;

struct DemoOptions {
  CommonOptions common;
  std::string examples;
};

bool holds_examples(const fs::path& folder) {
  return fs::is_regular_file(folder / "qwen3-small" / "config.json");
}

/// --examples, else `examples` in or above the working folder, else above the command's own place.
fs::path find_examples(const std::string& chosen) {
  if (!chosen.empty()) {
    ZORRO_CHECK(holds_examples(chosen), "[demo] --examples must hold qwen3-small/config.json, got ",
                chosen, ".");
    return chosen;
  }
  std::error_code ignored;
  const fs::path command = fs::read_symlink("/proc/self/exe", ignored);
  for (fs::path start : {fs::current_path(), command.parent_path()})
    for (int level = 0; level < 6; ++level) {
      if (holds_examples(start / "examples")) return start / "examples";
      start = start.parent_path();
    }
  throw InvalidArgument(
      "[demo] the folder examples must lie in or above the working folder, got none. Pass "
      "--examples DIR.");
}

CommonOptions on_file(const DemoOptions& options, const fs::path& examples, const char* file) {
  CommonOptions common = options.common;
  common.model = (examples / "qwen3-small").string();
  common.rollouts = (examples / file).string();
  return common;
}

// A demo lasts less than a minute: longer files are cut after whole prompt groups.
constexpr int64_t kMostTokens = 8000;

std::vector<Rollout> read_part(const CommonOptions& common) {
  return first_groups(common.read(), kMostTokens);
}

/// Exactness on one file in some dtypes; the table grows.
void check_file(const CommonOptions& common, const std::string& label,
                const std::vector<at::ScalarType>& dtypes, ExactnessTable& table) {
  ArmOptions arm;
  arm.forward = common.forward();
  arm.forest = common.forest();
  arm.micro_batches = {common.max_tokens, 0};
  Checker checker(common, read_part(common), arm);
  for (const at::ScalarType dtype : dtypes) {
    const CheckSetting setting{dtype, arm};
    table.add(concat(label, ", ", checker.rollouts().size(), " rollouts: ", setting_text(setting)),
              checker.run(setting));
  }
}

Json race_file(const CommonOptions& common, double mm_rate) {
  RaceOptions options;
  options.warm_up = 0;  // the check has just run the same kernels
  options.forward = common.forward();
  options.forest = common.forest();
  options.micro_batches = {common.max_tokens, 0};
  options.num_pairs = 1;
  options.memory = tensor_memory();
  const std::unique_ptr<CausalLM> model = load_model(common, at::kFloat);
  const std::vector<Rollout> rollouts = read_part(common);
  ProgressLine line(common.quiet, "two-arm update", "arms");
  const RaceResult result = race(*model, rollouts, options,
                                 [&line](int64_t done, int64_t all) { line.update(done, all); });
  Json json = race_json(result, mm_rate);
  json["rollouts"] = rollouts.size();
  return json;
}

int run_demo(const DemoOptions& options) {
  apply_threads(options.common);
  tensor_memory();  // counts from here on
  const auto start = std::chrono::steady_clock::now();
  const fs::path examples = find_examples(options.examples);
  const bool prints = !options.common.json;
  if (prints) {
    std::cout << "examples: " << examples.string() << "\n\n";
    std::cout << "Exactness: dedup against the naive batch, every logprob, entropy and gradient\n";
  }
  ExactnessTable table;
  check_file(on_file(options, examples, "rollouts.jsonl.gz"), "rollouts", {at::kFloat, at::kDouble},
             table);
  check_file(on_file(options, examples, "long.jsonl.gz"), "long", {at::kFloat}, table);
  if (prints) table.print();
  const double mm_rate = measure_mm_rate(at::kFloat);
  Json races = Json::object();
  for (const char* file : {"rollouts.jsonl.gz", "long.jsonl.gz"}) {
    races[file] = race_file(on_file(options, examples, file), mm_rate);
    if (!prints) continue;
    std::cout << "\nOne update, forward and backward, float32: " << file << ", "
              << races[file]["rollouts"] << " rollouts\n";
    print_race(races[file]);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (prints) {
    std::cout << "\n"
              << (table.passed() ? "exact within tolerance" : "BEYOND TOLERANCE") << "; "
              << number_text("%.1f s", seconds) << "\n";
  } else {
    print_json({{"examples", examples.string()},
                {"exactness", table.rows()},
                {"updates", races},
                {"seconds", seconds},
                {"passed", table.passed()}});
  }
  return table.passed() ? 0 : 1;
}

}  // namespace

void add_demo_command(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("demo", "The main job on the shipped examples, in under a minute");
  auto options = std::make_shared<DemoOptions>();
  command->add_option("--examples", options->examples,
                      "Folder of the examples [examples in or above here, or the command's place]");
  add_engine_options(*command, options->common);
  add_packing_options(*command, options->common);
  add_output_options(*command, options->common);
  command->footer("Example:\n  zorro demo");
  command->callback([options, &run] { run = [options] { return run_demo(*options); }; });
}

}  // namespace zorro::app
