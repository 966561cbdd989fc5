#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zorro::head {

/// Which tokens share a hidden row, and which of those also share a temperature (a pair).
///
/// Rows ascend, a row's pairs ascend in temperature, a pair's tokens ascend: sums over them have
/// one fixed order. Built on the host; the offsets stay there, the other tensors lie on the device
/// of the hidden rows.
struct HeadGroups {
  int64_t num_rows = 0, num_pairs = 0, num_tokens = 0;
  bool all_rows = false;           ///< every hidden row is used, so rows is 0, 1, 2, ...
  at::Tensor rows;                 ///< [rows] index into the hidden rows
  at::Tensor pair_offsets;         ///< [rows + 1] a row's pairs, on the host
  at::Tensor token_offsets;        ///< [pairs + 1] a pair's tokens, on the host
  at::Tensor pair_row;             ///< [pairs] index into `rows`
  at::Tensor inverse_temperature;  ///< [pairs] in the accumulation type
  at::Tensor tokens;               ///< [tokens] index into the caller's tokens, in group order
  at::Tensor token_pair;           ///< [tokens] in group order
  at::Tensor label;                ///< [tokens] in group order
};

/// Groups the tokens, or those that `keep` (bool [M], may be undefined) marks.
///
/// row, label [M] int64; temperature [] or [M] in the accumulation type. Values were checked by the
/// caller.
HeadGroups group_tokens(const at::Tensor& row, const at::Tensor& label,
                        const at::Tensor& temperature, const at::Tensor& keep, int64_t hidden_rows);

}  // namespace zorro::head
