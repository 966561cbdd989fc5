#include <ATen/ops/full.h>
#include <torch/library.h>

#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "bindings/padded.h"
#include "zorro/core/error.h"
#include "zorro/forest/prefix_forest.h"
#include "zorro/plan/cost.h"
#include "zorro/plan/micro_batches.h"
#include "zorro/train/model_cost.h"

namespace zorro::bindings {
namespace {

/// The part of each sample under a cap on packed tokens: [B], and how many parts there are.
std::tuple<at::Tensor, int64_t> plan(const at::Tensor& group, const at::Tensor& prompt_length,
                                     const at::Tensor& response_length, int64_t max_tokens,
                                     int64_t num_parts) {
  const int64_t count = group.numel();
  ZORRO_CHECK(prompt_length.numel() == count && response_length.numel() == count,
              "[plan] prompt_length and response_length must have one value a sample, ", count,
              ", got ", prompt_length.numel(), " and ", response_length.numel(), ".");
  const auto host = [](const at::Tensor& values) {
    return values.to(at::TensorOptions(at::kCPU).dtype(at::kLong)).contiguous();
  };
  const at::Tensor groups = host(group), prompts = host(prompt_length),
                   responses = host(response_length);
  std::vector<PlanSample> samples;
  for (int64_t i = 0; i < count; ++i)
    samples.push_back({groups.const_data_ptr<int64_t>()[i], prompts.const_data_ptr<int64_t>()[i],
                       responses.const_data_ptr<int64_t>()[i]});
  const auto parts = plan_micro_batches(samples, {max_tokens, num_parts});
  at::Tensor part_of = at::full({count}, -1, at::kLong);
  for (size_t part = 0; part < parts.size(); ++part)
    for (const int64_t member : parts[part])
      part_of.mutable_data_ptr<int64_t>()[member] = static_cast<int64_t>(part);
  return {part_of, static_cast<int64_t>(parts.size())};
}

/// rho and S of a batch under the model of a config.json text.
std::tuple<double, double> speedup(const at::Tensor& input_ids,
                                   const std::optional<at::Tensor>& attention_mask,
                                   int64_t response_length, c10::string_view config) {
  const PaddedInput input = padded_input(input_ids, attention_mask, std::nullopt, response_length);
  const PaddedSamples padded = samples_from_padded(input.batch);
  const PrefixForest forest = PrefixForest::build(padded.samples, {});
  const ModelCost cost = model_cost(parse_model_config({config.data(), config.size()}, "config"));
  return {token_ratio(forest), speedup_bound(forest, cost)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def(
      "plan_micro_batches(Tensor group, Tensor prompt_length, Tensor response_length, "
      "int max_tokens, int num_parts) -> (Tensor part, int num_parts)",
      plan);
  m.def(
      "speedup_bound(Tensor input_ids, Tensor? attention_mask, int response_length, str config) "
      "-> (float rho, float bound)",
      speedup);
}

}  // namespace zorro::bindings
