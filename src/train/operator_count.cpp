// The torch wheel is built with NDEBUG and so never sets the flag that RecordFunction::inputs()
// checks without it.
#ifndef NDEBUG
#define NDEBUG
#endif

#include "train/operator_count.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>

#include "zorro/core/error.h"

namespace zorro {
namespace {

/// What the callback of RecordFunction, a plain function, finds through the thread's state.
class OperatorCount final : public c10::DebugInfoBase {
 public:
  void add(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[text];
  }
  const std::map<std::string, int64_t>& counts() const { return counts_; }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};

const auto kCountSlot = c10::DebugInfoKind::TEST_INFO;

std::string operator_text(const at::RecordFunction& function) {
  std::string text = function.name();
  for (const c10::IValue& input : function.inputs())
    if (input.isTensor() && input.toTensor().defined())
      text += " " + concat(input.toTensor().sizes());
  return text;
}

std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction& function) {
  auto* count = dynamic_cast<OperatorCount*>(c10::ThreadLocalDebugInfo::get(kCountSlot));
  if (count != nullptr) count->add(operator_text(function));
  return nullptr;
}

/// Registers the callback for its own lifetime.
class CountingScope {
 public:
  CountingScope()
      : handle_(at::addGlobalCallback(
            at::RecordFunctionCallback(&count_operator)
                .needsInputs(true)
                .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}))) {}
  ~CountingScope() { at::removeCallback(handle_); }
  CountingScope(const CountingScope&) = delete;
  CountingScope& operator=(const CountingScope&) = delete;

 private:
  at::CallbackHandle handle_;
};

}  // namespace

std::map<std::string, int64_t> count_operators_of(const std::function<void()>& work) {
  const auto count = std::make_shared<OperatorCount>();
  const c10::DebugInfoGuard guard(kCountSlot, count);
  const CountingScope scope;
  work();
  return count->counts();
}

}  // namespace zorro
