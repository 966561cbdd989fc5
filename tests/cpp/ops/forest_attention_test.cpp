#include "zorro/ops/forest_attention.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "forest_attention_cases.h"

namespace zorro::reference {
namespace {

constexpr AttentionPath kPaths[] = {AttentionPath::kComposed, AttentionPath::kLevels};
constexpr Heads kHeads[] = {{2, 2, 16}, {4, 2, 64}, {4, 1, 80}};

class AttentionOnPath : public testing::TestWithParam<AttentionPath> {
 protected:
  static ForestAttentionOptions options() { return with_path(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Paths, AttentionOnPath, testing::ValuesIn(kPaths),
                         [](const testing::TestParamInfo<AttentionPath>& path) {
                           return path.param == AttentionPath::kComposed ? "Composed" : "Levels";
                         });

// The sum of out * out_grad, whose derivatives the oracle writes down.
double loss_of(const AttentionCase& c) {
  const AttentionAnswer answer = attention_oracle(c);
  double loss = 0;
  for (size_t i = 0; i < answer.out.size(); ++i) loss += answer.out[i] * c.out_grad[i];
  return loss;
}

TEST(AttentionOracle, GradientsMatchCentralDifferences) {
  Random random(5);
  const PrefixForest forest = star_forest({{3, {2, 1}}, {1, {1}}});
  const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {2, 1, 3});
  AttentionCase c{2,
                  1,
                  3,
                  0.7,
                  values_of(inputs.q),
                  values_of(inputs.k),
                  values_of(inputs.v),
                  values_of(inputs.out_grad),
                  sample_paths(forest)};
  const AttentionAnswer answer = attention_oracle(c);
  const auto check = [&](std::vector<double>& input, const std::vector<double>& gradient) {
    constexpr double kStep = 1e-5;
    for (size_t i = 0; i < input.size(); ++i) {
      const double value = input[i];
      input[i] = value + kStep;
      const double above = loss_of(c);
      input[i] = value - kStep;
      const double below = loss_of(c);
      input[i] = value;
      EXPECT_NEAR((above - below) / (2 * kStep), gradient[i], 1e-8);
    }
  };
  check(c.q, answer.q_grad);
  check(c.k, answer.k_grad);
  check(c.v, answer.v_grad);
}

TEST_P(AttentionOnPath, MatchesEverySampleAlone) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    Random random(seed);
    const PrefixForest forest = random_forest(random);
    const Heads& heads = kHeads[seed % 3];
    const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), heads);
    EXPECT_LT(distance(run_attention(inputs, forest, options()), oracle_run(inputs, forest)), 1e-12)
        << "seed " << seed << "\n"
        << forest.draw();
  }
}

TEST_P(AttentionOnPath, MatchesOracleOnLongNodes) {
  Random random(17);
  // Long enough for more than one key block of the primitive and for views on evenly spaced nodes.
  const PrefixForest forest = star_forest({{600, {70, 70, 70}}, {33, {130, 129, 1}}, {530, {5}}});
  const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {2, 1, 16});
  EXPECT_LT(distance(run_attention(inputs, forest, options()), oracle_run(inputs, forest)), 1e-12);
}

TEST_P(AttentionOnPath, TakesACallersScale) {
  Random random(3);
  const PrefixForest forest = random_forest(random);
  const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {2, 1, 16});
  ForestAttentionOptions scaled = options();
  scaled.scale = 0.8;
  EXPECT_LT(distance(run_attention(inputs, forest, scaled), oracle_run(inputs, forest, 0.8)),
            1e-12);
  EXPECT_GT(distance(run_attention(inputs, forest, options()), oracle_run(inputs, forest, 0.8)),
            1e-3);
}

TEST_P(AttentionOnPath, MatchesOracleInFloat32) {
  for (uint64_t seed = 100; seed < 106; ++seed) {
    Random random(seed);
    const PrefixForest forest = random_forest(random, {.max_length = 60});
    const AttentionInputs inputs =
        random_inputs(random, forest.num_tokens(), kHeads[seed % 3], at::kFloat);
    EXPECT_LT(distance(run_attention(inputs, forest, options()), oracle_run(inputs, forest)), 5e-6)
        << "seed " << seed;
  }
}

TEST_P(AttentionOnPath, RepeatsBitForBit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Random random(8);
    const PrefixForest forest = random_forest(random, {.max_roots = 6, .max_length = 150});
    const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 64}, dtype);
    const AttentionRun first = run_attention(inputs, forest, options());
    const AttentionRun second = run_attention(inputs, forest, options());
    for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(first.all()[i].equal(second.all()[i])) << i;
  }
}

