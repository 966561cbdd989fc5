#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "forest_attention_cases.h"
#include "zorro/core/error.h"

namespace zorro::reference {
namespace {

constexpr Heads kHeads{4, 2, 16};

/// A valid call, to be broken in one place.
struct Call {
  PrefixForest forest = star_forest({{5, {3, 2}}, {2, {4}}});
  AttentionInputs inputs;
  at::Tensor visible_until, nodes;
  ForestAttentionOptions options;

  Call() {
    Random random(7);
    inputs = random_inputs(random, forest.num_tokens(), kHeads, at::kFloat);
    const ForestTensors tensors = to_tensors(forest);
    visible_until = tensors.visible_until;
    nodes = tensors.nodes;
  }

  AttentionResult forward() const {
    return forest_attention(inputs.q, inputs.k, inputs.v, visible_until, nodes, options);
  }
};

void expect_refused(const std::string& message, const std::function<void(Call&)>& break_it) {
  Call call;
  break_it(call);
  try {
    call.forward();
    ADD_FAILURE() << "accepted, expected: " << message;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
}

TEST(ForestAttentionChecks, AcceptAValidCall) { EXPECT_NO_THROW(Call().forward()); }

TEST(ForestAttentionChecks, RefuseWrongTensors) {
  const std::string op = "[forest_attention] ";
  expect_refused(op + "q must be [Tq, Hq, D]", [](Call& c) { c.inputs.q = c.inputs.q[0]; });
  expect_refused(op + "k must be [Tk, Hkv, D]", [](Call& c) { c.inputs.k = c.inputs.k[0]; });
  expect_refused(op + "v must be [Tk, Hkv, D]", [](Call& c) { c.inputs.v = c.inputs.v[0]; });
  expect_refused(op + "q must be [Tq, Hq, D], got nothing",
                 [](Call& c) { c.inputs.q = at::Tensor(); });
  expect_refused(op + "q must be float32, float64 or bfloat16, got Half",
                 [](Call& c) { c.inputs = c.inputs.to(at::kHalf); });
  expect_refused(op + "k must be Float", [](Call& c) { c.inputs.k = c.inputs.k.to(at::kDouble); });
  expect_refused(op + "v must have size 16 in dimension 2",
                 [](Call& c) { c.inputs.v = c.inputs.v.slice(2, 0, 8); });
  expect_refused(op + "v must have size 16 in dimension 0",
                 [](Call& c) { c.inputs.v = c.inputs.v.slice(0, 1); });
  expect_refused(op + "v must have size 2 in dimension 1",
                 [](Call& c) { c.inputs.v = c.inputs.v.slice(1, 1); });
  expect_refused(op + "heads of q must be a multiple of the heads of k, got 3 and 2",
                 [](Call& c) { c.inputs.q = c.inputs.q.slice(1, 1); });
  expect_refused(op + "heads of q must be a multiple of the heads of k, got 4 and 0", [](Call& c) {
    c.inputs.k = c.inputs.k.slice(1, 2);
    c.inputs.v = c.inputs.v.slice(1, 2);
  });
  expect_refused(op + "q must have a head dimension > 0", [](Call& c) {
    for (at::Tensor* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v}) *x = x->slice(2, 16);
  });
}

TEST(ForestAttentionChecks, RefuseAWrongStructure) {
  const std::string op = "[forest_attention] ";
  expect_refused(op + "k must hold all tokens before the last query's end, 15 rows, got 16",
                 [](Call& c) { c.inputs.q = c.inputs.q.slice(0, 1); });
  expect_refused(op + "k must hold all tokens", [](Call& c) { c.options.q_begin = -1; });
  expect_refused(op + "visible_until must be [Tk]",
                 [](Call& c) { c.visible_until = c.visible_until.unsqueeze(0); });
  expect_refused(op + "visible_until must be int64",
                 [](Call& c) { c.visible_until = c.visible_until.to(at::kInt); });
  expect_refused(op + "visible_until must have size 16",
                 [](Call& c) { c.visible_until = c.visible_until.slice(0, 1); });
  expect_refused(op + "nodes must be [N, 5]", [](Call& c) { c.nodes = c.nodes.view({-1}); });
  expect_refused(op + "nodes must be int64", [](Call& c) { c.nodes = c.nodes.to(at::kInt); });
  expect_refused(op + "nodes must have size 5", [](Call& c) { c.nodes = c.nodes.slice(1, 1); });
  expect_refused(op + "nodes must be contiguous on the CPU",
                 [](Call& c) { c.nodes = c.nodes.t().contiguous().t(); });
  expect_refused(op + "nodes must end at the last key 16, got 12",
                 [](Call& c) { c.nodes = c.nodes.slice(0, 0, 4); });
  expect_refused(op + "nodes must end at the last key 16, got 0",
                 [](Call& c) { c.nodes = c.nodes.slice(0, 0, 0); });
  expect_refused(op + "q_begin must be the begin of a node, got 1", [](Call& c) {
    c.inputs.q = c.inputs.q.slice(0, 1);
    c.options.q_begin = 1;
  });
}

TEST(ForestAttentionChecks, RefuseTensorsOnDifferentDevices) {
  const auto to_meta = [](const at::Tensor& x) {
    return at::empty(x.sizes(), x.options().device(at::kMeta));
  };
  const std::string op = "[forest_attention] ";
  expect_refused(op + "v must be on meta", [&](Call& c) {
    c.inputs.q = to_meta(c.inputs.q);
    c.inputs.k = to_meta(c.inputs.k);
  });
  expect_refused(op + "visible_until must be on meta", [&](Call& c) {
    for (at::Tensor* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v}) *x = to_meta(*x);
  });
}

TEST(ForestAttentionChecks, RefuseAnUnknownPath) {
  expect_refused("path must be composed, levels or fused",
                 [](Call& c) { c.options.path = static_cast<AttentionPath>(9); });
  const Call c;
  const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("zorro::forest_attention", "")
          .typed<std::tuple<at::Tensor, at::Tensor>(
              const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
              const at::Tensor&, double, int64_t, c10::string_view)>();
  EXPECT_NO_THROW(
      op.call(c.inputs.q, c.inputs.k, c.inputs.v, c.visible_until, c.nodes, 1, 0, "fused"));
  EXPECT_THROW(op.call(c.inputs.q, c.inputs.k, c.inputs.v, c.visible_until, c.nodes, 1, 0, "flash"),
               InvalidArgument);
}

using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t, c10::string_view);

