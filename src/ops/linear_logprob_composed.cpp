#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/index.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ops/linear_logprob_tiles.h"

namespace zorro::head {
namespace {

// The same stand-in for ln 0 as in the row kernels; clamp_min keeps NaN.
constexpr double kNoProbability = -10000;

// The groups of a tile: rows and columns count from the tile's corner.
struct TileGroups {
  int64_t pair_begin, num_pairs, token_begin, num_tokens;
  at::Tensor pair_row, token_row, column;
  at::Tensor here;  // whether the token's label is one of the tile's columns; if not, column is any
                    // of them
  at::Tensor logits;  // [rows, columns]
};

TileGroups tile_groups(const Tile& tile, const HeadGroups& groups) {
  TileGroups found;
  const auto* pair_offsets = groups.pair_offsets.const_data_ptr<int64_t>();
  const auto* token_offsets = groups.token_offsets.const_data_ptr<int64_t>();
  const int64_t pair_end = pair_offsets[tile.row_begin + tile.rows];
  found.pair_begin = pair_offsets[tile.row_begin];
  found.num_pairs = pair_end - found.pair_begin;
  found.token_begin = token_offsets[found.pair_begin];
  found.num_tokens = token_offsets[pair_end] - found.token_begin;
  found.pair_row = groups.pair_row.narrow(0, found.pair_begin, found.num_pairs) - tile.row_begin;
  found.token_row = groups.pair_row.index_select(
                        0, groups.token_pair.narrow(0, found.token_begin, found.num_tokens)) -
                    tile.row_begin;
  const int64_t columns = tile.values.size(1);
  const at::Tensor column =
      groups.label.narrow(0, found.token_begin, found.num_tokens) - tile.column_begin;
  found.here = at::logical_and(column.ge(0), column.lt(columns));
  found.column = column.clamp(0, columns - 1);
  found.logits = tile.indexed
                     ? tile.values.index_select(0, groups.rows.narrow(0, tile.row_begin, tile.rows))
                     : tile.values;
  return found;
}

// Sums the pairs of each row, k-th pairs of all rows at a time: no row twice in one addition, so in
// a fixed order.
at::Tensor sum_pairs(const at::Tensor& by_pair, const TileGroups& found, const Tile& tile,
                     const HeadGroups& groups) {
  if (found.num_pairs == tile.rows) return by_pair;
  const at::Tensor first = groups.pair_offsets.to(found.pair_row.device())
                               .narrow(0, tile.row_begin, tile.rows)
                               .index_select(0, found.pair_row);
  const at::Tensor rank =
      at::arange(found.pair_begin, found.pair_begin + found.num_pairs, first.options()) - first;
  const int64_t rounds = rank.max().item<int64_t>() + 1;
  at::Tensor sum = at::zeros_like(found.logits, at::MemoryFormat::Contiguous);
  for (int64_t round = 0; round < rounds; ++round) {
    const at::Tensor chosen = rank.eq(round).nonzero().squeeze(1);
    sum.index_add_(0, found.pair_row.index_select(0, chosen), by_pair.index_select(0, chosen));
  }
  return sum;
}

}  // namespace

void add_tile_composed(const Tile& tile, const HeadGroups& groups, HeadStatistics& statistics) {
  const TileGroups found = tile_groups(tile, groups);
  at::Tensor maximum = statistics.maximum.narrow(0, tile.row_begin, tile.rows);
  const at::Tensor before = maximum.index_select(0, found.pair_row).to(at::kDouble);
  maximum.copy_(at::maximum(maximum, found.logits.amax({1})));

  const at::Tensor pair_maximum = maximum.index_select(0, found.pair_row);
  const at::Tensor inverse =
      groups.inverse_temperature.narrow(0, found.pair_begin, found.num_pairs);
  const at::Tensor s = ((found.logits.index_select(0, found.pair_row) - pair_maximum.unsqueeze(1)) *
                        inverse.unsqueeze(1))
                           .clamp_min(kNoProbability);
  const at::Tensor e = s.exp();
  const at::Tensor shift =
      ((before - pair_maximum.to(at::kDouble)) * inverse.to(at::kDouble)).clamp_min(kNoProbability);
  const at::Tensor scale = shift.exp();
  at::Tensor exp_sum = statistics.exp_sum.narrow(0, found.pair_begin, found.num_pairs);
  at::Tensor weighted_sum = statistics.weighted_sum.narrow(0, found.pair_begin, found.num_pairs);
  weighted_sum.copy_((weighted_sum + shift * exp_sum) * scale + (e * s).sum(1, false, at::kDouble));
  exp_sum.copy_(exp_sum * scale + e.sum(1, false, at::kDouble));

  at::Tensor label_logit = statistics.label_logit.narrow(0, found.token_begin, found.num_tokens);
  const at::Tensor picked = at::index(found.logits, {found.token_row, found.column});
  label_logit.copy_(at::where(found.here, picked, label_logit));
}

void gradient_tile_composed(const Tile& tile, const HeadGroups& groups,
                            const HeadCoefficients& coefficients, at::Tensor& out) {
  const TileGroups found = tile_groups(tile, groups);
  const auto of_pair = [&](const at::Tensor& values) {
    return values.narrow(0, found.pair_begin, found.num_pairs).unsqueeze(1);
  };
  const at::Tensor maximum = coefficients.maximum.narrow(0, tile.row_begin, tile.rows);
  const at::Tensor logp = ((found.logits - maximum.unsqueeze(1)).index_select(0, found.pair_row) *
                               of_pair(groups.inverse_temperature) -
                           of_pair(coefficients.log_sum))
                              .clamp_min(kNoProbability);
  const at::Tensor by_pair =
      logp.exp() * (of_pair(coefficients.constant) + of_pair(coefficients.slope) * logp);
  at::Tensor gradient = sum_pairs(by_pair, found, tile, groups).view(-1);
  const at::Tensor label_grad =
      coefficients.label_grad.narrow(0, found.token_begin, found.num_tokens);
  add_at(gradient, found.token_row * tile.values.size(1) + found.column,
         at::where(found.here, label_grad, at::zeros_like(label_grad)));
  out.copy_(gradient.view(out.sizes()));
}

}  // namespace zorro::head
