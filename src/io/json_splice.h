#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zorro {

/// Sets keys of a JSON object's text and leaves every other byte as it is: a key that is there has
/// its value replaced, others are appended. `object` must be valid JSON; `values` are (plain ASCII
/// key, JSON text).
std::string splice_json(std::string_view object,
                        const std::vector<std::pair<std::string, std::string>>& values);

}  // namespace zorro
