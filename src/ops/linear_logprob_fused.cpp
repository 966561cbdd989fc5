#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/linear_logprob_rows.h"
#include "ops/linear_logprob_tiles.h"

namespace zorro::head {
namespace {

// Rows a task, so that a task is worth its start: 32k logits.
int64_t grain(int64_t columns) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns));
}

struct GroupPointers {
  explicit GroupPointers(const HeadGroups& groups)
      : rows(groups.rows.const_data_ptr<int64_t>()),
        pair_offsets(groups.pair_offsets.const_data_ptr<int64_t>()),
        token_offsets(groups.token_offsets.const_data_ptr<int64_t>()),
        label(groups.label.const_data_ptr<int64_t>()) {}
  const int64_t* rows;
  const int64_t* pair_offsets;
  const int64_t* token_offsets;
  const int64_t* label;
};

template <typename T>
struct TilePointers {
  explicit TilePointers(const Tile& tile)
      : values(tile.values.const_data_ptr<T>()),
        stride(tile.values.stride(0)),
        columns(tile.values.size(1)),
        indexed(tile.indexed),
        row_begin(tile.row_begin),
        column_begin(tile.column_begin) {}

  const T* row(const GroupPointers& groups, int64_t group_row) const {
    return values + (indexed ? groups.rows[group_row] : group_row - row_begin) * stride;
  }
  [[nodiscard]] bool holds(int64_t label) const {
    return label >= column_begin && label < column_begin + columns;
  }

  const T* values;
  int64_t stride, columns;
  bool indexed;
  int64_t row_begin, column_begin;
};

template <typename T>
void add_tile(const Tile& tile, const HeadGroups& groups, HeadStatistics& statistics) {
  const GroupPointers group(groups);
  const TilePointers<T> source(tile);
  const T* inverse_temperature = groups.inverse_temperature.const_data_ptr<T>();
  T* maximum = statistics.maximum.mutable_data_ptr<T>();
  auto* exp_sum = statistics.exp_sum.mutable_data_ptr<double>();
  auto* weighted_sum = statistics.weighted_sum.mutable_data_ptr<double>();
  T* label_logit = statistics.label_logit.mutable_data_ptr<T>();
  const Isa level = cpu_isa();
  at::parallel_for(tile.row_begin, tile.row_begin + tile.rows, grain(source.columns),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       const T* logits = source.row(group, row);
                       const int64_t pair = group.pair_offsets[row];
                       const int64_t pair_end = group.pair_offsets[row + 1];
                       add_row_statistics(level, logits, source.columns, pair_end - pair,
                                          inverse_temperature + pair, maximum + row, exp_sum + pair,
                                          weighted_sum + pair);
                       for (int64_t token = group.token_offsets[pair];
                            token < group.token_offsets[pair_end]; ++token) {
                         const int64_t label = group.label[token];
                         if (source.holds(label))
                           label_logit[token] = logits[label - source.column_begin];
                       }
                     }
                   });
}

template <typename T>
void gradient_tile(const Tile& tile, const HeadGroups& groups, const HeadCoefficients& coefficients,
                   at::Tensor& out) {
  const GroupPointers group(groups);
  const TilePointers<T> source(tile);
  const T* inverse_temperature = groups.inverse_temperature.const_data_ptr<T>();
  const T* maximum = coefficients.maximum.const_data_ptr<T>();
  const T* log_sum = coefficients.log_sum.const_data_ptr<T>();
  const T* constant = coefficients.constant.const_data_ptr<T>();
  const T* slope = coefficients.slope.const_data_ptr<T>();
  const T* label_grad = coefficients.label_grad.const_data_ptr<T>();
  T* target = out.mutable_data_ptr<T>();
  const int64_t target_stride = out.stride(0);
  const Isa level = cpu_isa();
  at::parallel_for(
      tile.row_begin, tile.row_begin + tile.rows, grain(source.columns),
      [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t pair = group.pair_offsets[row];
          const int64_t pair_end = group.pair_offsets[row + 1];
          T* gradient = target + (row - tile.row_begin) * target_stride;
          const RowGradient<T> values{pair_end - pair, maximum[row],    inverse_temperature + pair,
                                      log_sum + pair,  constant + pair, slope + pair};
          row_gradient(level, source.row(group, row), source.columns, values, gradient);
          for (int64_t token = group.token_offsets[pair]; token < group.token_offsets[pair_end];
               ++token) {
            const int64_t label = group.label[token];
            if (source.holds(label)) gradient[label - source.column_begin] += label_grad[token];
          }
        }
      });
}

}  // namespace

void add_tile_fused(const Tile& tile, const HeadGroups& groups, HeadStatistics& statistics) {
  AT_DISPATCH_FLOATING_TYPES(tile.values.scalar_type(), "linear_logprob",
                             [&] { add_tile<scalar_t>(tile, groups, statistics); });
}

void gradient_tile_fused(const Tile& tile, const HeadGroups& groups,
                         const HeadCoefficients& coefficients, at::Tensor& out) {
  AT_DISPATCH_FLOATING_TYPES(tile.values.scalar_type(), "linear_logprob_backward",
                             [&] { gradient_tile<scalar_t>(tile, groups, coefficients, out); });
}

}  // namespace zorro::head
