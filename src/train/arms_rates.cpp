#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>

#include "zorro/core/error.h"
#include "zorro/core/random.h"
#include "zorro/train/arms.h"

namespace zorro {
namespace {

constexpr int kRepeats = 5;

double timed(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Forward and backward of the naive arm's attention on packed rows [samples * length, heads, D].
class ArmAttention {
 public:
  ArmAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t num_samples,
               AttentionPath path)
      : q_(q), k_(k), v_(v) {
    const int64_t length = q.size(0) / num_samples;
    const std::vector<int64_t> ids(static_cast<size_t>(length), 0);
    const Sample sample{ids, 1, -1, {}, {}};
    const std::vector<Sample> samples(static_cast<size_t>(num_samples), sample);
    forest_ = to_tensors(PrefixForest::build(samples, {Sharing::kNone}));
    options_.path = path;
  }
  void operator()() {
    const AttentionResult result =
        forest_attention(q_, k_, v_, forest_.visible_until, forest_.nodes, options_);
    result.out.backward(at::ones_like(result.out));
    for (at::Tensor* x : {&q_, &k_, &v_}) x->mutable_grad().reset();
  }

 private:
  at::Tensor q_, k_, v_;
  ForestTensors forest_;
  ForestAttentionOptions options_;
};

/// [samples * length, heads, D] -> [samples, heads, length, D], contiguous as a plain caller has
/// it.
at::Tensor as_batch(const at::Tensor& x, int64_t num_samples) {
  return x.detach()
      .view({num_samples, x.size(0) / num_samples, x.size(1), x.size(2)})
      .transpose(1, 2)
      .contiguous();
}

void plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true);
  at::_scaled_dot_product_flash_attention_for_cpu_backward(at::ones_like(out), q, k, v, out, lse,
                                                           0.0, true);
}

Rollout random_rollout(const std::vector<int64_t>& prompt, int64_t response_length,
                       int64_t vocab_size, Random& random) {
  Rollout rollout;
  rollout.token_ids = prompt;
  rollout.scored_begin = rollout.prompt_length = static_cast<int64_t>(prompt.size());
  for (int64_t token = 0; token < response_length; ++token)
    rollout.token_ids.push_back(random.below(vocab_size));
  const auto scored = static_cast<size_t>(response_length);
  rollout.advantages.assign(scored, random.normal());
  rollout.loss_mask.assign(scored, 1);
  return rollout;
}

}  // namespace

std::vector<Rollout> random_rollouts(const RolloutShape& shape, int64_t vocab_size, uint64_t seed) {
  ZORRO_CHECK(
      shape.num_prompts >= 1 && shape.num_samples >= 1 && shape.prompt_length >= 1 &&
          shape.response_length >= 0 && vocab_size >= 1,
      "[bench] prompts, rollouts per prompt, prompt length and vocabulary must be >= 1, got ",
      shape.num_prompts, ", ", shape.num_samples, ", ", shape.prompt_length, " and ", vocab_size,
      ", response length >= 0, got ", shape.response_length, ".");
  Random random(seed);
  std::vector<Rollout> rollouts;
  for (int64_t group = 0; group < shape.num_prompts; ++group) {
    std::vector<int64_t> prompt;
    for (int64_t token = 0; token < shape.prompt_length; ++token)
      prompt.push_back(random.below(vocab_size));
    for (int64_t sample = 0; sample < shape.num_samples; ++sample) {
      rollouts.push_back(random_rollout(prompt, shape.response_length, vocab_size, random));
      rollouts.back().line = static_cast<int64_t>(rollouts.size());
      rollouts.back().id = std::to_string(rollouts.back().line);
    }
  }
  return rollouts;
}

double measure_mm_rate(at::ScalarType dtype) {
  constexpr int64_t kRows = 2048, kInner = 1024, kColumns = 1024;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::randn({kRows, kInner}, at::kFloat).to(dtype);
  const at::Tensor b = at::randn({kInner, kColumns}, at::kFloat).to(dtype);
  double best = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat <= kRepeats; ++repeat)
    best = std::min(best, timed([&] { at::mm(a, b); }));
  return 2.0 * kRows * kInner * kColumns / best;
}

AttentionTimes measure_naive_attention(const ModelConfig& config, int64_t num_samples,
                                       int64_t length, at::ScalarType dtype, AttentionPath path) {
  const auto random_rows = [&](int64_t heads) {
    return at::randn({num_samples * length, heads, config.head_dim}, at::kFloat).to(dtype);
  };
  const at::Tensor q = random_rows(config.num_query_heads).requires_grad_(true);
  const at::Tensor k = random_rows(config.num_kv_heads).requires_grad_(true);
  const at::Tensor v = random_rows(config.num_kv_heads).requires_grad_(true);
  const at::Tensor plain_q = as_batch(q, num_samples), plain_k = as_batch(k, num_samples),
                   plain_v = as_batch(v, num_samples);
  ArmAttention arm(q, k, v, num_samples, path);
  AttentionTimes times{std::numeric_limits<double>::infinity(),
                       std::numeric_limits<double>::infinity()};
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    times.arm = std::min(times.arm, timed([&] { arm(); }));
    times.plain = std::min(times.plain, timed([&] { plain_attention(plain_q, plain_k, plain_v); }));
  }
  return times;
}

}  // namespace zorro
