#include <zlib.h>

#include <array>
#include <charconv>
#include <cmath>
#include <system_error>

#include "io/atomic_file.h"
#include "io/json_splice.h"
#include "zorro/core/error.h"
#include "zorro/io/rollouts.h"

namespace zorro {
namespace {

std::string json_array(const std::vector<float>& values, int64_t leading_nulls) {
  std::string text = "[";
  for (int64_t i = 0; i < leading_nulls; ++i) text += i == 0 ? "null" : ", null";
  for (const float value : values) {
    ZORRO_ASSERT(std::isfinite(value));
    if (text.size() > 1) text += ", ";
    std::array<char, 32> digits{};
    const auto end = std::to_chars(digits.begin(), digits.end(), value).ptr;
    text.append(digits.begin(), end);
  }
  return text + "]";
}

/// Deflates to gzip members with a fixed header: the same input gives the same bytes.
class Gzip {
 public:
  Gzip() {
    constexpr int kGzipWindow = 15 + 16;
    ZORRO_ASSERT(deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, kGzipWindow, 8,
                              Z_DEFAULT_STRATEGY) == Z_OK);
  }
  ~Gzip() { deflateEnd(&stream_); }
  Gzip(const Gzip&) = delete;
  Gzip& operator=(const Gzip&) = delete;

  void write(const std::string& text, bool finish, AtomicFile& file) {
    std::array<unsigned char, 1 << 16> block{};
    std::string input = text;  // zlib wants mutable bytes
    stream_.next_in = reinterpret_cast<unsigned char*>(input.data());
    stream_.avail_in = static_cast<unsigned>(input.size());
    do {
      stream_.next_out = block.data();
      stream_.avail_out = static_cast<unsigned>(block.size());
      deflate(&stream_, finish ? Z_FINISH : Z_NO_FLUSH);
      file.write(block.data(), block.size() - stream_.avail_out);
    } while (stream_.avail_out == 0);
  }

 private:
  z_stream stream_{};
};

template <typename Action>
void with_path(const std::filesystem::path& path, const Action& action) {
  try {
    action();
  } catch (const std::filesystem::filesystem_error& error) {
    throw RolloutError(concat("[rollouts] ", path.string(),
                              ": could not be written: ", error.code().message(), "."));
  }
}

}  // namespace

struct RolloutWriter::State {
  explicit State(const std::filesystem::path& target) : path(target), file(target) {
    if (target.extension() == ".gz") gzip = std::make_unique<Gzip>();
  }

  void write(const std::string& text, bool finish) {
    if (gzip) {
      gzip->write(text, finish, file);
    } else {
      file.write(text.data(), text.size());
    }
  }

  std::filesystem::path path;
  AtomicFile file;
  std::unique_ptr<Gzip> gzip;
};

RolloutWriter::RolloutWriter(const std::filesystem::path& path) {
  with_path(path, [&] { state_ = std::make_unique<State>(path); });
}
RolloutWriter::~RolloutWriter() = default;

void RolloutWriter::write(const Rollout& rollout,
                          const std::vector<std::pair<std::string, std::vector<float>>>& values) {
  std::vector<std::pair<std::string, std::string>> texts;
  for (const auto& [key, numbers] : values) {
    ZORRO_ASSERT(static_cast<int64_t>(numbers.size()) == rollout.num_scored());
    texts.emplace_back(key, json_array(numbers, rollout.multi_turn ? rollout.scored_begin : 0));
  }
  const std::string line = splice_json(rollout.json, texts) + "\n";
  with_path(state_->path, [&] { state_->write(line, /*finish=*/false); });
}

void RolloutWriter::commit() {
  with_path(state_->path, [&] {
    state_->write("", /*finish=*/true);
    state_->file.commit();
  });
}

}  // namespace zorro
