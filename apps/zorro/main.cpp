#include <c10/util/Exception.h>

#include <filesystem>
#include <iostream>
#include <new>
#include <string>

#include "commands.h"
#include "interrupt.h"
#include "memory.h"
#include "zorro/core/error.h"
#include "zorro/core/version.h"

namespace zorro::app {
namespace {

enum ExitCode { kOk = 0, kBadInput = 2, kFailure = 3, kInterrupted = 130 };

/// One line on stderr, whatever the message holds.
int report(int code, std::string text) {
  for (char& letter : text)
    if (letter == '\n' || letter == '\r') letter = ' ';
  std::cerr << "zorro: " << text << "\n";
  return code;
}

int report_out_of_memory() { return report(kFailure, "out of memory. Lower --max-tokens."); }

int report_torch(const c10::Error& error) {
  std::string text = error.what_without_backtrace();
  if (text.find("can't allocate memory") != std::string::npos) return report_out_of_memory();
  return report(kFailure, "internal error: " + text.substr(0, text.find('\n')));
}

int run_guarded(const Run& run) {
  try {
    return run();
  } catch (const Interrupted&) {
    return report(kInterrupted, "interrupted; nothing was written");
  } catch (const InvalidArgument& error) {
    return report(kBadInput, error.what());
  } catch (const CheckpointError& error) {
    return report(kBadInput, error.what());
  } catch (const RolloutError& error) {
    return report(kBadInput, error.what());
  } catch (const NotSupported& error) {
    return report(kBadInput, error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return report(kBadInput, error.what());
  } catch (const std::bad_alloc&) {
    return report_out_of_memory();
  } catch (const c10::Error& error) {
    return report_torch(error);
  } catch (const std::exception& error) {
    return report(kFailure, std::string("internal error: ") + error.what());
  }
}

int parse_and_run(int argc, char** argv) {
  CLI::App app{"ZoRRo: policy updates that compute a shared prompt once", "zorro"};
  app.set_version_flag("--version", std::string("zorro ") + version());
  app.require_subcommand(0, 1);  // none is reported below, after a wrong one
  app.footer(
      "Examples:\n  zorro demo\n  zorro check --model DIR --rollouts FILE.jsonl.gz\n"
      "Exit codes: 0 ok, 1 check failed, 2 bad usage or input, 3 internal or out of memory, 130 "
      "Ctrl-C");
  Run run;
  add_demo_command(app, run);
  add_check_command(app, run);
  add_logprobs_command(app, run);
  add_train_command(app, run);
  add_plan_command(app, run);
  add_bench_command(app, run);
  add_inspect_command(app, run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error);
    return report(kBadInput, std::string(error.what()) + ". See --help.");
  }
  if (!run) return report(kBadInput, "a subcommand is required. See --help.");
  return run_guarded(run);
}

}  // namespace
}  // namespace zorro::app

int main(int argc, char** argv) {
  zorro::app::keep_freed_memory();
  zorro::app::catch_interrupts();
  return zorro::app::parse_and_run(argc, argv);
}
