#include "memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <atomic>
#include <cstdio>

namespace zorro::app {
namespace {

/// Wraps the CPU allocator and counts. Late frees are safe: each block carries its own deleter.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr block = inner_->allocate(bytes);
    if (bytes == 0 || block.get() == nullptr) return block;
    const auto size = static_cast<int64_t>(bytes);
    add(size);
    auto* owner = new Block{std::move(block), size, this};
    return {owner->inner.get(), owner, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  int64_t live() const { return live_.load(); }
  int64_t peak() const { return peak_.load(); }
  void reset() { peak_.store(live_.load()); }

 private:
  struct Block {
    c10::DataPtr inner;
    int64_t bytes;
    CountingAllocator* allocator;
  };

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    block->allocator->live_.fetch_sub(block->bytes, std::memory_order_relaxed);
    delete block;
  }
  void add(int64_t bytes) {
    const int64_t now = live_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t peak = peak_.load(std::memory_order_relaxed);
    while (peak < now && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }

  c10::Allocator* inner_;
  std::atomic<int64_t> live_{0}, peak_{0};
};

/// Installed once and never taken out: tensors that it made may outlive every scope.
CountingAllocator& counting_allocator() {
  static auto* allocator = [] {
    auto* counting = new CountingAllocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(counting, /*priority=*/1);
    return counting;
  }();
  return *allocator;
}

}  // namespace

void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_TOP_PAD, 64 << 20);
}

MemoryProbe tensor_memory() {
  CountingAllocator& allocator = counting_allocator();
  return {[&allocator] { return allocator.live(); }, [&allocator] { return allocator.peak(); },
          [&allocator] { allocator.reset(); }};
}

std::string bytes_text(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

}  // namespace zorro::app
