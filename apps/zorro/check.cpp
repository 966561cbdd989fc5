#include <chrono>
#include <iostream>

#include "checker.h"
#include "commands.h"
#include "output_files.h"
#include "zorro/core/error.h"
#include "zorro/io/safetensors.h"

namespace zorro::app {
namespace {

struct CheckOptions {
  CommonOptions common;
  std::string layout = "ragged", loss, fault, save_gradients;
  uint64_t permute = 0;
  bool permutes = false, sweep = false;
  int64_t micro_batches = 0, sweep_tokens = 8000;
  double tolerance_scale = 1;
};

Layout parse_layout(const std::string& name) {
  if (name == "left") return Layout::kLeft;
  if (name == "right") return Layout::kRight;
  return name == "both" ? Layout::kBoth : Layout::kRagged;
}

ArmOptions arm_options(const CheckOptions& options) {
  ArmOptions arm;
  arm.forward = options.common.forward();
  arm.forest = options.common.forest();
  arm.micro_batches = {options.common.max_tokens, 0};
  arm.temperature = options.common.temperature;
  arm.loss_seed = options.common.seed;
  if (!options.loss.empty()) arm.policy_loss = PolicyLossOptions{};
  return arm;
}

CheckSetting single_setting(const CheckOptions& options) {
  CheckSetting setting{options.common.scalar_type(), arm_options(options)};
  setting.arm.layout = parse_layout(options.layout);
  if (options.permutes) setting.arm.permute_seed = options.permute;
  if (options.micro_batches > 0) setting.arm.micro_batches = {0, options.micro_batches};
  if (!options.fault.empty())
    setting.arm.edit_forest = [fault = options.fault](PrefixForest& forest) {
      plant_fault(forest, fault);
    };
  return setting;
}

void save_gradients(const CheckOptions& options, Checker& checker) {
  const ArmNumbers& arm = checker.last_arm();
  std::map<std::string, at::Tensor> by_name(arm.gradients.begin(), arm.gradients.end());
  const NamedTensors tensors =
      checker.model(options.common.scalar_type()).by_checkpoint_name([&](const Weight& weight) {
        return by_name.at(weight.name).to(options.common.scalar_type());
      });
  write_safetensors(options.save_gradients, tensors,
                    {{"format", "pt"}, {"loss", exact_text(arm.loss)}});
}

void print_result(const CheckOptions& options, const Checker& checker, const ExactnessTable& table,
                  size_t num_in_file, double seconds) {
  int64_t tokens = 0;
  for (const Rollout& rollout : checker.rollouts()) tokens += rollout.num_scored();
  if (options.common.json) {
    print_json({{"model", options.common.model},
                {"rollouts", options.common.rollouts},
                {"num_rollouts", checker.rollouts().size()},
                {"num_in_file", num_in_file},
                {"scored_tokens", tokens},
                {"attention", options.common.attention_text()},
                {"settings", table.rows()},
                {"seconds", seconds},
                {"passed", table.passed()}});
    return;
  }
  std::cout << "dedup against naive batch: " << checker.rollouts().size() << " of " << num_in_file
            << " rollouts, " << tokens << " scored tokens, every parameter; attention "
            << options.common.attention_text() << "\n";
  if (!options.fault.empty()) std::cout << "planted fault: " << options.fault << "\n";
  table.print();
  std::cout << (table.passed() ? "all within tolerance" : "BEYOND TOLERANCE") << " ("
            << number_text("%.1f s", seconds) << ")\n";
}

void refuse_contradictions(const CheckOptions& options) {
  if (!options.save_gradients.empty()) {
    ZORRO_CHECK(!options.sweep, "[check] --save-gradients must go with one setting, got --sweep.");
    check_output(options.save_gradients, options.common.force);
  }
}

int run_check(const CheckOptions& options) {
  refuse_contradictions(options);
  apply_threads(options.common);
  const auto start = std::chrono::steady_clock::now();
  std::vector<Rollout> rollouts = options.common.read();
  const size_t num_in_file = rollouts.size();
  if (options.sweep) rollouts = first_groups(rollouts, options.sweep_tokens);
  Checker checker(options.common, std::move(rollouts), arm_options(options));
  ExactnessTable table;
  std::vector<CheckSetting> settings{single_setting(options)};
  if (options.sweep) settings = sweep_settings(arm_options(options));
  for (const CheckSetting& setting : settings)
    table.add(setting_text(setting), checker.run(setting, options.tolerance_scale));
  if (!options.save_gradients.empty()) save_gradients(options, checker);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print_result(options, checker, table, num_in_file, seconds);
  return table.passed() ? 0 : 1;
}

void add_check_options(CLI::App& command, CheckOptions& options) {
  add_model_option(command, options.common, true);
  add_rollouts_option(command, options.common);
  CLI::Option* layout =
      command.add_option("--layout", options.layout, "How rollouts are handed over")
          ->check(CLI::IsMember({"ragged", "left", "right", "both"}))
          ->capture_default_str();
  CLI::Option* permute = command
                             .add_option_function<uint64_t>(
                                 "--permute",
                                 [&options](const uint64_t& seed) {
                                   options.permute = seed;
                                   options.permutes = true;
                                 },
                                 "Shuffle the rollouts' order by this seed")
                             ->type_name("SEED");
  CLI::Option* parts = command.add_option("--micro-batches", options.micro_batches,
                                          "Cut into exactly this many parts (no cap)");
  parts->check(CLI::PositiveNumber);
  command.add_option("--loss", options.loss, "Add the training loss")
      ->check(CLI::IsMember({"grpo"}));
  command.add_option("--tolerance-scale", options.tolerance_scale, "Multiplies every tolerance")
      ->check(above_zero())
      ->capture_default_str();
  CLI::Option* fault =
      command.add_option("--fault", options.fault, "Plant a fault in the dedup arm; must exit 1")
          ->check(CLI::IsMember({"label", "mask", "position"}));
  CLI::Option* sweep = command.add_flag(
      "--sweep", options.sweep,
      "Each factor alone and all pairs of: dtype, sharing, checkpointing, head, layout, order, "
      "micro-batches, attention");
  for (CLI::Option* single : {layout, permute, parts, fault}) sweep->excludes(single);
  command
      .add_option("--sweep-tokens", options.sweep_tokens,
                  "With --sweep: whole prompt groups from the front until this many tokens")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_option("--save-gradients", options.save_gradients,
                     "Write the dedup arm's gradients to FILE.safetensors");
}

}  // namespace

void add_check_command(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "check", "Compare dedup with the naive batch: every logprob, entropy and gradient");
  auto options = std::make_shared<CheckOptions>();
  add_check_options(*command, *options);
  add_run_options(*command, options->common);
  add_packing_options(*command, options->common);
  add_temperature_option(*command, options->common);
  add_seed_option(*command, options->common);
  add_force_option(*command, options->common);
  add_output_options(*command, options->common);
  command->footer(
      "Examples:\n"
      "  zorro check --model DIR --rollouts FILE --dtype float64\n"
      "  zorro check --model DIR --rollouts FILE --sweep\n"
      "  zorro check --model DIR --rollouts FILE --fault mask   (must exit 1)");
  command->callback([options, &run] { run = [options] { return run_check(*options); }; });
}

}  // namespace zorro::app
