#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "forest_attention_cases.h"
#include "ops/forest_attention_kernels.h"
#include "ops/forest_attention_parts.h"

namespace zorro::reference {
namespace {

/// Notes every call and hands it to the CPU primitive.
class Recorder final : public FlashPrimitive {
 public:
  struct Call {
    int64_t batch, queries, keys;
    bool causal;
    at::ScalarType dtype;
    const void* q;
    const void* k;
    const void* result;
  };

  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, bool causal,
                                             double scale) const override {
    auto result = cpu_flash_primitive().forward(q, k, v, causal, scale);
    note(q, k, causal, std::get<0>(result));
    return result;
  }

  std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
      const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
      const at::Tensor& out, const at::Tensor& lse, bool causal, double scale) const override {
    auto result = cpu_flash_primitive().backward(grad_out, q, k, v, out, lse, causal, scale);
    note(q, k, causal, std::get<0>(result));
    return result;
  }

  std::vector<Call> take() const { return std::exchange(calls_, {}); }

 private:
  void note(const at::Tensor& q, const at::Tensor& k, bool causal, const at::Tensor& result) const {
    EXPECT_GT(q.numel(), 0);
    EXPECT_GT(k.numel(), 0);
    calls_.push_back({q.size(0), q.size(2), k.size(2), causal, q.scalar_type(), q.const_data_ptr(),
                      k.const_data_ptr(), result.const_data_ptr()});
  }

  mutable std::vector<Call> calls_;
};

struct Driver {
  AttentionInputs inputs;
  AttentionCall call;
  Recorder recorder;

  Driver(const PrefixForest& forest, at::ScalarType dtype) {
    Random random(30);
    inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16}, dtype);
    const ForestTensors tensors = to_tensors(forest);
    call = {tensors.visible_until, tensors.nodes, 0.25, 0};
  }

  AttentionForward forward() const {
    return levels_attention(inputs.q, inputs.k, inputs.v, call, recorder);
  }
  AttentionGradients backward(const AttentionForward& result) const {
    return levels_attention_backward(inputs.out_grad, inputs.q, inputs.k, inputs.v, result, call,
                                     recorder);
  }
};

TEST(AttentionLevels, TheNaiveBatchIsOneCallWithoutCopies) {
  for (const int64_t length : {3, 100}) {
    const Driver driver(replicated_forest(star_forest({{length - 2, {2, 2, 2, 2, 2, 2}}})),
                        at::kFloat);
    const AttentionForward result = driver.forward();
    const std::vector<Recorder::Call> forward = driver.recorder.take();
    ASSERT_EQ(forward.size(), 1U);
    EXPECT_EQ(forward[0].batch, 6);
    EXPECT_EQ(forward[0].queries, length);
    EXPECT_TRUE(forward[0].causal);
    EXPECT_EQ(forward[0].q, driver.inputs.q.const_data_ptr());
    EXPECT_EQ(forward[0].result, result.out.const_data_ptr());
    const AttentionGradients gradients = driver.backward(result);
    const std::vector<Recorder::Call> backward = driver.recorder.take();
    ASSERT_EQ(backward.size(), 1U);
    EXPECT_EQ(backward[0].k, driver.inputs.k.const_data_ptr());
    EXPECT_EQ(backward[0].result, gradients.dq.const_data_ptr());
  }
}

TEST(AttentionLevels, AnInnerNodeIsOneRectangleOnItsOwnKeys) {
  const Driver driver(star_forest({{90, {100, 100, 100, 100, 100, 100}}}), at::kFloat);
  const AttentionForward result = driver.forward();
  const std::vector<Recorder::Call> calls = driver.recorder.take();
  ASSERT_EQ(calls.size(), 3U);  // responses, prompt, rectangle
  EXPECT_EQ(calls[0].batch, 6);
  EXPECT_EQ(calls[0].q, driver.inputs.q[90].const_data_ptr());
  EXPECT_EQ(calls[1].batch, 1);
  EXPECT_FALSE(calls[2].causal);
  EXPECT_EQ(calls[2].queries, 600);
  EXPECT_EQ(calls[2].keys, 90);
  EXPECT_EQ(calls[2].k, driver.inputs.k.const_data_ptr());
  driver.backward(result);
  EXPECT_EQ(driver.recorder.take().size(), 3U);
}

