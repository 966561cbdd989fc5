#include <fstream>
#include <iostream>

#include "commands.h"
#include "output_files.h"
#include "progress_line.h"
#include "report.h"
#include "zorro/core/error.h"
#include "zorro/io/safetensors.h"
#include "zorro/train/policy_update.h"

namespace zorro::app {
namespace {

struct TrainOptions {
  CommonOptions common;
  std::string out, loss = "grpo", kl = "k3", save_gradients;
  std::vector<double> betas{0.9, 0.999};
  PolicyLossOptions policy;
  AdamWOptions optimizer;
  double max_grad_norm = 1, router_coef = 0;
  int64_t updates = 1;
};

KlKind parse_kl(const std::string& name) {
  if (name == "k1") return KlKind::kK1;
  return name == "k3" ? KlKind::kK3 : KlKind::kNone;
}

UpdateOptions update_options(const TrainOptions& options) {
  UpdateOptions update;
  update.loss = options.policy;
  update.loss.clip_high = options.policy.clip_low;
  update.loss.kl = parse_kl(options.kl);
  update.forward = options.common.forward();
  update.forest = options.common.forest();
  update.micro_batches = {options.common.max_tokens, 0};
  update.temperature = options.common.temperature;
  update.max_grad_norm = options.max_grad_norm;
  update.router_coef = options.router_coef;
  return update;
}

Json to_json(const UpdateMetrics& metrics, int64_t update) {
  return {{"update", update},
          {"loss", metrics.loss},
          {"policy_loss", metrics.policy_loss},
          {"kl", metrics.kl},
          {"router_loss", metrics.router_loss},
          {"entropy", metrics.entropy},
          {"clip_fraction", metrics.clip_fraction},
          {"approx_kl", metrics.approx_kl},
          {"mean_ratio", metrics.mean_ratio},
          {"grad_norm", metrics.grad_norm},
          {"loss_tokens", metrics.loss_tokens},
          {"scored_tokens", metrics.scored_tokens},
          {"replicated_tokens", metrics.replicated_tokens},
          {"packed_tokens", metrics.packed_tokens},
          {"unique_prompts", metrics.num_prompts},
          {"samples", metrics.num_samples},
          {"micro_batches", metrics.num_micro_batches},
          {"seconds_plan", metrics.seconds_plan},
          {"seconds_forward", metrics.seconds_forward},
          {"seconds_backward", metrics.seconds_backward},
          {"seconds_optimizer", metrics.seconds_optimizer}};
}

NamedTensors gradients_of(CausalLM& model) {
  return model.by_checkpoint_name([](const Weight& weight) { return weight.slot->grad().clone(); });
}

void write_metrics(const std::filesystem::path& path, const Json& lines) {
  std::ofstream file(path);
  for (const Json& line : lines) file << line.dump() << "\n";
  file.flush();
  ZORRO_CHECK_AS(CheckpointError, file.good(), "[train] ", path.string(),
                 " must be writable, got a failed write. Is the disk full?");
}

void print_updates(const TrainOptions& options, const Json& lines) {
  if (options.common.json) {
    print_json(
        {{"out", options.out}, {"attention", options.common.attention_text()}, {"updates", lines}});
    return;
  }
  Table table({"update", "loss", "policy", "kl", "entropy", "clipped", "ratio", "|grad|", "tokens",
               "computed", "seconds"});
  for (const Json& line : lines) {
    const auto text = [&line](const char* key, const char* format) {
      return number_text(format, line[key].is_number() ? line[key].get<double>() : 0);
    };
    const double seconds =
        line["seconds_plan"].get<double>() + line["seconds_forward"].get<double>() +
        line["seconds_backward"].get<double>() + line["seconds_optimizer"].get<double>();
    table.add({text("update", "%.0f"), text("loss", "%.6f"), text("policy_loss", "%.6f"),
               text("kl", "%.2e"), text("entropy", "%.4f"), text("clip_fraction", "%.3f"),
               text("mean_ratio", "%.4f"), text("grad_norm", "%.3e"),
               text("replicated_tokens", "%.0f"), text("packed_tokens", "%.0f"),
               number_text("%.2f", seconds)});
  }
  table.print();
  std::cout << options.out << " (attention " << options.common.attention_text() << ")\n";
}

Json run_updates(const TrainOptions& options, CausalLM& model,
                 const std::vector<Rollout>& rollouts) {
  std::vector<at::Tensor> parameters;
  for (const Weight& weight : model.weights()) parameters.push_back(*weight.slot);
  AdamWOptions optimizer_options = options.optimizer;
  optimizer_options.beta1 = options.betas[0];
  optimizer_options.beta2 = options.betas[1];
  AdamW optimizer(parameters, optimizer_options);
  const UpdateOptions update = update_options(options);
  Json lines = Json::array();
  for (int64_t index = 1; index <= options.updates; ++index) {
    ProgressLine line(options.common.quiet, concat("update ", index, " of ", options.updates),
                      "tokens");
    const UpdateMetrics metrics =
        policy_update(model, optimizer, rollouts, update,
                      [&line](int64_t done, int64_t all) { line.update(done, all); });
    lines.push_back(to_json(metrics, index));
  }
  return lines;
}

int run_train(const TrainOptions& options) {
  check_output(options.out, options.common.force);
  if (!options.save_gradients.empty()) check_output(options.save_gradients, options.common.force);
  ZORRO_CHECK(options.betas[0] >= 0 && options.betas[0] < 1 && options.betas[1] >= 0 &&
                  options.betas[1] < 1,
              "[train] --betas must lie in [0, 1), got ", options.betas[0], ",", options.betas[1],
              ".");
  apply_threads(options.common);
  const std::vector<Rollout> rollouts = options.common.read();
  const std::unique_ptr<CausalLM> model = load_model(options.common, options.common.scalar_type());
  const Json lines = run_updates(options, *model, rollouts);
  StagedFolder folder(options.out);
  model->save(folder.path());
  write_metrics(folder.path() / "metrics.jsonl", lines);
  if (!options.save_gradients.empty())
    write_safetensors(options.save_gradients, gradients_of(*model),
                      {{"format", "pt"}, {"loss", exact_text(lines.back()["loss"].get<double>())}});
  folder.commit();
  print_updates(options, lines);
  return 0;
}

void add_loss_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--loss", options.loss, "Training loss")
      ->check(CLI::IsMember({"grpo"}))
      ->capture_default_str();
  command.add_option("--clip", options.policy.clip_low, "The ratio is clipped to 1 -+ this")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--kl", options.kl, "Estimator of the KL to ref_logprobs")
      ->check(CLI::IsMember({"none", "k1", "k3"}))
      ->capture_default_str();
  command
      .add_option("--router-coef", options.router_coef,
                  "Factor of the router balance loss of sparse models")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--kl-coef", options.policy.kl_coef, "Factor of the KL term")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--entropy-coef", options.policy.entropy_coef, "Factor of the entropy bonus")
      ->check(not_negative())
      ->capture_default_str();
}

