#include "io/line_source.h"
#include "zorro/core/error.h"
#include "zorro/io/rollouts.h"

namespace zorro {

struct RolloutReader::State {
  State(const std::filesystem::path& path, const RolloutReadOptions& read_options)
      : source(path), file(path.string()), options(read_options) {}

  LineSource source;
  std::string file;
  RolloutReadOptions options;
  int64_t num_read = 0, num_skipped = 0;
};

RolloutReader::RolloutReader(const std::filesystem::path& path, const RolloutReadOptions& options)
    : state_(std::make_unique<State>(path, options)) {}
RolloutReader::~RolloutReader() = default;
RolloutReader::RolloutReader(RolloutReader&&) noexcept = default;
RolloutReader& RolloutReader::operator=(RolloutReader&&) noexcept = default;

std::optional<Rollout> RolloutReader::next() {
  State& state = *state_;
  std::string line;
  while (state.source.next(line)) {
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    try {
      Rollout rollout = parse_rollout(line, state.file, state.source.line_number());
      ++state.num_read;
      return rollout;
    } catch (const RolloutError&) {
      if (!state.options.skip_bad) throw;
      ++state.num_skipped;
    }
  }
  ZORRO_CHECK_AS(RolloutError, state.num_read > 0, "[rollouts] ", state.file,
                 ": must hold at least one ", state.num_skipped > 0 ? "good " : "",
                 "line, got none.");
  return std::nullopt;
}

int64_t RolloutReader::num_skipped() const { return state_->num_skipped; }

double RolloutReader::fraction_read() const { return state_->source.fraction_read(); }

std::vector<Rollout> read_rollouts(const std::filesystem::path& path,
                                   const RolloutReadOptions& options) {
  RolloutReader reader(path, options);
  std::vector<Rollout> rollouts;
  while (std::optional<Rollout> rollout = reader.next()) rollouts.push_back(std::move(*rollout));
  return rollouts;
}

}  // namespace zorro
