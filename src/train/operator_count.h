#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace zorro {

/// Operators that `work` calls on this thread and its backward passes: name and shapes of tensor
/// arguments -> calls.
std::map<std::string, int64_t> count_operators_of(const std::function<void()>& work);

}  // namespace zorro
