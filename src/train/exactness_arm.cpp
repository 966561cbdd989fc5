#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "zorro/core/error.h"
#include "zorro/core/random.h"
#include "zorro/train/exactness.h"

namespace zorro {
namespace {

constexpr double kEntropyWeight = 0.1;

/// Per scored token of all rollouts, in their order.
struct LossTerms {
  at::Tensor logprob_weight, entropy_weight;       // [M] float64
  at::Tensor advantage, old_logprob, ref_logprob;  // [M] float64, for the training loss
  at::Tensor mask;                                 // [M] bool
  std::vector<int64_t> offsets;                    // [rollouts + 1]
  int64_t num_loss_tokens = 0;
};

void draw_weights(LossTerms& terms, uint64_t seed) {
  Random random(seed);
  std::vector<double> w, u;
  for (int64_t token = 0; token < terms.offsets.back(); ++token) {
    w.push_back(random.normal());
    u.push_back(random.normal());
  }
  terms.logprob_weight = at::tensor(w, at::kDouble);
  terms.entropy_weight = at::tensor(u, at::kDouble);
}

/// One array of all rollouts, or undefined when none has it.
at::Tensor joined(std::span<const Rollout> rollouts, std::vector<double> Rollout::* field,
                  const char* key) {
  std::vector<double> values;
  int64_t with = 0;
  for (const Rollout& rollout : rollouts) {
    const std::vector<double>& own = rollout.*field;
    with += !own.empty() || rollout.num_scored() == 0;
    values.insert(values.end(), own.begin(), own.end());
  }
  if (values.empty()) return {};
  ZORRO_CHECK(with == static_cast<int64_t>(rollouts.size()), "[check] ", key,
              " must stand in every line or in none, got it in ", with, " of ", rollouts.size(),
              ".");
  return at::tensor(values, at::kDouble).nan_to_num();  // NaN stands where the mask is 0
}

LossTerms make_terms(std::span<const Rollout> rollouts, const ArmOptions& options) {
  LossTerms terms;
  terms.offsets.push_back(0);
  for (const Rollout& rollout : rollouts)
    terms.offsets.push_back(terms.offsets.back() + rollout.num_scored());
  draw_weights(terms, options.loss_seed);
  if (!options.policy_loss) return terms;
  std::vector<uint8_t> mask;
  for (const Rollout& rollout : rollouts)
    mask.insert(mask.end(), rollout.loss_mask.begin(), rollout.loss_mask.end());
  terms.mask = at::tensor(at::ArrayRef<uint8_t>(mask), at::kByte).to(at::kBool);
  terms.num_loss_tokens = terms.mask.sum().item<int64_t>();
  terms.advantage = joined(rollouts, &Rollout::advantages, "advantage");
  ZORRO_CHECK(terms.advantage.defined() || terms.offsets.back() == 0,
              "[check] rollouts must have advantages for a training loss, got none. Leave --loss "
              "out or add the key advantage.");
  terms.old_logprob = joined(rollouts, &Rollout::old_logprobs, "old_logprobs");
  terms.ref_logprob = joined(rollouts, &Rollout::ref_logprobs, "ref_logprobs");
  return terms;
}

/// Order in which the rollouts are handed over: a Fisher-Yates shuffle, or as they come.
std::vector<int64_t> make_order(size_t count, const std::optional<uint64_t>& seed) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (!seed) return order;
  Random random(*seed);
  for (size_t last = count; last > 1; --last)
    std::swap(order[last - 1],
              order[static_cast<size_t>(random.below(static_cast<int64_t>(last)))]);
  return order;
}

/// The cells of one block of a padded row: tokens at its begin or at its end.
void put_block(std::span<const int64_t> tokens, int64_t* ids, int64_t* mask, int64_t width,
               bool pad_first) {
  const auto length = static_cast<int64_t>(tokens.size());
  const int64_t begin = pad_first ? width - length : 0;
  std::copy(tokens.begin(), tokens.end(), ids + begin);
  std::fill_n(mask + begin, length, 1);
}

/// The samples of a micro-batch after a trip through a rectangular batch with a mask. The pads hold
/// the id of a real token, so that only the mask can tell them.
PaddedSamples padded_samples(const std::vector<const Rollout*>& rollouts, Layout layout) {
  int64_t prompt_width = 0, response_width = 0;
  for (const Rollout* rollout : rollouts) {
    prompt_width = std::max(prompt_width, rollout->scored_begin);
    response_width = std::max(response_width, rollout->num_scored());
  }
  const int64_t width = prompt_width + response_width;
  const auto cells = static_cast<size_t>(width) * rollouts.size();
  std::vector<int64_t> ids(cells, rollouts.front()->token_ids.front()), mask(cells, 0);
  for (size_t row = 0; row < rollouts.size(); ++row) {
    const std::span<const int64_t> tokens = rollouts[row]->token_ids;
    const auto scored = static_cast<size_t>(rollouts[row]->scored_begin);
    int64_t* row_ids = ids.data() + static_cast<int64_t>(row) * width;
    int64_t* row_mask = mask.data() + static_cast<int64_t>(row) * width;
    put_block(tokens.first(scored), row_ids, row_mask, prompt_width, layout != Layout::kRight);
    put_block(tokens.subspan(scored), row_ids + prompt_width, row_mask + prompt_width,
              response_width, layout == Layout::kLeft);
  }
  PaddedBatch batch;
  batch.num_rows = static_cast<int64_t>(rollouts.size());
  batch.width = width;
  batch.response_width = response_width;
  batch.token_ids = ids;
  batch.attention_mask = mask;
  PaddedSamples samples = samples_from_padded(batch);
  for (size_t row = 0; row < rollouts.size(); ++row)
    samples.samples[row].prompt_length = rollouts[row]->prompt_length;
  return samples;
}

Batch make_batch(std::span<const Rollout> rollouts, std::span<const int64_t> members,
                 const ArmOptions& options) {
  std::vector<const Rollout*> rows;
  for (const int64_t member : members) rows.push_back(&rollouts[static_cast<size_t>(member)]);
  PaddedSamples padded;  // outlives the build: the samples point into it
  std::vector<Sample> samples;
  if (options.layout == Layout::kRagged) {
    for (const Rollout* row : rows) samples.push_back(row->sample());
  } else {
    padded = padded_samples(rows, options.layout);
    samples = padded.samples;
  }
  PrefixForest forest = PrefixForest::build(samples, options.forest);
  if (options.edit_forest) options.edit_forest(forest);
  return Batch::from(std::move(forest));
}

/// Places of a micro-batch's scored tokens in the order of all rollouts: [m] int64.
at::Tensor token_places(std::span<const int64_t> members, const LossTerms& terms) {
  std::vector<int64_t> places;
  for (const int64_t member : members)
    for (int64_t token = terms.offsets[static_cast<size_t>(member)];
         token < terms.offsets[static_cast<size_t>(member) + 1]; ++token)
      places.push_back(token);
  return at::tensor(places, at::kLong);
}

at::Tensor pick(const at::Tensor& all, const at::Tensor& places) {
  return all.defined() ? all.index_select(0, places) : all;
}

at::Tensor training_loss(const LogprobResult& result, const LossTerms& terms,
                         const at::Tensor& places, const PolicyLossOptions& options) {
  PolicyLossInput input;
  input.logprob = result.logprob;
  input.entropy = result.entropy;
  const auto dtype = result.logprob.scalar_type();
  input.old_logprob = terms.old_logprob.defined() ? pick(terms.old_logprob, places).to(dtype)
                                                  : result.logprob.detach();
  if (terms.ref_logprob.defined()) input.ref_logprob = pick(terms.ref_logprob, places).to(dtype);
  input.advantage = pick(terms.advantage, places).to(dtype);
  input.mask = pick(terms.mask, places);
  return policy_loss(input, terms.num_loss_tokens, options).loss;
}

at::Tensor whole_loss(const LogprobResult& result, const LossTerms& terms, const at::Tensor& places,
                      const ArmOptions& options) {
  const auto dtype = result.logprob.scalar_type();
  const at::Tensor w = pick(terms.logprob_weight, places).to(dtype);
  const at::Tensor u = pick(terms.entropy_weight, places).to(dtype);
  at::Tensor loss = (w * result.logprob).sum() + kEntropyWeight * (u * result.entropy).sum();
  if (options.policy_loss && terms.num_loss_tokens > 0 && places.numel() > 0)
    loss = loss + training_loss(result, terms, places, *options.policy_loss);
  return loss;
}

/// Moves the gradients of a micro-batch from the weights into the sums.
void take_gradients(std::vector<Weight>& weights, NamedTensors& sums) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < weights.size(); ++i) {
    at::Tensor& gradient = weights[i].slot->mutable_grad();
    if (gradient.defined()) sums[i].second.add_(gradient);
    gradient.reset();
  }
}