// Out rows and gradients of [0, T) against those of the ranges between `cuts`.
void expect_ranges_add_up(const AttentionInputs& inputs, const ForestTensors& tensors,
                          const std::vector<int64_t>& cuts, const ForestAttentionOptions& options) {
  const AttentionRun whole = run_attention(inputs, tensors.visible_until, tensors.nodes, options);
  std::vector<at::Tensor> out, lse, q_grad;
  at::Tensor k_grad = inputs.k * 0, v_grad = inputs.v * 0;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], end = cuts[i + 1];
    const int64_t num_nodes = tensors.nodes.select(1, 1).le(end).sum().item<int64_t>();
    ForestAttentionOptions ranged = options;
    ranged.q_begin = begin;
    const AttentionRun part = run_attention(
        {inputs.q.slice(0, begin, end), inputs.k.slice(0, 0, end), inputs.v.slice(0, 0, end),
         inputs.out_grad.slice(0, begin, end)},
        tensors.visible_until.slice(0, 0, end), tensors.nodes.slice(0, 0, num_nodes), ranged);
    out.push_back(part.out);
    lse.push_back(part.lse);
    q_grad.push_back(part.q_grad);
    k_grad.slice(0, 0, end).add_(part.k_grad);
    v_grad.slice(0, 0, end).add_(part.v_grad);
  }
  EXPECT_LT(distance(at::cat(out, 0), whole.out), 1e-12);
  EXPECT_LT(distance(at::cat(lse, 1), whole.lse), 1e-12);
  EXPECT_LT(distance(at::cat(q_grad, 0), whole.q_grad), 1e-12);
  EXPECT_LT(distance(k_grad, whole.k_grad), 1e-12);
  EXPECT_LT(distance(v_grad, whole.v_grad), 1e-12);
}

TEST_P(AttentionOnPath, QueryRangesAddUpToTheWhole) {
  for (uint64_t seed = 200; seed < 212; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const PrefixForest forest = random_forest(random);
    const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16});
    std::vector<int64_t> cuts{0};
    for (const Node& node : forest.nodes)
      if (node.begin > 0 && random.below(3) == 0) cuts.push_back(node.begin);
    cuts.push_back(forest.num_tokens());
    cuts.push_back(forest.num_tokens());  // a range without queries
    expect_ranges_add_up(inputs, to_tensors(forest), cuts, options());
  }
}

TEST_P(AttentionOnPath, AnEmptyForestGivesEmptyResults) {
  Random random(1);
  const AttentionRun run =
      run_attention(random_inputs(random, 0, {4, 2, 16}), star_forest({}), options());
  EXPECT_EQ(run.out.sizes(), at::IntArrayRef({0, 4, 16}));
  EXPECT_EQ(run.lse.sizes(), at::IntArrayRef({4, 0}));
  EXPECT_EQ(run.k_grad.sizes(), at::IntArrayRef({0, 2, 16}));
}

TEST_P(AttentionOnPath, B09_CausalMaskSitsBottomRight) {
  Random random(9);
  const std::vector<Group> groups = {{9, {5}}, {3, {1}}, {12, {7}}, {1, {1}}, {5, {}}};
  PrefixForest forest = star_forest(groups);
  AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16});
  inputs.q.zero_();  // equal scores: lse is the log of the number of keys seen
  const AttentionRun run = run_attention(inputs, forest, options());
  int64_t token = 0;
  for (const Group& group : groups) {
    const int64_t length = group.prompt + (group.responses.empty() ? 0 : group.responses[0]);
    for (int64_t seen = 1; seen <= length; ++seen, ++token)
      EXPECT_NEAR(run.lse.select(1, token).exp().max().item<double>(), static_cast<double>(seen),
                  1e-12);
  }
}

