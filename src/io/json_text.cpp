#include "io/json_text.h"

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "zorro/core/error.h"

namespace zorro {
namespace {

constexpr int kDeepest = 64;

/// Refuses duplicate keys and deep nesting while nlohmann builds the value.
class StrictCallback {
 public:
  bool operator()(int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > kDeepest) throw std::invalid_argument("nested too deeply");
    if (event == Event::object_start) {
      keys_.emplace_back();
    } else if (event == Event::object_end) {
      keys_.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second)
        throw std::invalid_argument(concat("duplicate key \"", key, "\""));
    }
    return true;
  }

 private:
  std::vector<std::set<std::string>> keys_;
};

}  // namespace

nlohmann::json parse_json(std::string_view text) {
  StrictCallback strict;
  try {
    return nlohmann::json::parse(
        text, [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
          return strict(depth, event, parsed);
        });
  } catch (const nlohmann::json::exception& error) {
    throw std::invalid_argument(error.what());
  }
}

}  // namespace zorro
