#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "reference/samples.h"
#include "zorro/core/error.h"
#include "zorro/nn/attention.h"
#include "zorro/nn/checkpoint.h"
#include "zorro/nn/decoder_layer.h"
#include "zorro/nn/gated_delta_net.h"
#include "zorro/nn/mlp.h"
#include "zorro/nn/rms_norm.h"
#include "zorro/nn/rope.h"
#include "zorro/nn/sparse_moe.h"

namespace zorro {
namespace {

using torch::autograd::grad;

at::Tensor values(std::initializer_list<double> list) {
  return at::tensor(std::vector<double>(list), at::kDouble);
}

TEST(RmsNorm, GoldenAndGradientsOfTheFormula) {
  const at::Tensor x = values({1, -2, 3, .5}), w = values({.1, -.2, 0, .3});
  EXPECT_TRUE(
      at::allclose(rms_norm(x, w, 1e-6), values({.05298129, .21192515, 0, .07947193}), 0, 1e-8));
  const at::Tensor a = at::randn({5, 3, 8}, at::kDouble).requires_grad_(true);
  const at::Tensor b = at::randn({8}, at::kDouble).requires_grad_(true);
  const at::Tensor upstream = at::randn({5, 3, 8}, at::kDouble);
  const at::Tensor plain = a * ((a * a).mean(-1, true) + 1e-6).rsqrt() * b;
  const auto expected = grad({plain}, {a, b}, {upstream}),
             ours = grad({rms_norm(a, b, 1e-6)}, {a, b}, {upstream});
  EXPECT_TRUE(at::allclose(rms_norm(a, b, 1e-6), plain, 1e-13, 1e-13));
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(ours[i], expected[i], 1e-12, 1e-12));
  EXPECT_THROW(rms_norm(a, b.slice(0, 1), 1e-6), InvalidArgument);
}

TEST(RmsNorm, Bfloat16CastsBeforeTheWeight) {
  const at::Tensor x = at::randn({4, 16}).to(at::kBFloat16), w = at::randn({16}).to(at::kBFloat16);
  const at::Tensor x32 = x.to(at::kFloat);
  const at::Tensor normed = (x32 * (x32.square().mean(-1, true) + 1e-6).rsqrt()).to(at::kBFloat16);
  EXPECT_TRUE(at::equal(rms_norm(x, w, 1e-6), normed * w));
}

TEST(Rope, GoldenPartialRotation) {
  const RotaryTable table = rotary_table(at::tensor({3L}), 4, {}, at::kDouble);
  const at::Tensor x = values({.1, .2, .3, .4, .5, .6, .7, .8}).view({1, 1, 8});
  const at::Tensor expected =
      values({-.14133525, .18791181, -.28288575, .40581911, .5, .6, .7, .8});
  EXPECT_TRUE(at::allclose(apply_rope(x, table.cos, table.sin).view({-1}), expected, 0, 1e-8));
}

TEST(Rope, GradientIsTheRotationBackwards) {
  RotaryOptions options;
  options.theta = 100;
  const RotaryTable table = rotary_table(at::arange(6), 8, options, at::kDouble);
  const at::Tensor x = at::randn({6, 2, 8}, at::kDouble).requires_grad_(true);
  const at::Tensor upstream = at::randn({6, 2, 8}, at::kDouble);
  const at::Tensor c = table.cos.unsqueeze(1), s = table.sin.unsqueeze(1);
  const at::Tensor plain = x * c + at::cat({-x.slice(2, 4), x.slice(2, 0, 4)}, 2) * s;
  const at::Tensor ours = apply_rope(x, table.cos, table.sin);
  EXPECT_TRUE(at::allclose(ours, plain, 1e-14, 1e-14));
  EXPECT_TRUE(at::allclose(grad({ours}, {x}, {upstream})[0], grad({plain}, {x}, {upstream})[0],
                           1e-13, 1e-13));
  EXPECT_THROW(rotary_table(at::arange(6), 7, {}, at::kDouble), InvalidArgument);
  EXPECT_THROW(apply_rope(x.slice(2, 0, 4), table.cos, table.sin), InvalidArgument);
}

enum class Kind { kDense, kGatedSparse, kLinear };
constexpr Kind kKinds[] = {Kind::kDense, Kind::kGatedSparse, Kind::kLinear};

std::unique_ptr<DecoderLayer> layer(Kind kind, at::ScalarType dtype = at::kDouble) {
  AttentionModuleOptions attention;
  attention.hidden = 24, attention.query_heads = 4, attention.kv_heads = 2, attention.head_dim = 8;
  attention.qk_norm = true;
  attention.bias = attention.output_bias = kind == Kind::kDense;
  attention.gate = kind == Kind::kGatedSparse;
  const NormKind norm = kind == Kind::kDense ? NormKind::kPlain : NormKind::kZeroCentered;
  attention.norm = norm;
  std::unique_ptr<TokenMixer> mixer = std::make_unique<Attention>(attention);
  if (kind == Kind::kLinear)
    mixer = std::make_unique<GatedDeltaNet>(GatedDeltaNetOptions{24, 2, 4, 6, 3, 4, 1e-6});
  std::unique_ptr<ChannelMixer> channels = std::make_unique<Mlp>(24, 40);
  if (kind == Kind::kGatedSparse)
    channels = std::make_unique<SparseMoe>(SparseMoeOptions{24, 6, 2, 10, 8, true});
  auto made = std::make_unique<DecoderLayer>(24, 1e-6, norm, std::move(mixer), std::move(channels));
  at::manual_seed(3);
  for (const Weight& weight : made->weights())
    *weight.slot = at::randn(weight.shape, dtype).mul_(0.3).requires_grad_(true);
  return made;
}

struct Case {
  PrefixForest forest;
  ForestTensors tensors;
  RotaryTable table;
  at::Tensor x;
  explicit Case(at::ScalarType dtype = at::kDouble) {
    Random random(1);
    forest = reference::star(random, 7, 4, 3, 50).forest(Sharing::kPrompts);
    tensors = to_tensors(forest);
    table = rotary_table(tensors.positions, 8, {}, dtype);
    x = at::randn({forest.num_tokens(), 24}, dtype).requires_grad_(true);
  }
  LayerInput input(int64_t q_begin = 0) const {
    return {tensors, table.cos, table.sin, q_begin, AttentionPath::kFused, /*want_context=*/true};
  }
};

std::vector<at::Tensor> leaves(DecoderLayer& of, const at::Tensor& x) {
  std::vector<at::Tensor> list = {x};
  for (const Weight& weight : of.weights()) list.push_back(*weight.slot);
  return list;
}

TEST(DecoderLayer, APrefixComputedApartGivesTheSameValuesAndGradients) {
  for (const Kind kind : kKinds)
    for (const bool checkpointing : {false, true}) {
      const auto of = layer(kind);
      const Case c;
      const at::Tensor upstream = at::randn(c.x.sizes(), at::kDouble);
      const at::Tensor whole = of->forward(c.x, c.input(), {}, checkpointing).y;
      const auto [first, context, router] =
          of->forward(c.x.slice(0, 0, 7), c.input(), {}, checkpointing);
      EXPECT_EQ(context[0].size(0), 7);
      const at::Tensor rest = of->forward(c.x.slice(0, 7), c.input(7), context, checkpointing).y;
      const at::Tensor split = at::cat({first, rest});
      EXPECT_TRUE(at::allclose(split, whole, 1e-12, 1e-12));
      const auto expected = grad({whole}, leaves(*of, c.x), {upstream}),
                 ours = grad({split}, leaves(*of, c.x), {upstream});
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::allclose(ours[i], expected[i], 1e-10, 1e-10)) << i;
    }
}

