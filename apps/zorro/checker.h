#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "options.h"
#include "report.h"
#include "zorro/train/exactness.h"

namespace zorro::app {

/// One row of the exactness table.
struct CheckSetting {
  at::ScalarType dtype = at::kFloat;
  ArmOptions arm;
};

/// "float32 prompts head=memory layout=left …": what differs from the plainest run.
std::string setting_text(const CheckSetting& setting);

/// Runs settings against the naive arm on one file. Models and naive arms are kept a dtype: the
/// naive numbers do not depend on head mode, checkpointing, layout, order or micro-batches beyond
/// the tolerance, so one run serves every setting.
class Checker {
 public:
  /// `naive` is how naive and truth arms run (its sharing is ignored).
  Checker(const CommonOptions& common, std::vector<Rollout> rollouts, ArmOptions naive);

  ExactnessReport run(const CheckSetting& setting, double tolerance_scale = 1);
  /// Numbers of the arm of the last run.
  const ArmNumbers& last_arm() const { return last_arm_; }
  const std::vector<Rollout>& rollouts() const { return rollouts_; }
  CausalLM& model(at::ScalarType dtype);  ///< loaded when first asked for

 private:
  const ArmNumbers& naive_numbers(at::ScalarType dtype);
  const ArmNumbers& truth_numbers();
  ArmNumbers run_model(CausalLM& model, const ArmOptions& options, const std::string& label);

  const CommonOptions& common_;
  std::vector<Rollout> rollouts_;
  ArmOptions naive_options_;
  std::map<at::ScalarType, std::unique_ptr<CausalLM>> models_;
  std::map<at::ScalarType, ArmNumbers> naive_;
  std::unique_ptr<ArmNumbers> truth_;
  ArmNumbers last_arm_;
};

/// The exactness table: add rows, then print, or take them as JSON.
class ExactnessTable {
 public:
  void add(const std::string& setting, const ExactnessReport& report);
  void print() const;
  const Json& rows() const { return rows_; }
  bool passed() const { return passed_; }

 private:
  std::vector<std::vector<std::string>> lines_;
  Json rows_ = Json::array();
  bool passed_ = true;
};

/// The settings of --sweep: the plainest, each factor changed alone, and rows that cover all pairs.
std::vector<CheckSetting> sweep_settings(const ArmOptions& base);

/// Whole prompt groups from the front of the file until there are `tokens` tokens.
std::vector<Rollout> first_groups(const std::vector<Rollout>& rollouts, int64_t tokens);

/// Plants a fault in a forest, as a broken builder would: "label" (a response's first token is
/// predicted by its packed neighbour), "mask" (responses do not see their prompt) or "position"
/// (responses are shifted by one). Throws InvalidArgument when nothing is shared, so nothing can
/// break.
void plant_fault(PrefixForest& forest, const std::string& fault);

}  // namespace zorro::app
