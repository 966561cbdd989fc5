#include "zorro/train/arms.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>

#include "train/operator_count.h"
#include "zorro/core/error.h"
#include "zorro/train/model_cost.h"
#include "zorro/train/policy_loss.h"

namespace zorro {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct MicroBatch {
  Batch batch;
  std::vector<int64_t> members;
};

std::vector<MicroBatch> build_batches(std::span<const Rollout> rollouts,
                                      const RaceOptions& options) {
  std::vector<MicroBatch> batches;
  for (auto& members : plan_rollouts(rollouts, options.forest.sharing, options.micro_batches)) {
    if (members.empty()) continue;
    std::vector<Sample> samples;
    for (const int64_t member : members)
      samples.push_back(rollouts[static_cast<size_t>(member)].sample());
    batches.push_back(
        {Batch::from(PrefixForest::build(samples, options.forest)), std::move(members)});
  }
  return batches;
}

/// Policy loss on the rollouts' advantages (1 where a line has none), on-policy.
at::Tensor race_loss(const LogprobResult& result, std::span<const Rollout> rollouts,
                     const std::vector<int64_t>& members, int64_t denominator) {
  std::vector<double> advantages;
  for (const int64_t member : members) {
    const Rollout& rollout = rollouts[static_cast<size_t>(member)];
    if (rollout.advantages.empty())
      advantages.insert(advantages.end(), static_cast<size_t>(rollout.num_scored()), 1.0);
    else
      advantages.insert(advantages.end(), rollout.advantages.begin(), rollout.advantages.end());
  }
  PolicyLossInput input;
  input.logprob = result.logprob;
  input.entropy = result.entropy;
  input.old_logprob = result.logprob.detach();
  input.advantage =
      at::tensor(advantages, at::kDouble).nan_to_num().to(result.logprob.scalar_type());
  input.mask = result.logprob.detach() <= 0;
  return policy_loss(input, denominator, {}).loss;
}

int64_t live_bytes(const MemoryProbe& memory) { return memory.live ? memory.live() : 0; }

int64_t num_scored_tokens(std::span<const Rollout> rollouts) {
  int64_t tokens = 0;
  for (const Rollout& rollout : rollouts) tokens += rollout.num_scored();
  return tokens;
}

/// One update of an arm without its optimizer step.
class Update {
 public:
  Update(CausalLM& model, std::span<const Rollout> rollouts, const RaceOptions& options)
      : model_(model), rollouts_(rollouts), options_(options) {}

  PhaseSeconds run(ArmResult* arm) {
    PhaseSeconds seconds;
    const int64_t before = live_bytes(options_.memory);
    if (options_.memory.reset) options_.memory.reset();
    Clock::time_point start = Clock::now();
    const std::vector<MicroBatch> batches = build_batches(rollouts_, options_);
    seconds.group = seconds_since(start);
    const int64_t denominator = num_scored_tokens(rollouts_);
    for (const MicroBatch& part : batches) {
      start = Clock::now();
      const LogprobResult result =
          model_.score(part.batch, temperatures(rollouts_, part.members, options_.temperature),
                       options_.forward);
      const at::Tensor loss = race_loss(result, rollouts_, part.members, denominator);
      seconds.forward += seconds_since(start);
      start = Clock::now();
      if (loss.requires_grad()) loss.backward();
      seconds.backward += seconds_since(start);
    }
    if (arm != nullptr && options_.memory.peak)
      arm->peak_bytes = std::max(arm->peak_bytes, options_.memory.peak() - before);
    return seconds;
  }

  /// Work, FLOPs and the bytes that forward keeps; runs one forward pass.
  void measure(ArmResult& arm) {
    const ModelCost per_unit = model_cost(model_.config());
    for (const MicroBatch& part : build_batches(rollouts_, options_)) {
      const ForestWork work = forest_work(part.batch.forest);
      arm.work.tokens += work.tokens;
      arm.work.pairs += work.pairs;
      arm.work.predictors += work.predictors;
      arm.work.scored += work.scored;
      ++arm.num_micro_batches;
      if (options_.memory.live) measure_bytes(part, arm);
    }
    arm.flops = cost(arm.work, per_unit);
  }

 private:
  /// The layers alone, then layers and head: what each keeps for backward.
  void measure_bytes(const MicroBatch& part, ArmResult& arm) {
    const int64_t before = live_bytes(options_.memory);
    int64_t layers = 0;
    {  // the hidden rows themselves are handed on, not kept
      const at::Tensor hidden = model_.hidden_states(part.batch, options_.forward);
      layers = live_bytes(options_.memory) - before - static_cast<int64_t>(hidden.nbytes());
    }
    const LogprobResult result = model_.score(
        part.batch, temperatures(rollouts_, part.members, options_.temperature), options_.forward);
    arm.layer_bytes += layers;
    arm.head_bytes += live_bytes(options_.memory) - before - layers;
  }

