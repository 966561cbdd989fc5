#include "ops/linear_logprob_tiles.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "ops/checks.h"

namespace zorro::head {
namespace {

constexpr int64_t kRowsAtOnce = 1024;
constexpr int64_t kColumnsAtOnce = 4096;
// Columns that a small budget keeps before it keeps rows: products of narrow tiles are slow.
constexpr int64_t kFewColumns = 256;
constexpr int64_t kComposedTiles = 6;  // temporaries of a tile's size in the composed arithmetic

// Rows of a matrix in the accumulation type: a view where that is its own type, else a copy in
// reused scratch.
class WideRows {
 public:
  WideRows(at::Tensor matrix, at::ScalarType type, int64_t max_rows) : matrix_(std::move(matrix)) {
    if (matrix_.scalar_type() != type) {
      scratch_ = at::empty({max_rows, matrix_.size(1)}, matrix_.options().dtype(type));
    }
  }
  [[nodiscard]] at::Tensor rows(int64_t begin, int64_t count) const {
    at::Tensor part = matrix_.narrow(0, begin, count);
    if (!scratch_.defined()) return part;
    at::Tensor wide = scratch_.narrow(0, 0, count);
    return wide.copy_(part);
  }

 private:
  at::Tensor matrix_, scratch_;
};

// Calls visit(begin, count) for parts of [0, total), in order.
template <typename Visit>
void for_each_part(int64_t total, int64_t part, const Visit& visit) {
  for (int64_t begin = 0; begin < total; begin += part) {
    visit(begin, std::min(part, total - begin));
  }
}

at::Tensor tile_of(const at::Tensor& scratch, int64_t rows, int64_t columns) {
  return scratch.narrow(0, 0, rows * columns).view({rows, columns});
}

at::Tensor used_rows(const at::Tensor& hidden, const HeadGroups& groups) {
  return groups.all_rows ? hidden : hidden.index_select(0, groups.rows);
}

// Largest number of the type that is <= ln(vocabulary): the entropy's bound holds exactly.
double largest_entropy(int64_t vocabulary, at::ScalarType type) {
  const double bound = std::log(static_cast<double>(vocabulary));
  if (type == at::kDouble) return bound;
  const auto rounded = static_cast<float>(bound);
  return static_cast<double>(rounded) <= bound ? rounded : std::nextafterf(rounded, 0.0F);
}

// From statistics by row and pair to the caller's tokens.
HeadForward finish(const HeadStatistics& statistics, const HeadGroups& groups, int64_t vocabulary) {
  const at::TensorOptions options = statistics.maximum.options();
  const at::Tensor log_sum = statistics.exp_sum.log();
  const at::Tensor entropy =
      (log_sum - statistics.weighted_sum / statistics.exp_sum)
          .clamp(0, largest_entropy(vocabulary, options.dtype().toScalarType()));
  const at::Tensor pair_maximum = statistics.maximum.index_select(0, groups.pair_row);
  const auto of_token = [&](const at::Tensor& by_pair) {
    return by_pair.index_select(0, groups.token_pair);
  };
  const at::Tensor shifted =
      statistics.label_logit.to(at::kDouble) - of_token(pair_maximum).to(at::kDouble);
  // Never above 0: the label's logit is at most the maximum, and the maximum's own e^0 = 1 is in
  // the sum.
  const at::Tensor logprob =
      shifted * of_token(groups.inverse_temperature).to(at::kDouble) - of_token(log_sum);
  const auto in_caller_order = [&](const at::Tensor& by_token) {
    at::Tensor result = at::empty({groups.num_tokens}, options);
    return result.index_copy_(0, groups.tokens, by_token.to(options.dtype()));
  };
  return {in_caller_order(logprob),
          in_caller_order(of_token(entropy)),
          in_caller_order(of_token(pair_maximum)),
          in_caller_order(of_token(log_sum)),
          {}};
}

// dz/dlogit = sum over tokens of g (1_label - p) / T - h p (ln p + entropy) / T, gathered by pair.
HeadCoefficients make_coefficients(const HeadGradients& upstream, const HeadForward& saved,
                                   const HeadGroups& groups) {
  const at::TensorOptions options = saved.maximum.options();
  const auto sorted = [&](const at::Tensor& by_token) {
    return by_token.index_select(0, groups.tokens).to(at::kDouble);
  };
  const auto gradient = [&](const at::Tensor& given) {
    return given.defined() ? sorted(given)
                           : at::zeros({groups.num_tokens}, options.dtype(at::kDouble));
  };
  const auto sum_by_pair = [&](const at::Tensor& by_token) {
    at::Tensor sum = at::zeros({groups.num_pairs}, options.dtype(at::kDouble));
    add_at(sum, groups.token_pair, by_token);
    return sum;
  };
  const at::Tensor first_of_pair =
      groups.token_offsets.narrow(0, 0, groups.num_pairs).to(options.device());
  const auto of_pair = [&](const at::Tensor& by_token) {
    return sorted(by_token).index_select(0, first_of_pair);
  };
  const at::Tensor first_of_row =
      groups.pair_offsets.narrow(0, 0, groups.num_rows).to(options.device());
  const at::Tensor inverse = groups.inverse_temperature.to(at::kDouble);
  const at::Tensor logprob_grad = gradient(upstream.logprob);
  const at::Tensor entropy_grad = sum_by_pair(gradient(upstream.entropy));
  const auto type = options.dtype();
  HeadCoefficients result;
  result.maximum = of_pair(saved.maximum).index_select(0, first_of_row).to(type);
  result.log_sum = of_pair(saved.log_sum).to(type);
  result.slope = (-entropy_grad * inverse).to(type);
  result.constant =
      (-(sum_by_pair(logprob_grad) + entropy_grad * of_pair(saved.entropy)) * inverse).to(type);
  result.label_grad = (logprob_grad * inverse.index_select(0, groups.token_pair)).to(type);
  return result;
}

at::Tensor has_gradient(const HeadGradients& upstream) {
  if (!upstream.logprob.defined()) return upstream.entropy.ne(0);
  if (!upstream.entropy.defined()) return upstream.logprob.ne(0);
  return upstream.logprob.ne(0).logical_or(upstream.entropy.ne(0));
}

void add_tile(HeadMath math, const Tile& tile, const HeadGroups& groups,
              HeadStatistics& statistics) {
  math == HeadMath::kFused ? add_tile_fused(tile, groups, statistics)
                           : add_tile_composed(tile, groups, statistics);
}

void gradient_tile(HeadMath math, const Tile& tile, const HeadGroups& groups,
                   const HeadCoefficients& coefficients, at::Tensor& out) {
  math == HeadMath::kFused ? gradient_tile_fused(tile, groups, coefficients, out)
                           : gradient_tile_composed(tile, groups, coefficients, out);
}

}  // namespace

HeadMath default_math(at::Device device) {
  return device.is_cpu() ? HeadMath::kFused : HeadMath::kComposed;
}

TileShape plan_tiles(HeadMode mode, const at::Tensor& hidden, const at::Tensor& weight,
                     int64_t budget_bytes, HeadMath math) {
  const int64_t max_rows = std::max<int64_t>(1, hidden.size(0));
  const int64_t max_columns = std::max<int64_t>(1, weight.size(0));
  if (mode == HeadMode::kNone) return {max_rows, max_columns};
  const at::ScalarType type = accumulate_dtype(hidden.scalar_type());
  const auto item = static_cast<int64_t>(c10::elementSize(type));
  const int64_t logit = item * (math == HeadMath::kFused ? 1 : kComposedTiles);
  // A bfloat16 weight is widened tile by tile, and so is its gradient.
  const int64_t column = hidden.scalar_type() == type ? 0 : 2 * item * weight.size(1);
  // Columns share half of the budget at most with their widened rows, else a tile would be one row
  // high.
  const int64_t affordable = column == 0 ? kFewColumns : budget_bytes / (2 * column);
  const int64_t wished = std::clamp<int64_t>(affordable, 1, std::min(max_columns, kFewColumns));
  const int64_t left = budget_bytes / wished - column;
  const int64_t rows = std::clamp<int64_t>(left / logit, 1, std::min(max_rows, kRowsAtOnce));
  const int64_t columns = std::clamp<int64_t>(budget_bytes / (rows * logit + column), 1,
                                              std::min(max_columns, kColumnsAtOnce));
  return {rows, columns};
}

HeadForward head_forward(const HeadInputs& inputs, bool keep_logits, TileShape shape,
                         HeadMath math) {
  const at::ScalarType type = accumulate_dtype(inputs.hidden.scalar_type());
  const at::TensorOptions options = inputs.hidden.options().dtype(type);
  const int64_t vocabulary = inputs.weight.size(0);
  const HeadGroups groups = group_tokens(inputs.row, inputs.label, inputs.temperature.to(type), {},
                                         inputs.hidden.size(0));
  HeadStatistics statistics{
      at::full({groups.num_rows},
               type == at::kDouble ? std::numeric_limits<double>::lowest()
                                   : double{std::numeric_limits<float>::lowest()},
               options),
      at::zeros({groups.num_pairs}, options.dtype(at::kDouble)),
      at::zeros({groups.num_pairs}, options.dtype(at::kDouble)),
      at::zeros({groups.num_tokens}, options)};

  const at::Tensor hidden =
      (keep_logits ? inputs.hidden : used_rows(inputs.hidden, groups)).to(type);
  at::Tensor logits = at::empty({keep_logits ? hidden.size(0) : 0, vocabulary}, options);
  shape = {std::min(shape.rows, groups.num_rows), std::min(shape.columns, vocabulary)};
  const WideRows weight(inputs.weight, type, shape.columns);
  at::Tensor scratch = at::empty({keep_logits ? 0 : shape.rows * shape.columns}, options);
  for_each_part(vocabulary, shape.columns, [&](int64_t column, int64_t columns) {
    const at::Tensor weights = weight.rows(column, columns).t();
    at::Tensor kept = logits.narrow(1, column, columns);
    if (keep_logits) at::mm_out(kept, hidden, weights);
    for_each_part(groups.num_rows, shape.rows, [&](int64_t row, int64_t rows) {
      Tile tile{kept, keep_logits, row, rows, column};
      if (!keep_logits) {
        tile.values = tile_of(scratch, rows, columns);
        at::mm_out(tile.values, hidden.narrow(0, row, rows), weights);
      }
      add_tile(math, tile, groups, statistics);
    });
  });
  HeadForward result = finish(statistics, groups, vocabulary);
  result.logits = keep_logits ? logits : at::empty({0}, options);
  return result;
}

std::pair<at::Tensor, at::Tensor> head_backward(const HeadGradients& upstream,
                                                const HeadInputs& inputs, const HeadForward& saved,
                                                bool want_hidden, bool want_weight, TileShape shape,
                                                HeadMath math) {
  const at::ScalarType type = accumulate_dtype(inputs.hidden.scalar_type());
  const at::TensorOptions options = inputs.hidden.options().dtype(type);
  const HeadGroups groups = group_tokens(inputs.row, inputs.label, inputs.temperature.to(type),
                                         has_gradient(upstream), inputs.hidden.size(0));
  std::pair<at::Tensor, at::Tensor> result;
  if (groups.num_rows == 0) {
    if (want_hidden) result.first = at::zeros_like(inputs.hidden, at::MemoryFormat::Contiguous);
    if (want_weight) result.second = at::zeros_like(inputs.weight, at::MemoryFormat::Contiguous);
    return result;
  }
  const HeadCoefficients coefficients = make_coefficients(upstream, saved, groups);
  const at::Tensor hidden = used_rows(inputs.hidden, groups).to(type);
  const int64_t vocabulary = inputs.weight.size(0);
  const bool narrow_weight = inputs.weight.scalar_type() != type;
  const bool kept = saved.logits.numel() != 0;
  shape = {std::min(shape.rows, groups.num_rows), std::min(shape.columns, vocabulary)};

  const WideRows weight(inputs.weight, type, shape.columns);
  at::Tensor scratch = at::empty({shape.rows * shape.columns}, options);
  at::Tensor hidden_grad, weight_grad, weight_scratch;
  if (want_hidden) hidden_grad = at::zeros({groups.num_rows, hidden.size(1)}, options);
  if (want_weight) weight_grad = at::empty_like(inputs.weight, at::MemoryFormat::Contiguous);
  if (want_weight && narrow_weight) {
    weight_scratch = at::empty({shape.columns, hidden.size(1)}, options);
  }
  for_each_part(vocabulary, shape.columns, [&](int64_t column, int64_t columns) {
    const at::Tensor weights = weight.rows(column, columns);
    at::Tensor weights_grad;
    if (want_weight) {
      weights_grad = narrow_weight ? weight_scratch.narrow(0, 0, columns)
                                   : weight_grad.narrow(0, column, columns);
    }
    for_each_part(groups.num_rows, shape.rows, [&](int64_t row, int64_t rows) {
      const at::Tensor states = hidden.narrow(0, row, rows);
      at::Tensor dz = tile_of(scratch, rows, columns);
      if (!kept) at::mm_out(dz, states, weights.t());
      const Tile tile{kept ? saved.logits.narrow(1, column, columns) : dz, kept, row, rows, column};
      gradient_tile(math, tile, groups, coefficients, dz);
      if (want_hidden) hidden_grad.narrow(0, row, rows).addmm_(dz, weights);
      if (want_weight) weights_grad.addmm_(dz.t(), states, row == 0 ? 0 : 1);
    });
    if (want_weight && narrow_weight) {
      weight_grad.narrow(0, column, columns).copy_(weights_grad);
    }
  });
  if (want_hidden) {
    hidden_grad = hidden_grad.to(inputs.hidden.scalar_type());
    result.first = groups.all_rows ? hidden_grad
                                   : at::zeros_like(inputs.hidden, at::MemoryFormat::Contiguous)
                                         .index_copy_(0, groups.rows, hidden_grad);
  }
  result.second = weight_grad;
  return result;
}

void add_at(at::Tensor& target, const at::Tensor& index, const at::Tensor& values) {
  // index_add_ walks a 1-D tensor in order on a CPU but races on a GPU; index_put_ sorts there.
  if (target.is_cpu()) {
    target.index_add_(0, index, values);
  } else {
    target.index_put_({index}, values, /*accumulate=*/true);
  }
}

}  // namespace zorro::head