TEST_P(AttentionOnPath, B11_GradientsHoldForAnyLayout) {
  Random random(11);
  const PrefixForest forest = random_forest(random, {.max_length = 40});
  const int64_t num_tokens = forest.num_tokens();
  const AttentionInputs inputs = random_inputs(random, num_tokens, {4, 2, 16});
  // Heads first; one projection cut in three; head_dim not innermost; every second row of a larger
  // tensor.
  const auto heads_first = [](const at::Tensor& x) {
    return x.transpose(0, 1).contiguous().transpose(0, 1);
  };
  const auto dim_outermost = [](const at::Tensor& x) {
    return x.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
  };
  const at::Tensor joined = at::cat({inputs.q, inputs.k, inputs.v}, 1);
  const at::Tensor spread = at::stack({inputs.out_grad, inputs.out_grad * 7}, 1).select(1, 0);
  const AttentionRun expected = oracle_run(inputs, forest);
  for (const AttentionInputs& laid_out :
       {AttentionInputs{heads_first(inputs.q), heads_first(inputs.k), heads_first(inputs.v),
                        spread},
        AttentionInputs{joined.slice(1, 0, 4), joined.slice(1, 4, 6), joined.slice(1, 6, 8),
                        heads_first(inputs.out_grad)},
        AttentionInputs{dim_outermost(inputs.q), dim_outermost(inputs.k), dim_outermost(inputs.v),
                        dim_outermost(inputs.out_grad)}}) {
    EXPECT_FALSE(laid_out.q.is_contiguous());
    EXPECT_LT(distance(run_attention(laid_out, forest, options()), expected), 1e-12);
  }
}

TEST_P(AttentionOnPath, AnUpstreamGradientMayBeExpanded) {
  Random random(12);
  const PrefixForest forest = random_forest(random);
  AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16});
  inputs.out_grad = normals(random, {}).expand(inputs.q.sizes());
  EXPECT_LT(distance(run_attention(inputs, forest, options()), oracle_run(inputs, forest)), 1e-12);
}

void overwrite(AttentionInputs& inputs, int64_t begin, int64_t end, double value) {
  for (const at::Tensor& x : {inputs.q, inputs.k, inputs.v, inputs.out_grad})
    x.slice(0, begin, end).fill_(value);
}

void expect_same_bits(const AttentionRun& x, const AttentionRun& y, int64_t begin, int64_t end) {
  const std::vector<at::Tensor> a = x.all(), b = y.all();
  for (size_t i = 0; i < a.size(); ++i) {
    const int64_t tokens = i == 1 ? 1 : 0;  // lse is [Hq, T]
    EXPECT_TRUE(a[i].slice(tokens, begin, end).equal(b[i].slice(tokens, begin, end))) << i;
  }
}

TEST_P(AttentionOnPath, B12_NeighboursAreNotSeen) {
  at::set_num_threads(1);  // on a busy machine MKL takes another number of threads, and other bits
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Random random(12);
    const PrefixForest forest = star_forest({{20, {9, 9, 4}}, {20, {9, 9, 4}}, {7, {30}}});
    const int64_t second = 42, second_end = 84;
    AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16}, dtype);
    const AttentionRun before = run_attention(inputs, forest, options());
    AttentionInputs changed = random_inputs(random, forest.num_tokens(), {4, 2, 16}, dtype);
    for (const auto& [to, from] : {std::pair(inputs.q, changed.q), std::pair(inputs.k, changed.k),
                                   std::pair(inputs.v, changed.v)})
      to.slice(0, 0, second).copy_(from.slice(0, 0, second));
    const AttentionRun after = run_attention(inputs, forest, options());
    EXPECT_FALSE(after.out.slice(0, 0, second).equal(before.out.slice(0, 0, second)));
    expect_same_bits(after, before, second, forest.num_tokens());

    for (const auto& [to, from] : {std::pair(inputs.q, changed.q), std::pair(inputs.k, changed.k),
                                   std::pair(inputs.v, changed.v)})
      to.slice(0, second + 20, second + 29).copy_(from.slice(0, second + 20, second + 29));
    const AttentionRun last = run_attention(inputs, forest, options());
    EXPECT_TRUE(last.out.slice(0, second + 29, second_end)
                    .equal(after.out.slice(0, second + 29, second_end)));
    EXPECT_TRUE(
        last.out.slice(0, second, second + 20).equal(after.out.slice(0, second, second + 20)));
  }
}

TEST_P(AttentionOnPath, B12_AGroupsLossLeavesOtherGroupsGradientsZero) {
  Random random(13);
  const PrefixForest forest = star_forest({{20, {9, 9, 4}}, {20, {9, 9, 4}}});
  AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16}, at::kFloat);
  inputs.out_grad.slice(0, 0, 42).zero_();
  const AttentionRun run = run_attention(inputs, forest, options());
  for (const at::Tensor& gradient : {run.q_grad, run.k_grad, run.v_grad}) {
    EXPECT_EQ(gradient.slice(0, 0, 42).count_nonzero().item<int64_t>(), 0);
    EXPECT_GT(gradient.slice(0, 42, 84).abs().max().item<double>(), 0.01);
  }
}