  CausalLM& model_;
  std::span<const Rollout> rollouts_;
  const RaceOptions& options_;
};

void drop_gradients(CausalLM& model) {
  for (const Weight& weight : model.weights()) weight.slot->mutable_grad().reset();
}

/// An optimizer step on copies of the weights, so that the model stays as it was.
double time_optimizer(CausalLM& model, const AdamWOptions& options) {
  std::vector<at::Tensor> copies;
  for (const Weight& weight : model.weights()) {
    at::Tensor copy = weight.slot->detach().clone().requires_grad_(true);
    copy.mutable_grad() = weight.slot->grad();
    copies.push_back(copy);
  }
  AdamW optimizer(copies, options);
  optimizer.step();  // the first step pays for touching the state
  const Clock::time_point start = Clock::now();
  optimizer.step();
  return seconds_since(start);
}

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void summarise(RaceResult& result, int64_t replicated_tokens) {
  const double dedup_flops = result.dedup.flops.total();
  result.bound = dedup_flops > 0 ? result.naive.flops.total() / dedup_flops : 1;
  if (result.dedup.work.tokens > 0)
    result.token_ratio =
        static_cast<double>(replicated_tokens) / static_cast<double>(result.dedup.work.tokens);
  std::vector<double> speedups;
  for (size_t pair = 0; pair < result.dedup.runs.size(); ++pair)
    speedups.push_back(result.naive.runs[pair].update() / result.dedup.runs[pair].update());
  result.speedup = median_of(speedups);
  result.slowest_speedup = *std::min_element(speedups.begin(), speedups.end());
  result.fastest_speedup = *std::max_element(speedups.begin(), speedups.end());
}

}  // namespace

PhaseSeconds ArmResult::median() const {
  const auto median_phase = [this](double PhaseSeconds::* phase) {
    std::vector<double> values;
    for (const PhaseSeconds& run : runs) values.push_back(run.*phase);
    return median_of(values);
  };
  return {median_phase(&PhaseSeconds::group), median_phase(&PhaseSeconds::forward),
          median_phase(&PhaseSeconds::backward), median_phase(&PhaseSeconds::optimizer)};
}

RaceResult race(CausalLM& model, std::span<const Rollout> rollouts, const RaceOptions& options,
                const TokenProgress& progress) {
  ZORRO_CHECK(options.num_pairs >= 1 && options.warm_up >= 0,
              "[bench] pairs must be >= 1 and warm-up >= 0, got ", options.num_pairs, " and ",
              options.warm_up, ".");
  check_token_ids(rollouts, model.config().vocab_size);
  RaceOptions naive_options = options;
  naive_options.forest.sharing = Sharing::kNone;
  RaceResult result;
  Update dedup(model, rollouts, options), naive(model, rollouts, naive_options);
  drop_gradients(model);
  const int64_t all = 2 * (options.warm_up + options.num_pairs);
  int64_t done = 0;
  for (int64_t pair = -options.warm_up; pair < options.num_pairs; ++pair) {
    for (auto [update, arm] : {std::pair{&dedup, &result.dedup}, {&naive, &result.naive}}) {
      if (progress) progress(done, all);
      PhaseSeconds seconds = update->run(arm);
      if (pair == options.num_pairs - 1)
        seconds.optimizer = time_optimizer(model, options.optimizer);
      drop_gradients(model);
      if (pair >= 0) arm->runs.push_back(seconds);
      ++done;
    }
  }
  for (ArmResult* arm : {&result.dedup, &result.naive})  // the step is the same in every run
    for (PhaseSeconds& run : arm->runs) run.optimizer = arm->runs.back().optimizer;
  dedup.measure(result.dedup);
  naive.measure(result.naive);
  if (progress) progress(all, all);
  int64_t replicated = 0;
  for (const Rollout& rollout : rollouts)
    replicated += static_cast<int64_t>(rollout.token_ids.size());
  summarise(result, replicated);
  return result;
}

std::map<std::string, int64_t> count_operators(CausalLM& model, std::span<const Rollout> rollouts,
                                               const RaceOptions& options) {
  RaceOptions quiet = options;
  quiet.memory = {};
  const std::map<std::string, int64_t> counts =
      count_operators_of([&] { Update(model, rollouts, quiet).run(nullptr); });
  drop_gradients(model);
  return counts;
}

}  // namespace zorro
