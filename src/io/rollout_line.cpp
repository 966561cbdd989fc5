#include <simdjson.h>

#include <cmath>
#include <limits>
#include <map>
#include <string_view>

#include "zorro/core/error.h"
#include "zorro/io/rollouts.h"

namespace zorro {
namespace {

using simdjson::dom::element;
using simdjson::dom::element_type;

class LineParser {
 public:
  LineParser(const std::string& file, int64_t line) : file_(file), line_(line) {}

  Rollout parse(const std::string& text) {
    simdjson::dom::parser parser;
    element root;
    const simdjson::error_code error = parser.parse(text).get(root);
    if (error != simdjson::SUCCESS)
      fail("must be valid JSON (no NaN or Infinity), got: ", simdjson::error_message(error), ".");
    simdjson::dom::object object;
    if (root.get(object) != simdjson::SUCCESS) fail("must be a JSON object.");
    for (const auto field : object)
      if (!fields_.emplace(field.key, field.value).second)
        fail("key \"", field.key, "\" must be given once.");

    read_tokens();
    read_loss_mask();
    if (const element* value = find("advantage")) read_advantage(*value);
    read_values("old_logprobs", rollout_.old_logprobs);
    read_values("ref_logprobs", rollout_.ref_logprobs);
    read_values("rollout_logprobs", rollout_.rollout_logprobs);
    read_temperature();
    rollout_.id = read_name("id", std::to_string(line_));
    rollout_.group = read_name("group", "");
    rollout_.line = line_;
    rollout_.json = text;
    return std::move(rollout_);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... what) const {
    throw RolloutError(concat("[rollouts] ", file_, ":", line_, ": ", what...));
  }

  const element* find(std::string_view key) const {
    const auto found = fields_.find(key);
    return found == fields_.end() || found->second.is_null() ? nullptr : &found->second;
  }

  simdjson::dom::array array_of(std::string_view key, const element& value) const {
    simdjson::dom::array array;
    if (value.get(array) != simdjson::SUCCESS)
      fail("key \"", key, "\" must be a list, got ", simdjson::to_string(value), ".");
    return array;
  }

  void append_ids(std::string_view key) {
    const element* value = find(key);
    if (value == nullptr) fail("key \"", key, "\" must be there, got nothing.");
    for (const element item : array_of(key, *value)) {
      int64_t id = 0;
      if (item.get(id) != simdjson::SUCCESS || id < 0)
        fail("key \"", key, "\" must hold token ids >= 0, got ", simdjson::to_string(item), ".");
      rollout_.token_ids.push_back(id);
    }
  }

  void read_tokens() {
    rollout_.multi_turn = find("token_ids") != nullptr;
    if (rollout_.multi_turn) {
      for (const char* key : {"prompt_ids", "response_ids"})
        if (find(key) != nullptr)
          fail("key \"token_ids\" must stand without \"", key, "\", got both.");
      append_ids("token_ids");
      if (rollout_.token_ids.empty()) fail("key \"token_ids\" must hold a token, got none.");
      rollout_.scored_begin = 1;
    } else {
      append_ids("prompt_ids");
      if (rollout_.token_ids.empty())
        fail(
            "key \"prompt_ids\" must hold at least one token, got none: the first response token "
            "needs a predecessor.");
      rollout_.scored_begin = static_cast<int64_t>(rollout_.token_ids.size());
      append_ids("response_ids");
    }
    rollout_.prompt_length = rollout_.scored_begin;
  }

  /// Entries of a per-token array in the file.
  size_t file_length() const {
    const int64_t skipped = rollout_.multi_turn ? rollout_.scored_begin : 0;
    return static_cast<size_t>(rollout_.num_scored() + skipped);
  }

  template <typename Visit>
  void for_each_token(std::string_view key, const element& value, const Visit& visit) const {
    const simdjson::dom::array array = array_of(key, value);
    size_t count = 0;
    for (const element item : array) {
      if (count < file_length()) visit(count, item);
      ++count;
    }
    if (count != file_length())
      fail("key \"", key, "\" must have ", file_length(),
           rollout_.multi_turn ? " values, one a token, got "
                               : " values, one a response token, got ",
           count, ".");
  }

  void read_loss_mask() {
    const element* value = find("loss_mask");
    if (value == nullptr) {
      if (rollout_.multi_turn) fail("key \"loss_mask\" must be there with \"token_ids\".");
      rollout_.loss_mask.assign(static_cast<size_t>(rollout_.num_scored()), 1);
      return;
    }
    std::vector<uint8_t> mask;
    for_each_token("loss_mask", *value, [&](size_t, const element& item) {
      bool flag = false;
      int64_t number = 0;
      if (item.get(flag) != simdjson::SUCCESS) {
        if (item.get(number) != simdjson::SUCCESS || (number != 0 && number != 1))
          fail("key \"loss_mask\" must hold 0 and 1, got ", simdjson::to_string(item), ".");
        flag = number == 1;
      }
      mask.push_back(flag ? 1 : 0);
    });
    if (rollout_.multi_turn) {
      if (mask.front() != 0)
        fail("key \"loss_mask\" must begin with 0: the first token has no predecessor.");
      int64_t first = 0;
      while (first < static_cast<int64_t>(mask.size()) && mask[static_cast<size_t>(first)] == 0)
        ++first;
      rollout_.prompt_length = first;
      mask.erase(mask.begin());
    }
    rollout_.loss_mask = std::move(mask);
  }

  double number_of(std::string_view key, const element& item) const {
    double number = 0;
    if (item.get(number) != simdjson::SUCCESS || !std::isfinite(number))
      fail("key \"", key, "\" must hold finite numbers, got ", simdjson::to_string(item), ".");
    return number;
  }

  std::vector<double> values_of(std::string_view key, const element& value) const {
    std::vector<double> values;
    for_each_token(key, value, [&](size_t index, const element& item) {
      if (rollout_.multi_turn && index == 0) return;  // no predecessor: null or anything
      values.push_back(number_of(key, item));
    });
    return values;
  }

  void read_advantage(const element& value) {
    if (value.type() == element_type::ARRAY) {
      rollout_.advantages = values_of("advantage", value);
      return;
    }
    rollout_.advantages.assign(static_cast<size_t>(rollout_.num_scored()),
                               number_of("advantage", value));
  }

  void read_values(std::string_view key, std::vector<double>& values) {
    if (const element* value = find(key)) values = values_of(key, *value);
  }

  void read_temperature() {
    const element* value = find("temperature");
    if (value == nullptr) return;
    const double temperature = number_of("temperature", *value);
    if (!(temperature > 0)) fail("key \"temperature\" must be > 0, got ", temperature, ".");
    rollout_.temperature = temperature;
  }

  std::string read_name(std::string_view key, std::string otherwise) const {
    const element* value = find(key);
    if (value == nullptr) return otherwise;
    std::string_view text;
    if (value->get(text) == simdjson::SUCCESS) return std::string(text);
    int64_t number = 0;
    if (value->get(number) == simdjson::SUCCESS) return std::to_string(number);
    fail("key \"", key, "\" must be a string or an integer, got ", simdjson::to_string(*value),
         ".");
  }

  const std::string& file_;
  int64_t line_;
  std::map<std::string_view, element> fields_;
  Rollout rollout_;
};

}  // namespace

Rollout parse_rollout(const std::string& line, const std::string& file, int64_t line_number) {
  return LineParser(file, line_number).parse(line);
}

}  // namespace zorro
