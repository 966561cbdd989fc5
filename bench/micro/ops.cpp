// Each op against the machine's own matrix-product rate, measured in the same run: the counter
// of_mm.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "zorro/core/random.h"
#include "zorro/ops/forest_attention.h"
#include "zorro/ops/forest_tensors.h"
#include "zorro/ops/linear_logprob.h"
#include "zorro/plan/cost.h"

namespace {

/// FLOP/s of at::mm, float32, 2048 x 1024 x 1024: the best of ten calls, taken anew by each
/// benchmark.
double mm_rate() {
  const at::Tensor a = at::randn({2048, 1024}), b = at::randn({1024, 1024});
  at::Tensor out = at::empty({2048, 1024});
  double best = 0;
  for (int call = 0; call < 10; ++call) {
    const auto start = std::chrono::steady_clock::now();
    at::mm_out(out, a, b);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * 2048 * 1024 * 1024 / time.count());
  }
  return best;
}

void report(benchmark::State& state, double flops) {
  state.counters["flops"] =
      benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["of_mm"] =
      benchmark::Counter(flops / mm_rate(), benchmark::Counter::kIsIterationInvariantRate);
}

/// One prompt of P tokens and n responses of R, D = 64, 8 query and 4 key heads, float32.
void forest_attention(benchmark::State& state) {
  const int64_t prompt = state.range(0), response = state.range(1), count = state.range(2);
  constexpr int64_t kHeads = 8, kKvHeads = 4, kDim = 64;
  zorro::Random random(1);
  std::vector<std::vector<int64_t>> tokens(static_cast<size_t>(count));
  std::vector<zorro::Sample> samples;
  for (auto& row : tokens) {
    row.assign(static_cast<size_t>(prompt), 1);
    for (int64_t i = 0; i < response; ++i) row.push_back(random.below(1000));
    samples.push_back({row, prompt});
  }
  const auto forest = zorro::PrefixForest::build(samples, {});
  const auto tensors = zorro::to_tensors(forest);
  const int64_t size = forest.num_tokens();
  const bool backward = state.range(3) != 0;
  at::Tensor q = at::randn({size, kHeads, kDim}).requires_grad_(backward);
  at::Tensor k = at::randn({size, kKvHeads, kDim}).requires_grad_(backward);
  at::Tensor v = at::randn({size, kKvHeads, kDim}).requires_grad_(backward);
  const at::Tensor upstream = at::randn({size, kHeads, kDim});
  for (auto _ : state) {
    const at::Tensor out =
        zorro::forest_attention(q, k, v, tensors.visible_until, tensors.nodes).out;
    if (backward) benchmark::DoNotOptimize(torch::autograd::grad({out}, {q, k, v}, {upstream}));
  }
  const auto pairs = static_cast<double>(zorro::forest_work(forest).pairs);
  report(state, pairs * kHeads * kDim * (backward ? 14 : 4));
}
BENCHMARK(forest_attention)
    ->ArgNames({"P", "R", "n", "backward"})
    ->ArgsProduct({{1024}, {128}, {8, 16}, {0, 1}})
    ->Args({512, 512, 8, 1})
    ->Args({4096, 512, 8, 1})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

/// Head modes 0 none, 1 compute, 2 memory; three products forward and backward (memory runs four).
void linear_logprob(benchmark::State& state) {
  const int64_t rows = 2048, hidden_size = 512, vocabulary = 8192;
  at::Tensor hidden = at::randn({rows, hidden_size}).requires_grad_(true);
  at::Tensor weight = at::randn({vocabulary, hidden_size}).mul_(0.05).requires_grad_(true);
  const at::Tensor row = at::randint(0, rows, {rows}, at::kLong);
  const at::Tensor label = at::randint(0, vocabulary, {rows}, at::kLong);
  const at::Tensor temperature = at::zeros({}).add_(1);
  zorro::LinearLogprobOptions options;
  options.mode = static_cast<zorro::HeadMode>(state.range(0));
  for (auto _ : state) {
    const auto scores = zorro::linear_logprob(hidden, weight, row, label, temperature, options);
    const at::Tensor loss = scores.logprob.sum().add(scores.entropy.sum());
    benchmark::DoNotOptimize(torch::autograd::grad({loss}, {hidden, weight}));
  }
  report(state, 6.0 * rows * hidden_size * vocabulary);
}
BENCHMARK(linear_logprob)
    ->ArgName("mode")
    ->DenseRange(0, 2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace

int main(int argc, char** argv) {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);  // keeps freed pages, as the command does
  mallopt(M_TRIM_THRESHOLD, -1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
