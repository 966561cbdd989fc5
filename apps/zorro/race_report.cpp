#include "race_report.h"

#include <iostream>

#include "memory.h"

namespace zorro::app {
namespace {

double over(double numerator, double denominator) {
  return denominator > 0 ? numerator / denominator : 0;
}

Json arm_json(const ArmResult& arm, double mm_rate) {
  const PhaseSeconds seconds = arm.median();
  const double rate = over(arm.flops.total(), seconds.update());
  return {{"seconds", seconds.update()},
          {"seconds_forward", seconds.forward},
          {"seconds_backward", seconds.backward},
          {"seconds_group", seconds.group},
          {"seconds_optimizer", seconds.optimizer},
          {"group_share", over(seconds.group, seconds.group + seconds.update())},
          {"tokens", arm.work.tokens},
          {"pairs", arm.work.pairs},
          {"head_rows", arm.work.predictors},
          {"micro_batches", arm.num_micro_batches},
          {"flops", arm.flops.total()},
          {"flops_linear", arm.flops.linear},
          {"flops_attention", arm.flops.attention},
          {"flops_head", arm.flops.head},
          {"flops_per_second", rate},
          {"over_mm_rate", over(rate, mm_rate)},
          {"peak_bytes", arm.peak_bytes},
          {"layer_bytes", arm.layer_bytes},
          {"head_bytes", arm.head_bytes}};
}

}  // namespace

Json race_json(const RaceResult& result, double mm_rate) {
  const auto dedup_bytes = static_cast<double>(result.dedup.layer_bytes);
  return {{"speedup", result.speedup},
          {"speedup_range", {result.slowest_speedup, result.fastest_speedup}},
          {"pairs", result.dedup.runs.size()},
          {"bound", result.bound},
          {"achieved_over_bound", over(result.speedup, result.bound)},
          {"rho", result.token_ratio},
          {"layer_bytes_times_rho_over_naive",
           over(dedup_bytes * result.token_ratio, static_cast<double>(result.naive.layer_bytes))},
          {"mm_flops_per_second", mm_rate},
          {"dedup", arm_json(result.dedup, mm_rate)},
          {"naive", arm_json(result.naive, mm_rate)}};
}

void print_race(const Json& race) {
  Table table({"arm", "fwd+bwd", "forward", "backward", "grouping", "optimizer", "tokens", "rate",
               "of mm", "peak", "kept by layers", "head"});
  for (const char* name : {"naive", "dedup"}) {
    const Json& arm = race[name];
    const auto seconds = [&arm](const char* key) { return seconds_text(arm[key].get<double>()); };
    const auto bytes = [&arm](const char* key) { return bytes_text(arm[key].get<int64_t>()); };
    table.add({name, seconds("seconds"), seconds("seconds_forward"), seconds("seconds_backward"),
               seconds("seconds_group"), seconds("seconds_optimizer"), arm["tokens"].dump(),
               rate_text(arm["flops_per_second"].get<double>()),
               number_text("%.2f", arm["over_mm_rate"].get<double>()), bytes("peak_bytes"),
               bytes("layer_bytes"), bytes("head_bytes")});
  }
  table.print();
  std::cout << "speed-up " << number_text("%.2f", race["speedup"]) << " ("
            << number_text("%.2f", race["speedup_range"][0]) << " to "
            << number_text("%.2f", race["speedup_range"][1]) << ", " << race["pairs"]
            << " pairs) of a bound S = " << number_text("%.2f", race["bound"]) << ": "
            << number_text("%.3f", race["achieved_over_bound"]) << " achieved; rho "
            << number_text("%.2f", race["rho"]) << "; mm "
            << rate_text(race["mm_flops_per_second"].get<double>()) << "\n";
}

}  // namespace zorro::app
