#pragma once

#include <exception>

namespace zorro::app {

/// Ctrl-C arrived; unwinding removes what is half-written.
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted"; }
};

/// From now on Ctrl-C (and SIGTERM) only set a flag.
void catch_interrupts();
/// Throws Interrupted when the flag is set.
void poll_interrupt();

}  // namespace zorro::app