TEST(ForestAttentionChecks, RefuseWrongInputsOfTheBackwardOp) {
  const Call c;
  const AttentionResult forward = c.forward();
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("zorro::forest_attention_backward", "")
                      .typed<Backward>();
  const auto call = [&](const at::Tensor& grad, const at::Tensor& out, const at::Tensor& lse,
                        const at::Tensor& nodes, int64_t q_begin) {
    return op.call(grad, c.inputs.q, c.inputs.k, c.inputs.v, out, lse, c.visible_until, nodes, 1,
                   q_begin, "fused");
  };
  const at::Tensor &grad = c.inputs.out_grad, &out = forward.out, &lse = forward.lse;
  EXPECT_NO_THROW(call(grad, out, lse, c.nodes, 0));
  EXPECT_THROW(call(grad.slice(0, 1), out, lse, c.nodes, 0), InvalidArgument);
  EXPECT_THROW(call(grad.to(at::kDouble), out, lse, c.nodes, 0), InvalidArgument);
  EXPECT_THROW(call(grad, out.slice(1, 1), lse, c.nodes, 0), InvalidArgument);
  EXPECT_THROW(call(grad, out, lse.t(), c.nodes, 0), InvalidArgument);
  EXPECT_THROW(call(grad, out, lse.slice(1, 1), c.nodes, 0), InvalidArgument);
  EXPECT_THROW(call(grad, out, lse, c.nodes.slice(0, 0, 4), 0), InvalidArgument);
  EXPECT_THROW(call(grad, out, lse, c.nodes, 5), InvalidArgument);
}

TEST(AttentionPaths, FusedIsTheBestForTheDevice) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    EXPECT_EQ(resolve_attention_path(AttentionPath::kFused, dtype, at::kCPU),
              AttentionPath::kLevels);
    EXPECT_EQ(resolve_attention_path(AttentionPath::kFused, dtype, at::kCUDA),
              AttentionPath::kComposed);
    EXPECT_EQ(resolve_attention_path(AttentionPath::kComposed, dtype, at::kCPU),
              AttentionPath::kComposed);
  }
  EXPECT_THROW(resolve_attention_path(AttentionPath::kLevels, at::kFloat, at::kCUDA), NotSupported);
}

TEST(AttentionPaths, FusedGivesTheBitsOfWhatItStandsFor) {
  const Call call;
  const AttentionRun fused =
      run_attention(call.inputs, call.forest, with_path(AttentionPath::kFused));
  const AttentionRun levels =
      run_attention(call.inputs, call.forest, with_path(AttentionPath::kLevels));
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(fused.all()[i].equal(levels.all()[i]));
}

TEST(ForestAttentionOp, MetaTensorsHaveTheShapesOfTheResult) {
  for (const AttentionPath path : {AttentionPath::kComposed, AttentionPath::kLevels}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const Call call;
      const auto meta = [](const at::Tensor& x) {
        return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta));
      };
      const AttentionInputs real = call.inputs.to(dtype);
      const AttentionInputs shapes{meta(real.q), meta(real.k), meta(real.v), meta(real.out_grad)};
      const AttentionRun expected =
          run_attention(real, call.visible_until, call.nodes, with_path(path));
      const AttentionRun run =
          run_attention(shapes, meta(call.visible_until), meta(call.nodes), with_path(path));
      for (size_t i = 0; i < 5; ++i) {
        EXPECT_TRUE(run.all()[i].is_meta());
        EXPECT_EQ(run.all()[i].sizes(), expected.all()[i].sizes()) << i;
        EXPECT_EQ(run.all()[i].strides(), expected.all()[i].strides()) << i;
        EXPECT_EQ(run.all()[i].scalar_type(), expected.all()[i].scalar_type()) << i;
      }
    }
  }
}

