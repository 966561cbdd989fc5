#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zorro/forest/sample.h"

namespace zorro {

/// One line of a rollout file.
///
/// Per-token arrays have one value a response token (a token of `token_ids` in the multi-turn form,
/// where the first has no predecessor: its value is null in the file, NaN here, and its mask 0).
/// Empty: the line lacks the key.
struct Rollout {
  std::vector<int64_t> token_ids;  ///< prompt and response, or the multi-turn sequence
  int64_t scored_begin = 0;        ///< prompt length; 1 in the multi-turn form
  int64_t prompt_length =
      0;  ///< tokens before the first one in the loss (multi-turn); else scored_begin
  bool multi_turn = false;
  std::vector<uint8_t>
      loss_mask;  ///< one a scored token (response token); all 1 when the line lacks it
  std::vector<double> advantages;  ///< one a scored token (a single number is repeated)
  std::vector<double> old_logprobs, ref_logprobs, rollout_logprobs;  ///< one a scored token
  std::optional<double> temperature;
  std::string id;     ///< the line's own, else its line number as text
  std::string group;  ///< the line's own, else empty (equal prompts)
  int64_t line = 0;   ///< 1-based
  std::string json;   ///< the line as it was read, to be kept on output

  int64_t num_scored() const { return static_cast<int64_t>(token_ids.size()) - scored_begin; }
  /// A view for the forest.
  Sample sample() const { return {token_ids, scored_begin, prompt_length, {}, {}}; }
};

struct RolloutReadOptions {
  /// Skip and count bad lines instead of throwing.
  bool skip_bad = false;
};

/// Reads JSON lines, gzip by the suffix .gz, one rollout at a time (memory: one line).
///
/// Throws  RolloutError with file, line and key: bad JSON, missing key, wrong type or length, NaN
/// or infinity, negative
///         token id, temperature not > 0, empty prompt, a file without any line.
class RolloutReader {
 public:
  explicit RolloutReader(const std::filesystem::path& path, const RolloutReadOptions& options = {});
  ~RolloutReader();
  RolloutReader(RolloutReader&&) noexcept;
  RolloutReader& operator=(RolloutReader&&) noexcept;

  /// The following rollout, or nothing at the end of the file.
  std::optional<Rollout> next();
  int64_t num_skipped() const;
  /// Bytes consumed over the file's size, for progress.
  double fraction_read() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::vector<Rollout> read_rollouts(const std::filesystem::path& path,
                                   const RolloutReadOptions& options = {});

/// Parses one line; the fuzz target's entry.
Rollout parse_rollout(const std::string& line, const std::string& file, int64_t line_number);

/// Writes lines (gzip by suffix) to a temporary file; `commit` flushes and renames it. Without
/// commit nothing remains.
class RolloutWriter {
 public:
  explicit RolloutWriter(const std::filesystem::path& path);
  ~RolloutWriter();

  /// Copies the line's JSON and sets (or replaces) per-token arrays: one value a scored token; in
  /// the multi-turn form a null is put before them. Floats are written as the shortest text that
  /// reads back to the same float32.
  void write(const Rollout& rollout,
             const std::vector<std::pair<std::string, std::vector<float>>>& values);
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zorro
