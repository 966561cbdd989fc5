#include "zorro/ops/linear_logprob.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "ops/checks.h"
#include "ops/linear_logprob_tiles.h"

namespace zorro {
namespace {

constexpr const char* kOp = "linear_logprob";

// logprob, entropy, maximum, log_sum [M], logits [U, V] or [0].
using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Backward = std::tuple<at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

struct ModeName {
  HeadMode mode;
  std::string_view name;
};
constexpr std::array<ModeName, 3> kModeNames{
    {{HeadMode::kNone, "none"}, {HeadMode::kCompute, "compute"}, {HeadMode::kMemory, "memory"}}};

HeadMode parse_mode(std::string_view name) {
  for (const ModeName& entry : kModeNames) {
    if (entry.name == name) return entry.mode;
  }
  ZORRO_CHECK(false, "[", kOp, "] mode must be none, compute or memory, got ", name, ".");
}

std::string_view mode_name(HeadMode mode) {
  for (const ModeName& entry : kModeNames) {
    if (entry.mode == mode) return entry.name;
  }
  ZORRO_CHECK(false, "[", kOp, "] mode must be a HeadMode, got ", static_cast<int>(mode), ".");
}

void check_forms(const head::HeadInputs& in, int64_t budget_bytes) {
  check_dims(kOp, "hidden", in.hidden, 2, "[U, H]");
  check_dims(kOp, "weight", in.weight, 2, "[V, H]");
  check_dims(kOp, "row", in.row, 1, "[M]");
  check_dims(kOp, "label", in.label, 1, "[M]");
  check_float_dtype(kOp, "hidden", in.hidden);
  check_same_dtype(kOp, "weight", in.weight, in.hidden);
  check_int64(kOp, "row", in.row);
  check_int64(kOp, "label", in.label);
  check_size(kOp, "weight", in.weight, 1, in.hidden.size(1));
  check_size(kOp, "label", in.label, 0, in.row.size(0));
  ZORRO_CHECK(in.weight.size(0) > 0, "[", kOp, "] weight must have at least one row, got shape ",
              in.weight.sizes(), ".");
  ZORRO_CHECK(in.temperature.defined() &&
                  (in.temperature.dim() == 0 ||
                   (in.temperature.dim() == 1 && in.temperature.size(0) == in.row.size(0))),
              "[", kOp, "] temperature must be a scalar or [M] with M = ", in.row.size(0), ", got ",
              in.temperature.defined() ? concat("shape ", in.temperature.sizes()) : "nothing", ".");
  ZORRO_CHECK(at::isFloatingType(in.temperature.scalar_type()), "[", kOp,
              "] temperature must be floating point, got ", in.temperature.scalar_type(), ".");
  check_same_device(kOp, "weight", in.weight, in.hidden);
  check_same_device(kOp, "row", in.row, in.hidden);
  check_same_device(kOp, "label", in.label, in.hidden);
  if (in.temperature.dim() != 0) check_same_device(kOp, "temperature", in.temperature, in.hidden);
  ZORRO_CHECK(budget_bytes > 0, "[", kOp, "] budget_bytes must be > 0, got ", budget_bytes, ".");
}

void check_index(const char* name, const at::Tensor& index, int64_t end, const char* meaning) {
  const at::Tensor host = index.to(at::kCPU).contiguous();
  const auto* values = host.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < host.numel(); ++i) {
    ZORRO_CHECK(values[i] >= 0 && values[i] < end, "[", kOp, "] ", name, "[", i,
                "] must be in [0, ", end, "), ", meaning, ", got ", values[i], ".");
  }
}

// Judged in the type that divides the logits: a value that rounds to 0 or infinity there is as bad
// as one.
void check_temperature(const at::Tensor& temperature, at::ScalarType type) {
  const at::Tensor given =
      temperature.to(at::TensorOptions(at::kCPU).dtype(at::kDouble)).contiguous();
  const at::Tensor used = given.to(type).to(at::kDouble);
  const auto* values = used.const_data_ptr<double>();
  const double smallest = type == at::kDouble ? std::numeric_limits<double>::min()
                                              : double{std::numeric_limits<float>::min()};
  for (int64_t i = 0; i < used.numel(); ++i) {
    ZORRO_CHECK(values[i] >= smallest && std::isfinite(values[i]), "[", kOp, "] temperature",
                temperature.dim() == 0 ? "" : concat("[", i, "]"), " must be > 0 and finite, got ",
                given.const_data_ptr<double>()[i],
                ". Greedy decoding has no log-probabilities to score.");
  }
}

void check_values(const head::HeadInputs& in) {
  check_index("row", in.row, in.hidden.size(0), "the hidden rows");
  check_index("label", in.label, in.weight.size(0), "the vocabulary");
  check_temperature(in.temperature, accumulate_dtype(in.hidden.scalar_type()));
}

Forward forward(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& row,
                const at::Tensor& label, const at::Tensor& temperature, c10::string_view mode_text,
                int64_t budget_bytes) {
  const HeadMode mode = parse_mode(mode_text);
  const head::HeadInputs inputs{hidden, weight, row, label, temperature};
  check_forms(inputs, budget_bytes);
  check_values(inputs);
  const head::HeadMath math = head::default_math(hidden.device());
  head::HeadForward result =
      head::head_forward(inputs, mode != HeadMode::kMemory,
                         head::plan_tiles(mode, hidden, weight, budget_bytes, math), math);
  return {result.logprob, result.entropy, result.maximum, result.log_sum, result.logits};
}

Forward forward_meta(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& row,
                     const at::Tensor& label, const at::Tensor& temperature,
                     c10::string_view mode_text, int64_t budget_bytes) {
  const HeadMode mode = parse_mode(mode_text);
  check_forms({hidden, weight, row, label, temperature}, budget_bytes);
  const auto options = hidden.options().dtype(accumulate_dtype(hidden.scalar_type()));
  const auto of_tokens = [&] { return at::empty_symint({row.sym_size(0)}, options); };
  const at::Tensor logits =
      mode == HeadMode::kMemory
          ? at::empty({0}, options)
          : at::empty_symint({hidden.sym_size(0), weight.sym_size(0)}, options);
  return {of_tokens(), of_tokens(), of_tokens(), of_tokens(), logits};
}

Backward backward(const OptionalTensor& logprob_grad, const OptionalTensor& entropy_grad,
                  const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& row,
                  const at::Tensor& label, const at::Tensor& temperature, const at::Tensor& entropy,
                  const at::Tensor& maximum, const at::Tensor& log_sum, const at::Tensor& logits,
                  c10::string_view mode_text, int64_t budget_bytes, std::array<bool, 2> wanted) {
  const HeadMode mode = parse_mode(mode_text);
  const head::HeadMath math = head::default_math(hidden.device());
  const auto gradients = head::head_backward(
      {logprob_grad.value_or(at::Tensor()), entropy_grad.value_or(at::Tensor())},
      {hidden, weight, row, label, temperature}, {{}, entropy, maximum, log_sum, logits}, wanted[0],
      wanted[1], head::plan_tiles(mode, hidden, weight, budget_bytes, math), math);
  return {gradients.first, gradients.second};
}

Backward backward_meta(const OptionalTensor& /*logprob_grad*/,
                       const OptionalTensor& /*entropy_grad*/, const at::Tensor& hidden,
                       const at::Tensor& weight, const at::Tensor& /*row*/,
                       const at::Tensor& /*label*/, const at::Tensor& /*temperature*/,
                       const at::Tensor& /*entropy*/, const at::Tensor& /*maximum*/,
                       const at::Tensor& /*log_sum*/, const at::Tensor& /*logits*/,
                       c10::string_view /*mode_text*/, int64_t /*budget_bytes*/,
                       std::array<bool, 2> wanted) {
  const auto like = [](bool want, const at::Tensor& x) {
    return want ? at::empty_like(x, at::MemoryFormat::Contiguous) : at::Tensor();
  };
  return {like(wanted[0], hidden), like(wanted[1], weight)};
}

}  // namespace