TEST(AttentionLevels, ShortNodesShareACall) {
  std::vector<Group> groups;
  for (int64_t i = 0; i < 40; ++i) groups.push_back({1 + i % 7, {}});
  const Driver driver(star_forest(groups), at::kFloat);
  driver.forward();
  EXPECT_LE(driver.recorder.take().size(), 3U);
}

TEST(AttentionLevels, Bfloat16PartsAreSummedInFloat32) {
  const Driver driver(star_forest({{9, {5, 4}}}), at::kBFloat16);
  const AttentionForward result = driver.forward();
  EXPECT_EQ(result.out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(result.lse.scalar_type(), at::kFloat);
  const AttentionGradients gradients = driver.backward(result);
  EXPECT_EQ(gradients.dk.scalar_type(), at::kBFloat16);
  for (const Recorder::Call& call : driver.recorder.take()) EXPECT_EQ(call.dtype, at::kFloat);
}

TEST(AttentionParts, HoldEveryVisiblePairOnce) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const PrefixForest forest = random_forest(random, {.max_roots = 6});
    const int64_t num_tokens = forest.num_tokens();
    const auto& cut =
        forest.nodes[static_cast<size_t>(random.below(static_cast<int64_t>(forest.nodes.size())))];
    const int64_t q_begin = seed % 2 == 0 ? 0 : cut.begin;
    const AttentionParts parts = attention_parts(to_tensors(forest).nodes, q_begin, num_tokens);
    std::vector<int64_t> seen(static_cast<size_t>(num_tokens * num_tokens));
    const auto see = [&](int64_t query, int64_t key) {
      ++seen[static_cast<size_t>(query * num_tokens + key)];
    };
    for (const TriangleBatch& batch : parts.triangles)
      for (size_t i = 0; i < batch.begins.size(); ++i)
        for (int64_t query = 0; query < batch.lengths[i]; ++query)
          for (int64_t key = 0; key <= query; ++key)
            see(batch.begins[i] + query, batch.begins[i] + key);
    for (const Rectangle& block : parts.rectangles)
      for (int64_t query = block.q_begin; query < block.q_end; ++query)
        for (int64_t key = block.k_begin; key < block.k_end; ++key) see(query, key);
    for (int64_t query = 0; query < num_tokens; ++query) {
      for (int64_t key = 0; key < num_tokens; ++key) {
        const bool visible = query >= q_begin && key <= query &&
                             query < forest.visible_until[static_cast<size_t>(key)];
        ASSERT_EQ(seen[static_cast<size_t>(query * num_tokens + key)], visible ? 1 : 0)
            << "seed " << seed << " query " << query << " key " << key;
      }
    }
  }
}

TEST(AttentionParts, PaddingIsBounded) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Random random(seed);
    std::vector<Group> groups;
    const int64_t longest = int64_t{1} << (1 + random.below(11));
    for (int64_t i = 1 + random.below(60); i > 0; --i)
      groups.push_back({1 + random.below(longest), {}});
    const PrefixForest forest = star_forest(groups);
    const AttentionParts parts = attention_parts(to_tensors(forest).nodes, 0, forest.num_tokens());
    for (const TriangleBatch& batch : parts.triangles) {
      EXPECT_EQ(batch.max_length, *std::max_element(batch.lengths.begin(), batch.lengths.end()));
      double useful = 0;
      int64_t tokens = 0;
      for (const int64_t length : batch.lengths) {
        const auto rows = static_cast<double>(std::max<int64_t>(length, 64));
        useful += rows * rows;
        tokens += length;
      }
      const auto rows = static_cast<double>(std::max<int64_t>(batch.max_length, 64));
      EXPECT_GE(useful, 0.88 * rows * rows * static_cast<double>(batch.size()));
      EXPECT_LE(batch.max_length * batch.size(), 2 * tokens + 512);
    }
  }
}

}  // namespace
}  // namespace zorro::reference
