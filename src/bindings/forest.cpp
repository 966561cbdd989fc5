#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/padded.h"
#include "zorro/core/error.h"
#include "zorro/core/version.h"
#include "zorro/forest/prefix_forest.h"
#include "zorro/ops/forest_tensors.h"

// What Python needs of forests. Integers in, integers out, nothing to differentiate.
namespace zorro::bindings {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

Sharing parse_sharing(std::string_view name) {
  if (name == "none") return Sharing::kNone;
  if (name == "prompts") return Sharing::kPrompts;
  ZORRO_CHECK(name == "prefixes", "[zorro] sharing must be none, prompts or prefixes, got ", name,
              ".");
  return Sharing::kPrefixes;
}

/// token_ids, positions, previous, visible_until, multiplicity, nodes, scored, scored_offsets,
/// predictors, row, label, replicated, first_copy as in ForestTensors; then cells and lengths: the
/// cell of each replicated token, the valid tokens of each row.
std::vector<at::Tensor> build_forest(const at::Tensor& input_ids,
                                     const OptionalTensor& attention_mask,
                                     const OptionalTensor& position_ids, int64_t response_length,
                                     c10::string_view sharing, int64_t min_shared_tokens) {
  const PaddedInput input = padded_input(input_ids, attention_mask, position_ids, response_length);
  const PaddedSamples padded = samples_from_padded(input.batch);
  ForestOptions options;
  options.sharing = parse_sharing(sharing);
  options.min_shared_tokens = min_shared_tokens;
  options.num_axes = input.batch.num_axes;
  const PrefixForest forest = PrefixForest::build(padded.samples, options);
  const at::Device device = input_ids.device();
  ForestTensors t = to_tensors(forest, device);
  return {t.token_ids,
          t.positions,
          t.previous,
          t.visible_until,
          t.multiplicity,
          t.nodes,
          t.scored,
          t.scored_offsets,
          t.predictors,
          t.row,
          t.label,
          t.replicated,
          t.first_copy,
          to_tensor(padded.cells).to(device),
          to_tensor(forest.sample_lengths)};
}

/// A forest of the prompts alone. `content` keeps prompts of different groups apart.
PrefixForest prompt_forest(std::vector<Sample> samples) {
  for (Sample& sample : samples) {
    const auto length = static_cast<size_t>(sample.scored_begin);
    sample.token_ids = sample.token_ids.first(length);
    sample.prompt_length = sample.scored_begin;
  }
  return PrefixForest::build(samples, {});
}

/// [B] the number of each row's prompt, in first-seen order.
at::Tensor prompt_groups(const at::Tensor& input_ids, const OptionalTensor& attention_mask,
                         int64_t response_length) {
  const PaddedInput input = padded_input(input_ids, attention_mask, std::nullopt, response_length);
  const PaddedSamples padded = samples_from_padded(input.batch);
  const PrefixForest forest = prompt_forest(padded.samples);
  std::vector<int64_t> number(forest.token_ids.size(), -1), numbers;
  int64_t next = 0, empty = -1;
  for (const int64_t last : forest.sample_last) {
    int64_t& entry = last < 0 ? empty : number[static_cast<size_t>(last)];
    if (entry < 0) entry = next++;
    numbers.push_back(entry);
  }
  return to_tensor(numbers);
}

/// Samples whose prompts share exactly where their groups agree.
struct GroupedSamples {
  std::vector<Sample> samples;
  std::vector<std::vector<uint64_t>> content;
};

GroupedSamples in_group_order(const PaddedSamples& padded, at::IntArrayRef rows,
                              at::IntArrayRef sizes) {
  GroupedSamples grouped;
  const auto num_rows = padded.samples.size();
  std::vector<bool> seen(num_rows, false);
  size_t at = 0;
  for (size_t group = 0; group < sizes.size(); ++group)
    for (int64_t member = 0; member < sizes[group]; ++member, ++at) {
      ZORRO_CHECK(at < rows.size() && rows[at] >= 0 && static_cast<size_t>(rows[at]) < num_rows &&
                      !seen[static_cast<size_t>(rows[at])],
                  "[zorro] prompt_groups must hold every row of the ", num_rows,
                  " exactly once. Use the groups of find_prompt_groups.");
      seen[static_cast<size_t>(rows[at])] = true;
      Sample sample = padded.samples[static_cast<size_t>(rows[at])];
      sample.prompt_length = sample.scored_begin;
      sample.scored_begin =
          static_cast<int64_t>(sample.token_ids.size());  // a rearrangement scores nothing
      grouped.content.emplace_back(sample.token_ids.size(), group);
      grouped.samples.push_back(sample);
    }
  ZORRO_CHECK(at == num_rows && rows.size() == num_rows,
              "[zorro] prompt_groups must hold every row of the ", num_rows, " exactly once, got ",
              rows.size(), ". Use the groups of find_prompt_groups.");
  for (size_t i = 0; i < grouped.samples.size(); ++i)
    grouped.samples[i].content = grouped.content[i];
  return grouped;
}

/// Throws unless the rows of each group have equal prompts.
void check_groups(const std::vector<Sample>& samples, at::IntArrayRef rows, at::IntArrayRef sizes) {
  size_t first = 0;
  for (const int64_t size : sizes) {
    for (size_t i = first; i < first + static_cast<size_t>(size); ++i) {
      const auto prompt = [&](size_t at) {
        return samples[at].token_ids.first(static_cast<size_t>(samples[at].prompt_length));
      };
      const auto a = prompt(first), b = prompt(i);
      ZORRO_CHECK(
          std::equal(a.begin(), a.end(), b.begin(), b.end()),
          "[zorro] prompt_groups must join rows of equal prompt tokens, got rows ", rows[first],
          " and ", rows[i],
          " in one group. Give find_prompt_groups the attention_mask when use_unpad is set, "
          "and none when pads are kept.");
    }
    first += static_cast<size_t>(size);
  }
}

/// How to rearrange a batch by its prompt groups, all on the CPU:
///   packed_cells [T]  cell (row * S + column) of each packed token
///   replicated [N]    packed index of every token of every row, in the order of rows
///   first_copy [T]    index into `replicated` of each packed token's first copy
///   response [M]      packed index of every response token, in packed order
///   predictor [M]     packed index of the token before it on its path, -1 for none
///   cu_prompt [groups + 1], cu_response [B + 1]  their running counts, in packed order
///   cells [N]         cell of each replicated token
std::vector<at::Tensor> pack_groups(const at::Tensor& input_ids,
                                    const OptionalTensor& attention_mask, int64_t response_length,
                                    at::IntArrayRef rows, at::IntArrayRef sizes) {
  const PaddedInput input = padded_input(input_ids, attention_mask, std::nullopt, response_length);
  const PaddedSamples padded = samples_from_padded(input.batch);
  const GroupedSamples grouped = in_group_order(padded, rows, sizes);
  check_groups(grouped.samples, rows, sizes);
  const PrefixForest forest = PrefixForest::build(grouped.samples, {});

  // The forest lists its samples in group order; the caller's rows come back in theirs.
  const std::vector<int64_t> by_group = forest.replicated_to_packed();
  std::vector<int64_t> begin_of_row(rows.size()), response, predictor, cu_response{0}, cu_prompt{0};
  int64_t begin = 0;
  for (size_t i = 0; i < grouped.samples.size(); ++i) {
    begin_of_row[static_cast<size_t>(rows[i])] = begin;
    const int64_t length = forest.sample_lengths[i];
    for (int64_t token = grouped.samples[i].prompt_length; token < length; ++token) {
      response.push_back(by_group[static_cast<size_t>(begin + token)]);
      predictor.push_back(forest.previous[static_cast<size_t>(response.back())]);
    }
    cu_response.push_back(static_cast<int64_t>(response.size()));
    begin += length;
  }
  size_t first = 0;
  for (const int64_t size : sizes) {
    const int64_t prompt = size > 0 ? grouped.samples[first].prompt_length : 0;
    cu_prompt.push_back(cu_prompt.back() + prompt);
    first += static_cast<size_t>(size);
  }

  std::vector<int64_t> replicated, packed_cells(forest.token_ids.size()),
      first_copy(forest.token_ids.size(), -1);
  for (size_t row = 0; row < padded.samples.size(); ++row)
    for (size_t token = 0; token < padded.samples[row].token_ids.size(); ++token) {
      const int64_t packed = by_group[static_cast<size_t>(begin_of_row[row]) + token];
      int64_t& copy = first_copy[static_cast<size_t>(packed)];
      if (copy < 0) {
        copy = static_cast<int64_t>(replicated.size());
        packed_cells[static_cast<size_t>(packed)] = padded.cells[replicated.size()];
      }
      replicated.push_back(packed);
    }
  return {to_tensor(packed_cells), to_tensor(replicated),  to_tensor(first_copy),
          to_tensor(response),     to_tensor(predictor),   to_tensor(cu_prompt),
          to_tensor(cu_response),  to_tensor(padded.cells)};
}

/// visible_until [N], nodes [samples, 5] and previous [N] of sequences laid one after another,
/// nothing shared.
std::tuple<at::Tensor, at::Tensor, at::Tensor> replicated_structure(const at::Tensor& lengths) {
  const at::Tensor host = lengths.cpu().contiguous();
  const auto* length = host.const_data_ptr<int64_t>();
  std::vector<int64_t> until, nodes, previous;
  int64_t begin = 0, count = 0;
  for (int64_t sample = 0; sample < host.numel(); ++sample) {
    const int64_t end = begin + length[sample];
    if (end == begin) continue;
    until.insert(until.end(), static_cast<size_t>(end - begin), end);
    nodes.insert(nodes.end(), {begin, end, end, -1, 0});
    previous.push_back(-1);
    for (int64_t token = begin; token + 1 < end; ++token) previous.push_back(token);
    begin = end;
    ++count;
  }
  return {to_tensor(until).to(lengths.device()), to_tensor(nodes).view({count, 5}),
          to_tensor(previous).to(lengths.device())};
}

std::string library_version() { return std::string(version()); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def("version() -> str", library_version);
  m.def(
      "build_forest(Tensor input_ids, Tensor? attention_mask, Tensor? position_ids, "
      "int response_length, str sharing, int min_shared_tokens) -> Tensor[]",
      build_forest);
  m.def("prompt_groups(Tensor input_ids, Tensor? attention_mask, int response_length) -> Tensor",
        prompt_groups);
  m.def(
      "pack_groups(Tensor input_ids, Tensor? attention_mask, int response_length, int[] rows, "
      "int[] sizes) -> Tensor[]",
      pack_groups);
  m.def(
      "replicated_structure(Tensor lengths) -> "
      "(Tensor visible_until, Tensor nodes, Tensor previous)",
      replicated_structure);
}

}  // namespace zorro::bindings
