#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace zorro {

/// Parses JSON text strictly: one value, no duplicate keys, no trailing text, bounded nesting.
///
/// Throws  std::invalid_argument with the parser's reason.
nlohmann::json parse_json(std::string_view text);

}  // namespace zorro