TEST(ForestAttentionOp, LseHasNoGradient) {
  Call call;
  call.inputs.q.requires_grad_(true);
  const AttentionResult result = call.forward();
  EXPECT_TRUE(result.out.requires_grad());
  EXPECT_FALSE(result.lse.requires_grad());
}

TEST(ForestAttentionOp, ASecondBackwardIsRefused) {
  Call call;
  call.inputs.q.requires_grad_(true);
  const at::Tensor loss = call.forward().out.square().sum();
  const at::Tensor again = torch::autograd::grad({loss}, {call.inputs.q}, {},
                                                 /*retain_graph=*/true, /*create_graph=*/true)[0]
                               .sum();
  try {
    again.backward();
    ADD_FAILURE() << "a second derivative was computed";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("forest_attention_backward is not implemented"),
              std::string::npos)
        << error.what();
  }
}

TEST(ForestAttentionOp, AQueryThatSeesNoKeyGivesZero) {
  Call call;
  call.visible_until = call.visible_until.clone();
  call.visible_until.slice(0, 0, 3).zero_();  // hides the first three tokens from everyone
  const AttentionRun run = run_attention(call.inputs, call.visible_until, call.nodes,
                                         with_path(AttentionPath::kComposed));
  EXPECT_EQ(run.out.slice(0, 0, 3).count_nonzero().item<int64_t>(), 0);
  EXPECT_EQ(run.lse.slice(1, 0, 3).max().item<double>(), -HUGE_VAL);
  for (const at::Tensor& gradient : {run.q_grad, run.k_grad, run.v_grad}) {
    EXPECT_EQ(gradient.slice(0, 0, 3).count_nonzero().item<int64_t>(), 0);
    EXPECT_FALSE(gradient.isnan().any().item<bool>());
  }
  EXPECT_GT(run.out.slice(0, 3).abs().max().item<double>(), 0.01);
}

// The root mean square error of both arms against float32 on the same rounded inputs.
TEST(ForestAttentionOp, Bfloat16IsAsExactAsTheNaiveBatch) {
  Random random(16);
  const PrefixForest forest = star_forest({{150, {40, 40, 33}}, {20, {130, 64}}});
  const ForestTensors tensors = to_tensors(forest);
  const AttentionInputs packed =
      random_inputs(random, forest.num_tokens(), {4, 2, 64}, at::kBFloat16);
  const AttentionRun truth = run_attention(packed.to(at::kFloat), forest, {});
  AttentionInputs naive{packed_to_replicated(packed.q, tensors),
                        packed_to_replicated(packed.k, tensors),
                        packed_to_replicated(packed.v, tensors),
                        at::zeros({forest.num_replicated_tokens(), 4, 64}, at::kBFloat16)};
  // A shared row's upstream gradient arrives at its first copy, so that its sum is not rounded.
  naive.out_grad.index_copy_(0, tensors.first_copy, packed.out_grad);
  const AttentionRun copies = run_attention(naive, replicated_forest(forest), {});
  const auto fold = [&](const at::Tensor& x) {
    return at::zeros({forest.num_tokens(), x.size(1), x.size(2)}, at::kFloat)
        .index_add_(0, tensors.replicated, x.to(at::kFloat));
  };
  const std::vector<at::Tensor> naive_arm{replicated_to_packed(copies.out, tensors),
                                          fold(copies.q_grad), fold(copies.k_grad),
                                          fold(copies.v_grad)};
  for (const AttentionPath path : {AttentionPath::kComposed, AttentionPath::kLevels}) {
    const AttentionRun run = run_attention(packed, forest, with_path(path));
    const std::vector<at::Tensor> arm{run.out, run.q_grad, run.k_grad, run.v_grad};
    const std::vector<at::Tensor> exact{truth.out, truth.q_grad, truth.k_grad, truth.v_grad};
    for (size_t i = 0; i < arm.size(); ++i) {
      EXPECT_EQ(arm[i].scalar_type(), at::kBFloat16);
      const auto error = [&](const at::Tensor& x) {
        return (x.to(at::kFloat) - exact[i]).norm().item<double>();
      };
      EXPECT_GT(error(arm[i]), 0);
      EXPECT_LE(error(arm[i]), 1.25 * error(naive_arm[i])) << i;
    }
  }
}

}  // namespace
}  // namespace zorro::reference
