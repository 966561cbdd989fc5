#include "interrupt.h"

#include <csignal>

namespace zorro::app {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void on_signal(int /*signal*/) { interrupted = 1; }

}  // namespace

void catch_interrupts() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

void poll_interrupt() {
  if (interrupted != 0) throw Interrupted();
}

}  // namespace zorro::app
