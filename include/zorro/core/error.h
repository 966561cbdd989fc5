#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace zorro {

/// The caller passed something that breaks a documented rule (ValueError in Python).
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The request is understood and not available here (family, RoPE scaling, active dropout).
class NotSupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A checkpoint folder or file is missing, cut, lying or does not fit the model.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A rollout file is missing, cut or has a bad line; the message names file, line and key.
class RolloutError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A broken promise inside the library: our bug, never the caller's.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Concatenates its arguments as text, in the way of `std::ostream <<`.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace zorro

/// Throws `Error` with the concatenated text when `condition` is false. One form of message
/// everywhere:
/// "[where] <argument> must <rule>, got <value>. <what to do>".
#define ZORRO_CHECK_AS(Error, condition, ...)             \
  do {                                                    \
    if (!(condition)) [[unlikely]]                        \
      throw ::zorro::Error(::zorro::concat(__VA_ARGS__)); \
  } while (false)

/// A rule on the caller's arguments; throws InvalidArgument.
#define ZORRO_CHECK(condition, ...) ZORRO_CHECK_AS(InvalidArgument, condition, __VA_ARGS__)

/// A promise of our own; throws InternalError with the place and the condition.
#define ZORRO_ASSERT(condition)                                     \
  ZORRO_CHECK_AS(InternalError, condition, __FILE__, ":", __LINE__, \
                 ": broken promise: ", #condition)