NamedTensors zero_sums(const std::vector<Weight>& weights) {
  NamedTensors sums;
  for (const Weight& weight : weights) {
    const bool is_double = weight.slot->scalar_type() == at::kDouble;
    sums.emplace_back(weight.name, at::zeros(weight.shape, is_double ? at::kDouble : at::kFloat));
  }
  return sums;
}

}  // namespace

ArmNumbers run_arm(CausalLM& model, std::span<const Rollout> rollouts, const ArmOptions& options,
                   const TokenProgress& progress) {
  check_token_ids(rollouts, model.config().vocab_size);
  const LossTerms terms = make_terms(rollouts, options);
  const std::vector<int64_t> order = make_order(rollouts.size(), options.permute_seed);
  std::vector<Rollout> ordered;
  for (const int64_t index : order) ordered.push_back(rollouts[static_cast<size_t>(index)]);

  std::vector<Weight> weights = model.weights();
  for (const Weight& weight : weights) weight.slot->mutable_grad().reset();
  ArmNumbers numbers;
  numbers.gradients = zero_sums(weights);
  numbers.logprob = at::zeros({terms.offsets.back()}, at::kDouble);
  numbers.entropy = numbers.logprob.clone();
  for (const Rollout& rollout : rollouts)
    numbers.replicated_tokens += static_cast<int64_t>(rollout.token_ids.size());

  int64_t done = 0;
  for (const auto& part : plan_rollouts(ordered, options.forest.sharing, options.micro_batches)) {
    if (part.empty()) continue;
    if (progress) progress(done, numbers.replicated_tokens);
    std::vector<int64_t> members;
    for (const int64_t i : part) members.push_back(order[static_cast<size_t>(i)]);
    const Batch batch = make_batch(rollouts, members, options);
    const at::Tensor places = token_places(members, terms);
    const LogprobResult result =
        model.score(batch, temperatures(rollouts, members, options.temperature), options.forward);
    const at::Tensor loss = whole_loss(result, terms, places, options);
    if (loss.requires_grad()) loss.backward();
    take_gradients(weights, numbers.gradients);
    numbers.loss += loss.item<double>();
    numbers.logprob.index_copy_(0, places, result.logprob.detach().to(at::kDouble));
    numbers.entropy.index_copy_(0, places, result.entropy.detach().to(at::kDouble));
    numbers.packed_tokens += batch.forest.num_tokens();
    ++numbers.num_micro_batches;
    done += batch.forest.num_replicated_tokens();
  }
  if (progress) progress(done, numbers.replicated_tokens);
  return numbers;
}

}  // namespace zorro
