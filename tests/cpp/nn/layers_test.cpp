#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "reference/samples.h"
#include "zorro/core/error.h"
#include "zorro/nn/attention.h"
#include "zorro/nn/checkpoint.h"
#include "zorro/nn/decoder_layer.h"
#include "zorro/nn/mlp.h"
#include "zorro/nn/rms_norm.h"
#include "zorro/nn/rope.h"

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
  const RotaryTable table = rotary_table(at::tensor({3L}), 4, 10000, at::kDouble);
  const at::Tensor x = values({.1, .2, .3, .4, .5, .6, .7, .8}).view({1, 1, 8});
  const at::Tensor expected =
      values({-.14133525, .18791181, -.28288575, .40581911, .5, .6, .7, .8});
  EXPECT_TRUE(at::allclose(apply_rope(x, table.cos, table.sin).view({-1}), expected, 0, 1e-8));
}

TEST(Rope, GradientIsTheRotationBackwards) {
  const RotaryTable table = rotary_table(at::arange(6), 8, 100, at::kDouble);
  const at::Tensor x = at::randn({6, 2, 8}, at::kDouble).requires_grad_(true);
  const at::Tensor upstream = at::randn({6, 2, 8}, at::kDouble);
  const at::Tensor c = table.cos.unsqueeze(1), s = table.sin.unsqueeze(1);
  const at::Tensor plain = x * c + at::cat({-x.slice(2, 4), x.slice(2, 0, 4)}, 2) * s;
  const at::Tensor ours = apply_rope(x, table.cos, table.sin);
  EXPECT_TRUE(at::allclose(ours, plain, 1e-14, 1e-14));
  EXPECT_TRUE(at::allclose(grad({ours}, {x}, {upstream})[0], grad({plain}, {x}, {upstream})[0],
                           1e-13, 1e-13));
  EXPECT_THROW(rotary_table(at::arange(6), 7, 100, at::kDouble), InvalidArgument);
  EXPECT_THROW(apply_rope(x.slice(2, 0, 4), table.cos, table.sin), InvalidArgument);
}

std::unique_ptr<DecoderLayer> layer(at::ScalarType dtype = at::kDouble) {
  AttentionModuleOptions options{24, 4, 2, 8, /*bias=*/true, /*qk_norm=*/true, 1e-6};
  auto made = std::make_unique<DecoderLayer>(24, 1e-6, std::make_unique<Attention>(options),
                                             std::make_unique<Mlp>(24, 40));
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
    table = rotary_table(tensors.positions[0], 8, 10000, dtype);
    x = at::randn({forest.num_tokens(), 24}, dtype).requires_grad_(true);
  }
  LayerInput input(int64_t q_begin = 0) const {
    return {tensors, table.cos, table.sin, q_begin, AttentionPath::kFused};
  }
};

std::vector<at::Tensor> leaves(DecoderLayer& of, const at::Tensor& x) {
  std::vector<at::Tensor> list = {x};
  for (const Weight& weight : of.weights()) list.push_back(*weight.slot);
  return list;
}

TEST(DecoderLayer, APrefixComputedApartGivesTheSameValuesAndGradients) {
  for (const bool checkpointing : {false, true}) {
    const auto of = layer();
    const Case c;
    const at::Tensor upstream = at::randn(c.x.sizes(), at::kDouble);
    const at::Tensor whole = of->forward(c.x, c.input(), {}, checkpointing).first;
    const auto [first, context] = of->forward(c.x.slice(0, 0, 7), c.input(), {}, checkpointing);
    EXPECT_EQ(context.key.size(0), 7);
    const at::Tensor rest = of->forward(c.x.slice(0, 7), c.input(7), context, checkpointing).first;
    const at::Tensor split = at::cat({first, rest});
    EXPECT_TRUE(at::allclose(split, whole, 1e-12, 1e-12));
    const auto expected = grad({whole}, leaves(*of, c.x), {upstream}),
               ours = grad({split}, leaves(*of, c.x), {upstream});
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::allclose(ours[i], expected[i], 1e-10, 1e-10)) << i;
  }
}

TEST(Checkpoint, GivesTheSameBitsThroughEveryOutput) {
  const auto of = layer(at::kFloat);
  const Case c(at::kFloat);
  const auto run = [&](bool checkpointing, bool through_context) {
    const auto [y, context] = of->forward(c.x, c.input(), {}, checkpointing);
    const at::Tensor loss =
        through_context ? (context.key * context.value).sum() : y.square().sum();
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

TEST(Checkpoint, BackwardIntoLeavesWorksToo) {
  const auto of = layer();
  const Case c;
  of->forward(c.x, c.input(), {}, true).first.square().sum().backward();
  const auto expected =
      grad({of->forward(c.x, c.input(), {}, false).first.square().sum()}, leaves(*of, c.x));
  const auto all = leaves(*of, c.x);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i].grad(), expected[i])) << i;
}

TEST(DecoderLayer, NamesItsWeights) {
  std::vector<std::string> names;
  for (const Weight& weight : layer()->weights()) names.push_back(weight.name);
  EXPECT_EQ(names.size(), 15U);
  EXPECT_EQ(names.front(), "input_layernorm.weight");
  EXPECT_EQ(names[1], "self_attn.q_proj.weight");
  EXPECT_EQ(names.back(), "mlp.down_proj.weight");
}

}  // namespace
}  // namespace zorro
