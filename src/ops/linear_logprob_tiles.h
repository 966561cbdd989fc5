#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "ops/linear_logprob_groups.h"
#include "zorro/ops/linear_logprob.h"

namespace zorro::head {

/// Who turns a tile of logits into statistics and gradients: the row kernels (CPU) or plain ATen
/// (any device, and what tests compare the kernels with).
enum class HeadMath { kFused, kComposed };

/// Logits that exist at one time. At least 1 x 1.
struct TileShape {
  int64_t rows = 1, columns = 1;
};

/// Logits of the group rows from row_begin on for the vocabulary from column_begin on.
struct Tile {
  at::Tensor values;     ///< [rows, columns], or all hidden rows when `indexed`
  bool indexed = false;  ///< row i is values[groups.rows[row_begin + i]] instead of values[i]
  int64_t row_begin = 0;
  int64_t rows = 0;
  int64_t column_begin = 0;
};

/// Running softmax statistics over the vocabulary.
struct HeadStatistics {
  at::Tensor maximum;       ///< [rows] largest logit
  at::Tensor exp_sum;       ///< [pairs] float64, sum e^s with s = (logit - maximum) / T
  at::Tensor weighted_sum;  ///< [pairs] float64, sum e^s s
  at::Tensor label_logit;   ///< [tokens] in group order
};

/// What a tile's gradient needs: dz_j = sum over pairs of p_j (constant + slope ln p_j), and
/// label_grad at labels.
struct HeadCoefficients {
  at::Tensor maximum;     ///< [rows]
  at::Tensor log_sum;     ///< [pairs]
  at::Tensor constant;    ///< [pairs]
  at::Tensor slope;       ///< [pairs]
  at::Tensor label_grad;  ///< [tokens] in group order
};

struct HeadInputs {
  at::Tensor hidden, weight, row, label, temperature;
};

/// Everything the forward pass gives; the last three are what the backward pass reads again.
struct HeadForward {
  at::Tensor logprob, entropy;  ///< [M]
  at::Tensor maximum, log_sum;  ///< [M]
  at::Tensor logits;            ///< [U, V] when kept, else [0]
};

HeadMath default_math(at::Device device);

/// The whole product for kNone; else tiles that stay within the budget with the scratch of their
/// columns, 1 x 1 at least.
TileShape plan_tiles(HeadMode mode, const at::Tensor& hidden, const at::Tensor& weight,
                     int64_t budget_bytes, HeadMath math);

HeadForward head_forward(const HeadInputs& inputs, bool keep_logits, TileShape shape,
                         HeadMath math);

struct HeadGradients {
  at::Tensor logprob, entropy;  ///< [M] upstream, either may be undefined
};

/// Gradients of hidden and weight; undefined where not wanted. Rows whose tokens all have zero
/// upstream gradient are left out, so that nothing they hold (NaN, inf) can reach the result.
std::pair<at::Tensor, at::Tensor> head_backward(const HeadGradients& upstream,
                                                const HeadInputs& inputs, const HeadForward& saved,
                                                bool want_hidden, bool want_weight, TileShape shape,
                                                HeadMath math);

/// The two ways to treat a tile, same contract. add_tile: updates the statistics. gradient_tile:
/// writes dz of the tile into out [rows, columns], which may be tile.values unless it is indexed.
void add_tile_fused(const Tile& tile, const HeadGroups& groups, HeadStatistics& statistics);
void add_tile_composed(const Tile& tile, const HeadGroups& groups, HeadStatistics& statistics);
void gradient_tile_fused(const Tile& tile, const HeadGroups& groups,
                         const HeadCoefficients& coefficients, at::Tensor& out);
void gradient_tile_composed(const Tile& tile, const HeadGroups& groups,
                            const HeadCoefficients& coefficients, at::Tensor& out);

/// target[index] += values for 1-D tensors; duplicates are summed in a fixed order on every device.
void add_at(at::Tensor& target, const at::Tensor& index, const at::Tensor& values);

}  // namespace zorro::head