TEST(Checkpoint, GivesTheSameBitsThroughEveryOutput) {
  for (const Kind kind : kKinds) {
    const auto of = layer(kind, at::kFloat);
    const Case c(at::kFloat);
    const auto run = [&](bool checkpointing, bool through_context) {
      const auto [y, context, router] = of->forward(c.x, c.input(), {}, checkpointing);
      const at::Tensor loss = through_context
                                  ? context[0].square().sum() + context[1].square().sum()
                                  : y.square().sum();
      return torch::autograd::grad({loss}, leaves(*of, c.x), {}, {}, false, /*allow_unused=*/true);
    };
    for (const bool through_context : {false, true}) {
      const auto plain = run(false, through_context), again = run(true, through_context);
      for (size_t i = 0; i < plain.size(); ++i) {
        const bool reached = plain[i].defined() && plain[i].abs().max().item<float>() > 0;
        if (reached) {
          EXPECT_TRUE(again[i].defined() && at::equal(plain[i], again[i])) << i;
        } else if (again[i].defined()) {
          EXPECT_EQ(again[i].abs().max().item<float>(), 0) << i;
        }
      }
    }
  }
}

TEST(Checkpoint, BackwardIntoLeavesWorksToo) {
  const auto of = layer(Kind::kDense);
  const Case c;
  of->forward(c.x, c.input(), {}, true).y.square().sum().backward();
  const auto expected =
      grad({of->forward(c.x, c.input(), {}, false).y.square().sum()}, leaves(*of, c.x));
  const auto all = leaves(*of, c.x);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i].grad(), expected[i])) << i;
}

TEST(DecoderLayer, NamesItsWeights) {
  std::vector<std::string> names;
  for (const Weight& weight : layer(Kind::kDense)->weights()) names.push_back(weight.name);
  EXPECT_EQ(names.size(), 15U);
  EXPECT_EQ(names.front(), "input_layernorm.weight");
  EXPECT_EQ(names[1], "self_attn.q_proj.weight");
  EXPECT_EQ(names.back(), "mlp.down_proj.weight");
}

}  // namespace
}  // namespace zorro
