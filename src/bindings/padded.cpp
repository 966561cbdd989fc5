#include "bindings/padded.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <span>
#include <vector>

#include "zorro/core/error.h"

namespace zorro::bindings {
namespace {

at::Tensor to_host(const at::Tensor& tensor) {
  return tensor.to(at::TensorOptions(at::kCPU).dtype(at::kLong)).contiguous();
}

std::span<const int64_t> view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr<int64_t>(), static_cast<size_t>(tensor.numel())};
}

void check_ids(const at::Tensor& input_ids, int64_t response_length) {
  ZORRO_CHECK(input_ids.dim() == 2, "[zorro] input_ids must be [batch, sequence], got shape ",
              input_ids.sizes(), ".");
  ZORRO_CHECK(at::isIntegralType(input_ids.scalar_type(), false),
              "[zorro] input_ids must be integers, got ", input_ids.scalar_type(), ".");
  ZORRO_CHECK(input_ids.size(0) > 0, "[zorro] input_ids must have at least one row, got shape ",
              input_ids.sizes(), ".");
  ZORRO_CHECK(response_length >= 0 && response_length <= input_ids.size(1),
              "[zorro] response_length must lie in [0, ", input_ids.size(1),
              "], the width of input_ids, got ", response_length,
              ". Pass the width of the response block at the right end of the rows.");
}

at::Tensor checked_mask(const at::Tensor& mask, const at::Tensor& input_ids) {
  ZORRO_CHECK(mask.sizes() == input_ids.sizes(), "[zorro] attention_mask must be ",
              input_ids.sizes(), " as input_ids, got shape ", mask.sizes(),
              ". A 4-D mask cannot be shared: pass the padding mask.");
  at::Tensor host = to_host(mask);
  ZORRO_CHECK(
      !at::isFloatingType(mask.scalar_type()) || at::equal(host.to(mask.scalar_type()), mask.cpu()),
      "[zorro] attention_mask must hold 0 and 1, got a fraction. Pass the padding mask.");
  const auto values = view(host);
  for (size_t cell = 0; cell < values.size(); ++cell)
    ZORRO_CHECK(values[cell] == 0 || values[cell] == 1,
                "[zorro] attention_mask must hold 0 and 1, got ", values[cell], " in row ",
                static_cast<int64_t>(cell) / mask.size(1), ", column ",
                static_cast<int64_t>(cell) % mask.size(1), ". Pass the padding mask.");
  return host;
}

/// [A, B, S]: whatever form the caller uses.
at::Tensor with_axes(const at::Tensor& position_ids, const at::Tensor& input_ids) {
  const int64_t rows = input_ids.size(0), width = input_ids.size(1);
  const int64_t dims = position_ids.dim();
  const bool fits = dims >= 1 && dims <= 3 && position_ids.size(-1) == width &&
                    (dims < 2 || position_ids.size(-2) == rows || position_ids.size(-2) == 1) &&
                    (dims < 3 || position_ids.size(0) >= 1);
  ZORRO_CHECK(fits, "[zorro] position_ids must be [", width, "], [", rows, ", ", width,
              "] or [axes, ", rows, ", ", width, "], got shape ", position_ids.sizes(), ".");
  ZORRO_CHECK(at::isIntegralType(position_ids.scalar_type(), false),
              "[zorro] position_ids must be integers, got ", position_ids.scalar_type(), ".");
  const int64_t axes = dims == 3 ? position_ids.size(0) : 1;
  return to_host(position_ids.view_as(position_ids).expand({axes, rows, width}));
}

bool axes_agree(const at::Tensor& positions, const at::Tensor& mask) {
  const auto values = view(positions);
  const auto valid = view(mask);
  const size_t cells = values.size() / static_cast<size_t>(positions.size(0));
  for (size_t i = cells; i < values.size(); ++i)
    if ((valid.empty() || valid[i % cells] == 1) && values[i] != values[i % cells]) return false;
  return true;
}

}  // namespace

PaddedInput padded_input(const at::Tensor& input_ids,
                         const std::optional<at::Tensor>& attention_mask,
                         const std::optional<at::Tensor>& position_ids, int64_t response_length) {
  check_ids(input_ids, response_length);
  PaddedInput input;
  input.token_ids = to_host(input_ids);
  if (attention_mask) input.attention_mask = checked_mask(*attention_mask, input_ids);
  if (position_ids) {
    input.positions = with_axes(*position_ids, input_ids);
    if (axes_agree(input.positions, input.attention_mask))
      input.positions = input.positions.narrow(0, 0, 1);
  }
  PaddedBatch& batch = input.batch;
  batch.num_rows = input_ids.size(0);
  batch.width = input_ids.size(1);
  batch.response_width = response_length;
  batch.token_ids = view(input.token_ids);
  batch.attention_mask = view(input.attention_mask);
  batch.positions = view(input.positions);
  batch.num_axes = input.positions.defined() ? input.positions.size(0) : 1;
  return input;
}

at::Tensor to_tensor(const std::vector<int64_t>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

}  // namespace zorro::bindings
