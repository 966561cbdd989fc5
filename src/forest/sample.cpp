#include "zorro/forest/sample.h"

#include "zorro/core/error.h"

namespace zorro {
namespace {

void check_padded(const PaddedBatch& batch) {
  const auto cells = static_cast<size_t>(batch.num_rows * batch.width);
  ZORRO_CHECK(batch.num_rows >= 0 && batch.width >= 0,
              "[padded batch] num_rows and width must not be negative, got ", batch.num_rows,
              " and ", batch.width, ".");
  ZORRO_CHECK(batch.response_width >= 0 && batch.response_width <= batch.width,
              "[padded batch] response_width must lie in [0, ", batch.width, "], got ",
              batch.response_width, ". Pass the width of the response block.");
  ZORRO_CHECK(batch.token_ids.size() == cells, "[padded batch] token_ids must have ", cells,
              " values (num_rows x width), got ", batch.token_ids.size(), ".");
  ZORRO_CHECK(batch.attention_mask.empty() || batch.attention_mask.size() == cells,
              "[padded batch] attention_mask must have ", cells, " values, got ",
              batch.attention_mask.size(), ".");
  ZORRO_CHECK(batch.num_axes >= 1, "[padded batch] num_axes must be >= 1, got ", batch.num_axes,
              ".");
  ZORRO_CHECK(batch.positions.empty() ||
                  batch.positions.size() == cells * static_cast<size_t>(batch.num_axes),
              "[padded batch] positions must have num_axes x num_rows x width values, got ",
              batch.positions.size(), ".");
  for (size_t cell = 0; cell < batch.attention_mask.size(); ++cell) {
    const int64_t value = batch.attention_mask[cell];
    ZORRO_CHECK(value == 0 || value == 1, "[padded batch] attention_mask must hold 0 and 1, got ",
                value, " in row ", static_cast<int64_t>(cell) / batch.width, ", column ",
                static_cast<int64_t>(cell) % batch.width, ".");
  }
}

}  // namespace

PaddedSamples samples_from_padded(const PaddedBatch& batch) {
  check_padded(batch);
  PaddedSamples result;
  const int64_t response_begin = batch.width - batch.response_width;
  std::vector<int64_t> lengths, prompt_lengths;
  for (int64_t row = 0; row < batch.num_rows; ++row) {
    const size_t first = result.cells.size();
    int64_t prompt_length = 0;
    for (int64_t column = 0; column < batch.width; ++column) {
      const int64_t cell = row * batch.width + column;
      if (!batch.attention_mask.empty() && batch.attention_mask[static_cast<size_t>(cell)] == 0)
        continue;
      result.cells.push_back(cell);
      prompt_length += column < response_begin;
    }
    lengths.push_back(static_cast<int64_t>(result.cells.size() - first));
    prompt_lengths.push_back(prompt_length);
  }

  result.token_ids.reserve(result.cells.size());
  for (const int64_t cell : result.cells)
    result.token_ids.push_back(batch.token_ids[static_cast<size_t>(cell)]);
  if (!batch.positions.empty()) {
    size_t first = 0;
    for (const int64_t length : lengths) {
      for (int64_t axis = 0; axis < batch.num_axes; ++axis)
        for (size_t i = first; i < first + static_cast<size_t>(length); ++i)
          result.positions.push_back(batch.positions[static_cast<size_t>(
              axis * batch.num_rows * batch.width + result.cells[i])]);
      first += static_cast<size_t>(length);
    }
  }

  size_t first = 0;
  const auto axes = static_cast<size_t>(batch.num_axes);
  for (size_t row = 0; row < lengths.size(); ++row) {
    const auto length = static_cast<size_t>(lengths[row]);
    Sample sample;
    sample.token_ids = std::span<const int64_t>(result.token_ids).subspan(first, length);
    sample.scored_begin = prompt_lengths[row];
    if (!result.positions.empty())
      sample.positions =
          std::span<const int64_t>(result.positions).subspan(first * axes, length * axes);
    result.samples.push_back(sample);
    first += length;
  }
  return result;
}

}  // namespace zorro