void add_optimizer_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--lr", options.optimizer.lr, "Learning rate of AdamW")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--betas", options.betas, "Decay of AdamW's two averages")
      ->delimiter(',')
      ->expected(2)
      ->default_str("0.9,0.999");
  command.add_option("--eps", options.optimizer.eps, "Added to AdamW's denominator")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--weight-decay", options.optimizer.weight_decay, "Decoupled weight decay")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--max-grad-norm", options.max_grad_norm, "Clip to this norm; 0: never")
      ->check(not_negative())
      ->capture_default_str();
  command.add_option("--updates", options.updates, "Passes over the file, one step each")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

}  // namespace

void add_train_command(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("train", "Policy updates over a file of rollouts");
  auto options = std::make_shared<TrainOptions>();
  add_model_option(*command, options->common, true);
  add_rollouts_option(*command, options->common);
  command
      ->add_option("--out", options->out, "Hugging Face folder to write, with metrics.jsonl in it")
      ->required();
  command->add_option("--save-gradients", options->save_gradients,
                      "Write the last update's gradients, after clipping, to FILE.safetensors");
  add_loss_options(*command, *options);
  add_optimizer_options(*command, *options);
  add_run_options(*command, options->common);
  add_packing_options(*command, options->common);
  add_temperature_option(*command, options->common);
  add_force_option(*command, options->common);
  add_output_options(*command, options->common);
  command->footer(
      "Examples:\n"
      "  zorro train --model DIR --rollouts FILE --out NEW --updates 4 --lr 1e-6\n"
      "  zorro train --model DIR --rollouts FILE --out NEW --kl none --max-grad-norm 0");
  command->callback([options, &run] { run = [options] { return run_train(*options); }; });
}

}  // namespace zorro::app
