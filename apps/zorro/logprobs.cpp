#include <ATen/core/Tensor.h>

#include <iostream>
#include <unordered_set>

#include "commands.h"
#include "output_files.h"
#include "progress_line.h"
#include "report.h"
#include "zorro/core/error.h"
#include "zorro/io/safetensors.h"
#include "zorro/train/score.h"

namespace zorro::app {
namespace {

struct LogprobsOptions {
  CommonOptions common;
  std::string out, key = "logprobs", save_logits;
  int64_t window = 4096;
};

/// What the run came to; windows add up.
struct Totals {
  int64_t rollouts = 0, scored_tokens = 0, prompts = 0, micro_batches = 0;
  int64_t packed_tokens = 0, replicated_tokens = 0;
};

std::vector<float> floats(const at::Tensor& values) {
  const at::Tensor narrow = values.to(at::kFloat).contiguous();
  const auto* data = narrow.const_data_ptr<float>();
  return {data, data + narrow.numel()};
}

/// The following lines of the file, at most `count`.
std::vector<Rollout> read_window(RolloutReader& reader, int64_t count) {
  std::vector<Rollout> window;
  while (static_cast<int64_t>(window.size()) < count) {
    std::optional<Rollout> rollout = reader.next();
    if (!rollout) break;
    window.push_back(std::move(*rollout));
  }
  return window;
}

/// Logits by sample id, which must be unique to name tensors.
class LogitsFile {
 public:
  void add(const std::string& file, const Rollout& rollout, const at::Tensor& logits) {
    ZORRO_CHECK_AS(RolloutError, ids_.insert(rollout.id).second, "[logprobs] ", file, " line ",
                   rollout.line, ": id must be unique with --save-logits, got ", rollout.id,
                   " again. Give every line its own id.");
    tensors_.emplace_back(rollout.id, logits.clone());
  }
  void write(const std::string& path) const { write_safetensors(path, tensors_); }

 private:
  std::unordered_set<std::string> ids_;
  NamedTensors tensors_;
};

void print_totals(const LogprobsOptions& options, const Totals& totals, int64_t num_skipped) {
  if (options.common.json) {
    print_json({{"out", options.out},
                {"rollouts", totals.rollouts},
                {"skipped", num_skipped},
                {"unique_prompts", totals.prompts},
                {"scored_tokens", totals.scored_tokens},
                {"replicated_tokens", totals.replicated_tokens},
                {"packed_tokens", totals.packed_tokens},
                {"micro_batches", totals.micro_batches},
                {"attention", options.common.attention_text()}});
    return;
  }
  std::cout << totals.rollouts << " rollouts of " << totals.prompts << " prompts, "
            << totals.scored_tokens << " tokens scored in " << totals.micro_batches
            << " micro-batches; " << totals.replicated_tokens << " tokens -> "
            << totals.packed_tokens << " computed; attention " << options.common.attention_text()
            << "\n"
            << options.out << "\n";
  if (num_skipped > 0) std::cout << num_skipped << " bad lines skipped\n";
}

void add_up(Totals& totals, const ScoreResult& scores, const std::vector<Rollout>& window) {
  totals.rollouts += static_cast<int64_t>(window.size());
  for (const Rollout& rollout : window) totals.scored_tokens += rollout.num_scored();
  totals.prompts += scores.num_prompts;
  totals.micro_batches += scores.num_micro_batches;
  totals.packed_tokens += scores.packed_tokens;
  totals.replicated_tokens += scores.replicated_tokens;
}

ScoreOptions score_options(const LogprobsOptions& options) {
  ScoreOptions score;
  score.forward = options.common.forward();
  score.forest = options.common.forest();
  score.micro_batches = {options.common.max_tokens, 0};
  score.temperature = options.common.temperature;
  score.logits = !options.save_logits.empty();
  return score;
}

int run_logprobs(const LogprobsOptions& options) {
  check_output(options.out, options.common.force);
  if (!options.save_logits.empty()) check_output(options.save_logits, options.common.force);
  apply_threads(options.common);
  const std::unique_ptr<CausalLM> model = load_model(options.common, options.common.scalar_type());
  RolloutReadOptions read_options;
  read_options.skip_bad = options.common.skip_bad;
  RolloutReader reader(options.common.rollouts, read_options);
  RolloutWriter writer(options.out);
  LogitsFile logits;
  Totals totals;
  ProgressLine line(options.common.quiet, "logprobs", "tokens");
  while (true) {
    const std::vector<Rollout> window = read_window(reader, options.window);
    if (window.empty()) break;
    // The file's total is guessed from the share of its bytes that is read.
    const double fraction = reader.fraction_read();
    const ScoreResult scores =
        score_rollouts(*model, window, score_options(options), [&](int64_t done, int64_t all) {
          const auto read = static_cast<double>(totals.replicated_tokens + all);
          line.update(totals.replicated_tokens + done,
                      fraction > 0 ? static_cast<int64_t>(read / fraction) : 0);
        });
    for (size_t i = 0; i < window.size(); ++i) {
      const RolloutScore& score = scores.rollouts[i];
      writer.write(window[i],
                   {{options.key, floats(score.logprob)}, {"entropy", floats(score.entropy)}});
      if (score.logits.defined()) logits.add(options.common.rollouts, window[i], score.logits);
    }
    add_up(totals, scores, window);
  }
  if (!options.save_logits.empty()) logits.write(options.save_logits);
  writer.commit();
  print_totals(options, totals, reader.num_skipped());
  return 0;
}

}  // namespace

void add_logprobs_command(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("logprobs", "Score rollouts: add logprobs and entropy to every line");
  auto options = std::make_shared<LogprobsOptions>();
  add_model_option(*command, options->common, true);
  add_rollouts_option(*command, options->common);
  command->add_option("--out", options->out, "Output file (.gz by suffix)")->required();
  command->add_option("--key", options->key, "Key of the log-probabilities in the output")
      ->capture_default_str();
  command->add_option("--window", options->window, "Lines read and grouped at a time")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--save-logits", options->save_logits,
                      "Write logits to FILE.safetensors: one tensor an id, [response tokens, "
                      "vocabulary], before the temperature");
  add_run_options(*command, options->common);
  add_packing_options(*command, options->common);
  add_temperature_option(*command, options->common);
  add_force_option(*command, options->common);
  add_output_options(*command, options->common);
  command->footer(
      "Examples:\n"
      "  zorro logprobs --model DIR --rollouts in.jsonl.gz --out out.jsonl.gz\n"
      "  zorro logprobs --model REFERENCE --rollouts in.jsonl --out out.jsonl --key ref_logprobs");
  command->callback([options, &run] { run = [options] { return run_logprobs(*options); }; });
}

}  // namespace zorro::app