LogprobResult linear_logprob(const at::Tensor& hidden, const at::Tensor& weight,
                             const at::Tensor& row, const at::Tensor& label,
                             const at::Tensor& temperature, const LinearLogprobOptions& options) {
  // Before the dispatcher, which has a message of its own for an undefined tensor.
  check_forms({hidden, weight, row, label, temperature}, options.budget_bytes);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zorro::linear_logprob", "")
                             .typed<decltype(forward)>();
  const Forward result = op.call(hidden, weight, row, label, temperature, mode_name(options.mode),
                                 options.budget_bytes);
  return {std::get<0>(result), std::get<1>(result)};
}

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def(
      "linear_logprob(Tensor hidden, Tensor weight, Tensor row, Tensor label, Tensor temperature, "
      "str mode, "
      "int budget_bytes) -> (Tensor logprob, Tensor entropy, Tensor maximum, Tensor log_sum, "
      "Tensor logits)");
  m.def(
      "linear_logprob_backward(Tensor? logprob_grad, Tensor? entropy_grad, Tensor hidden, Tensor "
      "weight, "
      "Tensor row, Tensor label, Tensor temperature, Tensor entropy, Tensor maximum, Tensor "
      "log_sum, "
      "Tensor logits, str mode, int budget_bytes, bool[2] wanted) -> (Tensor hidden_grad, Tensor "
      "weight_grad)");
}

TORCH_LIBRARY_IMPL(zorro, CompositeExplicitAutograd, m) {
  m.impl("linear_logprob", &forward);
  m.impl("linear_logprob_backward", &backward);
}

TORCH_LIBRARY_IMPL(zorro, Meta, m) {
  m.impl("linear_logprob", &forward_meta);
  m.impl("linear_logprob_backward", &backward_meta);
}

}  // namespace zorro
