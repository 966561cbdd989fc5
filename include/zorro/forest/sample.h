#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zorro {

/// One token sequence of a micro-batch: a prompt and a response. Views only; the caller keeps the
/// memory alive.
struct Sample {
  /// The valid tokens, without any padding.
  std::span<const int64_t> token_ids;
  /// Index of the first scored token; every later one is scored too. Equal to the length: nothing
  /// is scored (an empty response). 0 with tokens is an error: the first token has no predecessor.
  int64_t scored_begin = 0;
  /// Tokens that count as the prompt under Sharing::kPrompts. -1: scored_begin (the usual case).
  int64_t prompt_length = -1;
  /// Positions [axes, length], axis after axis; empty: 0, 1, 2, … on every axis.
  std::span<const int64_t> positions{};
  /// Hash of what stands behind a token (an image patch); empty: the id says it all. [length]
  std::span<const uint64_t> content{};
};

/// A rectangular batch with a mask, as trainers pass it: [left pad][prompt][response][right pad].
struct PaddedBatch {
  int64_t num_rows = 0;
  int64_t width = 0;
  /// Width of the response block: the last `response_width` columns.
  int64_t response_width = 0;
  std::span<const int64_t> token_ids;  ///< [num_rows, width]
  std::span<const int64_t>
      attention_mask;  ///< [num_rows, width] of 0 and 1; empty: everything is valid
  std::span<const int64_t>
      positions{};  ///< [axes, num_rows, width]; empty: counted on each row's valid tokens
  int64_t num_axes = 1;
};

/// The samples of a padded batch with the memory that their views point to.
struct PaddedSamples {
  /// The valid tokens of row i, its scored tokens those in the response block. Pads are gone.
  std::vector<Sample> samples;
  /// [sum of lengths] cell (row * width + column) of each valid token, row after row.
  std::vector<int64_t> cells;

  std::vector<int64_t> token_ids;
  std::vector<int64_t> positions;  ///< row after row, inside a row axis after axis

  PaddedSamples() = default;
  PaddedSamples(PaddedSamples&&) = default;  // moving keeps the heap blocks that the spans point to
  PaddedSamples& operator=(PaddedSamples&&) = default;
  PaddedSamples(const PaddedSamples&) = delete;
  PaddedSamples& operator=(const PaddedSamples&) = delete;
};

/// Reads the valid tokens of a padded batch. Validity is told by the mask, never by the id.
///
/// Throws  InvalidArgument when a size disagrees, the mask holds anything but 0 and 1, or
/// response_width > width.
PaddedSamples samples_from_padded(const PaddedBatch& batch);

}  // namespace zorro
