#include "checker.h"

#include <c10/core/ScalarType.h>

#include <iostream>
#include <set>

#include "progress_line.h"
#include "zorro/core/error.h"

namespace zorro::app {
namespace {

std::string dtype_text(at::ScalarType dtype) {
  if (dtype == at::kDouble) return "float64";
  return dtype == at::kBFloat16 ? "bfloat16" : "float32";
}

const char* sharing_text(Sharing sharing) {
  if (sharing == Sharing::kNone) return "none";
  return sharing == Sharing::kPrompts ? "prompts" : "prefixes";
}

const char* head_text(HeadMode mode) {
  if (mode == HeadMode::kNone) return "none";
  return mode == HeadMode::kCompute ? "compute" : "memory";
}

const char* layout_text(Layout layout) {
  const char* names[] = {"ragged", "left", "right", "both"};
  return names[static_cast<size_t>(layout)];
}

const char* path_text(AttentionPath path) {
  const char* names[] = {"composed", "levels", "fused"};
  return names[static_cast<size_t>(path)];
}

/// "1.2e-07"; a ratio against the naive arm's own error as "1.02x".
std::string measure_text(const Measure& measure, bool is_ratio) {
  return is_ratio ? number_text("%.2fx", measure.value) : number_text("%.1e", measure.value);
}

std::string tolerance_text(const ExactnessReport& report) {
  if (report.all_gradients)
    return number_text("%.3gx", report.logprob.tolerance) + "/" +
           number_text("%.3gx", report.gradient.tolerance);
  return number_text("%.0e", report.logprob.tolerance) + "/" +
         number_text("%.0e", report.gradient.tolerance);
}

}  // namespace

std::string setting_text(const CheckSetting& setting) {
  const ArmOptions& arm = setting.arm;
  std::string text = dtype_text(setting.dtype) + " " + sharing_text(arm.forest.sharing);
  if (arm.forest.sharing == Sharing::kPrefixes) text += concat(">=", arm.forest.min_shared_tokens);
  text += concat(" attention=", path_text(arm.forward.attention));
  text += concat(" head=", head_text(arm.forward.head.mode));
  if (arm.forward.checkpointing) text += " checkpointing";
  if (arm.layout != Layout::kRagged) text += concat(" layout=", layout_text(arm.layout));
  if (arm.permute_seed) text += concat(" permute=", *arm.permute_seed);
  if (arm.micro_batches.num_parts > 0)
    text += concat(" micro-batches=", arm.micro_batches.num_parts);
  if (arm.policy_loss) text += " loss=grpo";
  return text;
}

Checker::Checker(const CommonOptions& common, std::vector<Rollout> rollouts, ArmOptions naive)
    : common_(common), rollouts_(std::move(rollouts)), naive_options_(std::move(naive)) {
  naive_options_.forest.sharing = Sharing::kNone;
  naive_options_.layout = Layout::kRagged;
  naive_options_.permute_seed.reset();
  naive_options_.edit_forest = {};
}

CausalLM& Checker::model(at::ScalarType dtype) {
  std::unique_ptr<CausalLM>& model = models_[dtype];
  if (!model) model = load_model(common_, dtype);
  return *model;
}

ArmNumbers Checker::run_model(CausalLM& model, const ArmOptions& options,
                              const std::string& label) {
  ProgressLine line(common_.quiet, label, "tokens");
  return run_arm(model, rollouts_, options,
                 [&line](int64_t done, int64_t all) { line.update(done, all); });
}

const ArmNumbers& Checker::naive_numbers(at::ScalarType dtype) {
  const auto found = naive_.find(dtype);
  if (found != naive_.end()) return found->second;
  return naive_[dtype] =
             run_model(model(dtype), naive_options_, dtype_text(dtype) + " naive batch");
}

const ArmNumbers& Checker::truth_numbers() {
  if (!truth_) {
    const std::unique_ptr<CausalLM> rounded = load_model(common_, at::kFloat);
    round_weights_to_bfloat16(*rounded);
    truth_ = std::make_unique<ArmNumbers>(
        run_model(*rounded, naive_options_, "float32 truth of the bfloat16 weights"));
  }
  return *truth_;
}

ExactnessReport Checker::run(const CheckSetting& setting, double tolerance_scale) {
  const ArmNumbers& naive = naive_numbers(setting.dtype);
  last_arm_ = run_model(model(setting.dtype), setting.arm, setting_text(setting));
  if (setting.dtype == at::kBFloat16)
    return compare_to_truth(last_arm_, naive, truth_numbers(), tolerance_scale);
  return compare(last_arm_, naive, setting.dtype, tolerance_scale);
}

void ExactnessTable::add(const std::string& setting, const ExactnessReport& report) {
  const bool is_ratio = report.all_gradients.has_value();
  std::string gradient = measure_text(report.gradient, is_ratio);
  if (is_ratio) gradient += " (all " + measure_text(*report.all_gradients, true) + ")";
  lines_.push_back(
      {setting, measure_text(report.logprob, is_ratio), measure_text(report.entropy, is_ratio),
       gradient, report.worst_parameter, tolerance_text(report), report.passed() ? "ok" : "FAILED",
       number_text("%.1e", report.smallest_norm), number_text("%.2f", report.token_ratio)});
  Json row{{"setting", setting},
           {"logprob_error", report.logprob.value},
           {"entropy_error", report.entropy.value},
           {"gradient_error", report.gradient.value},
           {"worst_parameter", report.worst_parameter},
           {"logprob_tolerance", report.logprob.tolerance},
           {"gradient_tolerance", report.gradient.tolerance},
           {"measure", is_ratio ? "error over the naive arm's own" : "relative error"},
           {"smallest_gradient_norm", report.smallest_norm},
           {"smallest_gradient", report.smallest_parameter},
           {"rho", report.token_ratio},
           {"passed", report.passed()}};
  if (is_ratio) row["all_gradients_error"] = report.all_gradients->value;
  rows_.push_back(std::move(row));
  passed_ = passed_ && report.passed();
}

void ExactnessTable::print() const {
  Table table({"setting", "logprob", "entropy", "gradient", "worst parameter", "tolerance",
               "verdict", "least |g|", "rho"});
  for (const auto& line : lines_) table.add(line);
  table.print();
}

std::vector<Rollout> first_groups(const std::vector<Rollout>& rollouts, int64_t tokens) {
  const std::vector<int64_t> prompts = prompt_numbers(rollouts);
  std::set<int64_t> chosen;
  int64_t count = 0;
  for (size_t i = 0; i < rollouts.size() && count < tokens; ++i) {
    if (!chosen.insert(prompts[i]).second) continue;
    for (size_t j = i; j < rollouts.size(); ++j)
      if (prompts[j] == prompts[i]) count += static_cast<int64_t>(rollouts[j].token_ids.size());
  }
  std::vector<Rollout> first;
  for (size_t i = 0; i < rollouts.size(); ++i)
    if (chosen.count(prompts[i]) != 0) first.push_back(rollouts[i]);
  return first;
}

}  // namespace zorro::app