TEST_P(AttentionOnPath, B10_JunkInAnotherGroupDoesNotLeak) {
  at::set_num_threads(1);  // as above
  for (const double junk : {std::nan(""), 1e30, HUGE_VAL}) {
    Random random(10);
    const PrefixForest forest = star_forest({{20, {9, 9, 4}}, {20, {9, 8, 4}}, {20, {9, 9, 4}}});
    AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16}, at::kFloat);
    overwrite(inputs, 42, 83, 0);
    const AttentionRun clean = run_attention(inputs, forest, options());
    overwrite(inputs, 42, 83, junk);
    const AttentionRun run = run_attention(inputs, forest, options());
    expect_same_bits(run, clean, 0, 42);
    expect_same_bits(run, clean, 83, forest.num_tokens());
  }
}

TEST_P(AttentionOnPath, ADroppedRectangleIsNoticed) {
  Random random(21);
  PrefixForest forest = star_forest({{9, {5, 5}}, {7, {4}}});
  const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {2, 1, 16});
  const AttentionRun expected = oracle_run(inputs, forest);
  EXPECT_LT(distance(run_attention(inputs, forest, options()), expected), 1e-12);
  forest.nodes[0].subtree_end = forest.nodes[0].end;
  for (int64_t token = 0; token < forest.nodes[0].end; ++token)
    forest.visible_until[static_cast<size_t>(token)] = forest.nodes[0].end;
  const AttentionRun mutated = run_attention(inputs, forest, options());
  for (size_t i = 0; i < 5; ++i)
    EXPECT_GT(distance(mutated.all()[i], expected.all()[i]), 1e-3) << i;
}

TEST(ForestAttention, PathsAgreeOnBuiltForests) {
  for (uint64_t seed = 300; seed < 310; ++seed) {
    Random random(seed);
    std::vector<std::vector<int64_t>> ids(6);
    std::vector<Sample> samples;
    for (std::vector<int64_t>& sample : ids) {
      for (int64_t i = 2 + random.below(12); i > 0; --i) sample.push_back(random.below(2));
      samples.push_back({.token_ids = sample, .scored_begin = 1});
    }
    for (const Sharing sharing : {Sharing::kNone, Sharing::kPrompts, Sharing::kPrefixes}) {
      const PrefixForest forest =
          PrefixForest::build(samples, {.sharing = sharing, .min_shared_tokens = 1});
      const AttentionInputs inputs = random_inputs(random, forest.num_tokens(), {4, 2, 16});
      const AttentionRun expected = oracle_run(inputs, forest);
      for (const AttentionPath path : kPaths)
        EXPECT_LT(distance(run_attention(inputs, forest, with_path(path)), expected), 1e-12);
    }
  }
}

TEST(ForestAttention, GradientsMatchReplicatedBatch) {
  for (uint64_t seed = 400; seed < 408; ++seed) {
    Random random(seed);
    const PrefixForest forest = random_forest(random);
    const ForestTensors tensors = to_tensors(forest);
    const AttentionInputs packed = random_inputs(random, forest.num_tokens(), {4, 2, 16});
    AttentionInputs naive{packed_to_replicated(packed.q, tensors),
                          packed_to_replicated(packed.k, tensors),
                          packed_to_replicated(packed.v, tensors),
                          {}};
    naive.out_grad = normals(random, naive.q.sizes());
    // A shared row's upstream gradient is the sum over its copies, and so are its gradients.
    const auto fold = [&](const at::Tensor& x) {
      at::Tensor sum = normals(random, {forest.num_tokens(), x.size(1), x.size(2)}) * 0;
      return sum.index_add_(0, tensors.replicated, x);
    };
    AttentionInputs shared = packed;
    shared.out_grad = fold(naive.out_grad);
    for (const AttentionPath path : kPaths) {
      const AttentionRun one = run_attention(shared, forest, with_path(path));
      const AttentionRun many = run_attention(naive, replicated_forest(forest), with_path(path));
      EXPECT_LT(distance(one.out, replicated_to_packed(many.out, tensors)), 1e-12);
      EXPECT_LT(distance(one.q_grad, fold(many.q_grad)), 1e-12);
      EXPECT_LT(distance(one.k_grad, fold(many.k_grad)), 1e-12);
      EXPECT_LT(distance(one.v_grad, fold(many.v_grad)), 1e-12);
    }
  }
}

}  // namespace
}  // namespace zorro::reference
