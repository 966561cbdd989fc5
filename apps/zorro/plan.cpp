#include <algorithm>
#include <iostream>
#include <numeric>

#include "commands.h"
#include "report.h"
#include "zorro/io/model_config.h"
#include "zorro/plan/cost.h"
#include "zorro/train/model_cost.h"
#include "zorro/train/score.h"

namespace zorro::app {
namespace {

struct PlanOptions {
  CommonOptions common;
  int64_t ranks = 0;
  bool draw = false;
};

// Sizes of a Qwen3-0.6B, for a prediction without a model.
constexpr DenseSizes kDefaultSizes{1024, 28, 16, 8, 128, 3072, 151936};

struct PartReport {
  int64_t samples = 0, packed_tokens = 0, replicated_tokens = 0;
};

/// The micro-batches of a plan with their work.
struct PlanReport {
  std::vector<PartReport> parts;
  ForestWork work, naive_work;
  std::string drawing;  ///< of the first part, when asked for
};

void add_work(ForestWork& to, const ForestWork& from) {
  to.tokens += from.tokens;
  to.pairs += from.pairs;
  to.predictors += from.predictors;
  to.scored += from.scored;
}

PlanReport report_parts(const std::vector<Rollout>& rollouts, const PlanOptions& options,
                        const MicroBatchOptions& cut) {
  PlanReport report;
  const ForestOptions forest_options = options.common.forest();
  for (const auto& members : plan_rollouts(rollouts, forest_options.sharing, cut)) {
    std::vector<Sample> samples;
    for (const int64_t member : members)
      samples.push_back(rollouts[static_cast<size_t>(member)].sample());
    const PrefixForest forest = PrefixForest::build(samples, forest_options);
    if (report.parts.empty() && options.draw) report.drawing = forest.draw();
    report.parts.push_back({static_cast<int64_t>(members.size()), forest.num_tokens(),
                            forest.num_replicated_tokens()});
    add_work(report.work, forest_work(forest));
    add_work(report.naive_work, replicated_work(forest));
  }
  return report;
}

double ratio(double numerator, double denominator) {
  return denominator > 0 ? numerator / denominator : 1;
}

Json to_json(const std::vector<PartReport>& parts) {
  Json list = Json::array();
  for (const PartReport& part : parts)
    list.push_back({{"samples", part.samples},
                    {"packed_tokens", part.packed_tokens},
                    {"replicated_tokens", part.replicated_tokens}});
  return list;
}

/// Packed tokens of the busiest rank over the mean.
double imbalance(const std::vector<PartReport>& ranks) {
  int64_t most = 0, sum = 0;
  for (const PartReport& rank : ranks) {
    most = std::max(most, rank.packed_tokens);
    sum += rank.packed_tokens;
  }
  return ratio(static_cast<double>(most) * static_cast<double>(ranks.size()),
               static_cast<double>(sum));
}

Json make_json(const PlanOptions& options, const std::vector<Rollout>& rollouts,
               const PlanReport& report) {
  const ModelCost model = options.common.model.empty()
                              ? dense_cost(kDefaultSizes)
                              : model_cost(read_model_config(options.common.model));
  const std::vector<int64_t> prompts = prompt_numbers(rollouts);
  const int64_t num_prompts =
      prompts.empty() ? 0 : *std::max_element(prompts.begin(), prompts.end()) + 1;
  Json json{{"samples", rollouts.size()},
            {"unique_prompts", num_prompts},
            {"scored_tokens", report.work.scored},
            {"replicated_tokens", report.naive_work.tokens},
            {"packed_tokens", report.work.tokens},
            {"rho", ratio(static_cast<double>(report.naive_work.tokens),
                          static_cast<double>(report.work.tokens))},
            {"predicted_speedup",
             ratio(cost(report.naive_work, model).total(), cost(report.work, model).total())},
            {"predicted_for",
             options.common.model.empty() ? "the sizes of Qwen3-0.6B" : options.common.model},
            {"max_tokens", options.common.max_tokens},
            {"micro_batches", to_json(report.parts)}};
  if (options.ranks > 0) {
    const PlanReport ranks = report_parts(rollouts, options, {0, options.ranks});
    json["ranks"] = to_json(ranks.parts);
    json["rank_imbalance"] = imbalance(ranks.parts);
  }
  return json;
}

void print_parts(const Json& parts, const std::string& name) {
  constexpr size_t kMostLines = 20;
  Table table({name, "samples", "tokens", "computed"});
  for (size_t i = 0; i < std::min(parts.size(), kMostLines); ++i)
    table.add({std::to_string(i), parts[i]["samples"].dump(), parts[i]["replicated_tokens"].dump(),
               parts[i]["packed_tokens"].dump()});
  table.print();
  if (parts.size() > kMostLines) std::cout << "… " << parts.size() - kMostLines << " more\n";
}

void print_plan(const Json& json) {
  std::cout << json["samples"] << " rollouts of " << json["unique_prompts"]
            << " prompts: " << json["replicated_tokens"] << " tokens -> " << json["packed_tokens"]
            << " computed, rho " << number_text("%.2f", json["rho"]) << "\n"
            << "predicted speed-up of forward and backward "
            << number_text("%.2f", json["predicted_speedup"]) << " for "
            << json["predicted_for"].get<std::string>() << "\n";
  print_parts(json["micro_batches"], "micro-batch");
  if (!json.contains("ranks")) return;
  std::cout << "\nbusiest rank over mean: " << number_text("%.3f", json["rank_imbalance"]) << "\n";
  print_parts(json["ranks"], "rank");
}

int run_plan(const PlanOptions& options) {
  const std::vector<Rollout> rollouts = options.common.read();
  const PlanReport report = report_parts(rollouts, options, {options.common.max_tokens, 0});
  const Json json = make_json(options, rollouts, report);
  if (options.common.json) {
    print_json(json);
    return 0;
  }
  print_plan(json);
  if (options.draw) std::cout << "\n" << report.drawing;
  return 0;
}

}  // namespace

void add_plan_command(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "plan", "Groups, token ratio, micro-batches and predicted speed-up of a file; no model");
  auto options = std::make_shared<PlanOptions>();
  add_rollouts_option(*command, options->common);
  command->add_option("--model", options->common.model,
                      "Predict for this folder's config.json [the sizes of Qwen3-0.6B]");
  add_packing_options(*command, options->common);
  command->add_option("--ranks", options->ranks, "Also spread whole groups over this many ranks")
      ->check(CLI::Range(1, 1 << 20));
  command->add_flag("--draw", options->draw, "Draw the first micro-batch's forest");
  command->add_flag("--json", options->common.json, "Print one JSON object on stdout");
  command->footer(
      "Examples:\n"
      "  zorro plan --rollouts FILE --max-tokens 16384 --ranks 4\n"
      "  zorro plan --rollouts FILE --sharing prefixes --draw");
  command->callback([options, &run] { run = [options] { return run_plan(*options); }; });
}

}  // namespace zorro::app
