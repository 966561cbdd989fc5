#include "ops/linear_logprob_groups.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace zorro::head {
namespace {

at::Tensor to_host(const at::Tensor& x, at::ScalarType type) {
  return x.to(at::TensorOptions(at::kCPU).dtype(type)).contiguous();
}

at::Tensor to_device(const std::vector<int64_t>& values, at::Device device) {
  at::Tensor result = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<int64_t>());
  return result.to(device);
}

std::vector<int64_t> kept_tokens(const at::Tensor& keep, int64_t count) {
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), int64_t{0});
  if (keep.defined()) {
    const at::Tensor host = to_host(keep, at::kBool);
    const bool* marks = host.const_data_ptr<bool>();
    std::erase_if(tokens, [marks](int64_t token) { return !marks[token]; });
  }
  return tokens;
}

}  // namespace

HeadGroups group_tokens(const at::Tensor& row, const at::Tensor& label,
                        const at::Tensor& temperature, const at::Tensor& keep,
                        int64_t hidden_rows) {
  const at::Tensor host_row = to_host(row, at::kLong);
  const at::Tensor host_label = to_host(label, at::kLong);
  const at::Tensor host_temperature = to_host(temperature.expand_as(row), at::kDouble);
  const auto* rows_of = host_row.const_data_ptr<int64_t>();
  const auto* labels_of = host_label.const_data_ptr<int64_t>();
  const auto* temperatures_of = host_temperature.const_data_ptr<double>();

  std::vector<int64_t> tokens = kept_tokens(keep, row.numel());
  std::stable_sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) {
    if (rows_of[a] != rows_of[b]) return rows_of[a] < rows_of[b];
    return temperatures_of[a] < temperatures_of[b];
  });

  std::vector<int64_t> rows, pair_offsets, token_offsets, pair_row, token_pair, label_in_order;
  std::vector<double> pair_temperature;
  for (size_t place = 0; place < tokens.size(); ++place) {
    const int64_t token = tokens[place];
    const bool new_row = rows.empty() || rows.back() != rows_of[token];
    if (new_row) {
      rows.push_back(rows_of[token]);
      pair_offsets.push_back(static_cast<int64_t>(pair_row.size()));
    }
    if (new_row || pair_temperature.back() != temperatures_of[token]) {
      pair_row.push_back(static_cast<int64_t>(rows.size()) - 1);
      pair_temperature.push_back(temperatures_of[token]);
      token_offsets.push_back(static_cast<int64_t>(place));
    }
    token_pair.push_back(static_cast<int64_t>(pair_row.size()) - 1);
    label_in_order.push_back(labels_of[token]);
  }
  pair_offsets.push_back(static_cast<int64_t>(pair_row.size()));
  token_offsets.push_back(static_cast<int64_t>(tokens.size()));

  HeadGroups groups;
  groups.num_rows = static_cast<int64_t>(rows.size());
  groups.num_pairs = static_cast<int64_t>(pair_row.size());
  groups.num_tokens = static_cast<int64_t>(tokens.size());
  groups.all_rows = groups.num_rows == hidden_rows;
  const at::Device device = row.device();
  groups.rows = to_device(rows, device);
  groups.pair_offsets = to_device(pair_offsets, at::kCPU);
  groups.token_offsets = to_device(token_offsets, at::kCPU);
  groups.pair_row = to_device(pair_row, device);
  groups.tokens = to_device(tokens, device);
  groups.token_pair = to_device(token_pair, device);
  groups.label = to_device(label_in_order, device);
  at::Tensor inverse = at::empty({groups.num_pairs}, at::kDouble);
  std::transform(pair_temperature.begin(), pair_temperature.end(),
                 inverse.mutable_data_ptr<double>(), [](double value) { return 1.0 / value; });
  groups.inverse_temperature =
      inverse.to(at::TensorOptions(device).dtype(temperature.scalar_type()));
  return groups;
}

}  // namespace zorro::head
