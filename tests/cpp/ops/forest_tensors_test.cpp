#include "zorro/ops/forest_tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <vector>

#include "reference/small_forests.h"
#include "zorro/core/error.h"

namespace zorro::reference {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16,
                                      at::kLong,   at::kInt,   at::kBool};

std::vector<int64_t> values(const at::Tensor& tensor) {
  const at::Tensor packed = tensor.contiguous();
  const auto* value = packed.const_data_ptr<int64_t>();
  return {value, value + packed.numel()};
}

at::Tensor indices(const std::vector<int64_t>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

/// Every second value of a larger tensor, so that nothing is contiguous.
at::Tensor strided(std::vector<int64_t> shape, at::ScalarType dtype) {
  shape.push_back(2);
  return at::randint(0, 100, shape, at::kLong).select(-1, 1).to(dtype);
}

TEST(ForestTensors, HoldTheForestsVectors) {
  const PrefixForest forest = star_forest({{3, {2, 1}}, {1, {1}}});
  const ForestTensors tensors = to_tensors(forest);
  EXPECT_EQ(tensors.num_tokens(), 8);
  EXPECT_EQ(tensors.num_scored(), 4);
  EXPECT_EQ(values(tensors.token_ids), forest.token_ids);
  EXPECT_EQ(values(tensors.positions), forest.positions);
  EXPECT_EQ(tensors.positions.sizes(), at::IntArrayRef({1, 8}));
  EXPECT_EQ(values(tensors.previous), forest.previous);
  EXPECT_EQ(values(tensors.visible_until), (std::vector<int64_t>{6, 6, 6, 5, 5, 6, 8, 8}));
  EXPECT_EQ(values(tensors.multiplicity), (std::vector<int64_t>{2, 2, 2, 1, 1, 1, 1, 1}));
  EXPECT_EQ(values(tensors.nodes), (std::vector<int64_t>{0, 3, 6, -1, 0, 3,  5, 5, 0, 3, 5, 6, 6,
                                                         0, 3, 6, 7,  8, -1, 0, 7, 8, 8, 3, 1}));
  EXPECT_EQ(tensors.nodes.sizes(), at::IntArrayRef({5, 5}));
  EXPECT_EQ(values(tensors.scored), (std::vector<int64_t>{3, 4, 5, 7}));
  EXPECT_EQ(values(tensors.scored_offsets), (std::vector<int64_t>{0, 2, 3, 4}));
}

TEST(ForestTensors, RolloutsShareThePredictorOfTheirFirstToken) {
  const ForestTensors tensors = to_tensors(star_forest({{3, {2, 1}}, {1, {1}}}));
  EXPECT_EQ(values(tensors.predictors), (std::vector<int64_t>{2, 3, 6}));
  EXPECT_EQ(values(tensors.row), (std::vector<int64_t>{0, 1, 0, 2}));
  EXPECT_EQ(values(tensors.label), values(tensors.token_ids.index_select(0, tensors.scored)));
  EXPECT_EQ(values(tensors.replicated), (std::vector<int64_t>{0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7}));
  EXPECT_EQ(values(tensors.first_copy), (std::vector<int64_t>{0, 1, 2, 3, 4, 8, 9, 10}));
}

TEST(ForestTensors, FollowAnEditedForest) {
  PrefixForest forest = star_forest({{3, {2, 1}}});
  forest.previous[5] = 1;  // a broken forest must reach the tensors, so that tests can break one
  forest.visible_until[0] = 2;
  forest.token_ids[5] = 77;
  const ForestTensors tensors = to_tensors(forest);
  EXPECT_EQ(values(tensors.predictors), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(values(tensors.row), (std::vector<int64_t>{1, 2, 0}));
  EXPECT_EQ(values(tensors.label)[2], 77);
  EXPECT_EQ(values(tensors.visible_until)[0], 2);
}

TEST(ForestTensors, KeepEveryPositionAxis) {
  PrefixForest forest = star_forest({{2, {1}}});
  forest.num_axes = 3;
  forest.positions = {0, 1, 2, 5, 6, 7, 9, 9, 9};
  const ForestTensors tensors = to_tensors(forest);
  EXPECT_EQ(tensors.positions.sizes(), at::IntArrayRef({3, 3}));
  EXPECT_EQ(values(tensors.positions), forest.positions);
}

TEST(ForestTensors, OfNothingAreEmpty) {
  const ForestTensors tensors = to_tensors(star_forest({}));
  EXPECT_EQ(tensors.num_tokens(), 0);
  EXPECT_EQ(tensors.nodes.sizes(), at::IntArrayRef({0, 5}));
  EXPECT_EQ(tensors.predictors.numel(), 0);
  EXPECT_EQ(values(tensors.scored_offsets), (std::vector<int64_t>{0}));
  EXPECT_EQ(packed_to_replicated(at::zeros({0, 4}), tensors).sizes(), at::IntArrayRef({0, 4}));
}

TEST(ForestTensors, AScoredTokenWithoutPredecessorIsABrokenPromise) {
  PrefixForest forest = star_forest({{2, {1}}});
  forest.scored[0] = 0;
  EXPECT_THROW(to_tensors(forest), InternalError);
}

TEST(PackedAndReplicated, RoundTripsAreBitExact) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    const PrefixForest forest = random_forest(random);
    const ForestTensors tensors = to_tensors(forest);
    for (const at::ScalarType dtype : kDtypes) {
      const at::Tensor packed = strided({forest.num_tokens(), 3, 2}, dtype);
      const at::Tensor replicated = packed_to_replicated(packed, tensors);
      EXPECT_EQ(replicated.size(0), forest.num_replicated_tokens());
      EXPECT_EQ(replicated.scalar_type(), dtype);
      EXPECT_TRUE(replicated_to_packed(replicated, tensors).equal(packed)) << dtype;
    }
  }
}

TEST(PackedAndReplicated, EverySampleReadsItsOwnPath) {
  Random random(40);
  const PrefixForest forest = random_forest(random);
  const ForestTensors tensors = to_tensors(forest);
  const at::Tensor token = at::arange(forest.num_tokens(), at::kLong);
  std::vector<int64_t> expected;
  for (const std::vector<int64_t>& path : sample_paths(forest))
    expected.insert(expected.end(), path.begin(), path.end());
  EXPECT_EQ(values(packed_to_replicated(token, tensors)), expected);
}

TEST(PackedAndReplicated, ASharedTokensGradientIsTheSumOverItsCopies) {
  Random random(41);
  const PrefixForest forest = random_forest(random);
  const ForestTensors tensors = to_tensors(forest);
  const at::Tensor packed = at::zeros({forest.num_tokens(), 2}, at::kDouble).requires_grad_(true);
  const at::Tensor upstream = at::randint(0, 100, {forest.num_replicated_tokens(), 2}, at::kDouble);
  packed_to_replicated(packed, tensors).backward(upstream);
  at::Tensor sum = at::zeros({forest.num_tokens(), 2}, at::kDouble);
  for (int64_t copy = 0; copy < upstream.size(0); ++copy)
    sum[values(tensors.replicated)[static_cast<size_t>(copy)]].add_(upstream[copy]);
  EXPECT_TRUE(packed.grad().equal(sum));
}

TEST(PackedAndReplicated, AFoldedRowsGradientGoesToItsFirstCopy) {
  const ForestTensors tensors = to_tensors(star_forest({{2, {1, 1}}}));
  const at::Tensor replicated = at::zeros({6}, at::kDouble).requires_grad_(true);
  replicated_to_packed(replicated, tensors).backward(at::arange(1, 5, at::kDouble));
  EXPECT_TRUE(replicated.grad().to(at::kLong).equal(indices({1, 2, 3, 0, 0, 4})));
}

TEST(PackedAndReplicated, AnotherNumberOfRowsIsRefused) {
  const ForestTensors tensors = to_tensors(star_forest({{2, {1, 1}}}));
  EXPECT_THROW(packed_to_replicated(at::zeros({3, 2}), tensors), InvalidArgument);
  EXPECT_THROW(packed_to_replicated(at::zeros({}), tensors), InvalidArgument);
  EXPECT_THROW(replicated_to_packed(at::zeros({4, 2}), tensors), InvalidArgument);
  EXPECT_THROW(replicated_to_packed(at::zeros({}), tensors), InvalidArgument);
}

TEST(Padded, RoundTripsAreBitExactAndPadsAreZero) {
  const at::Tensor cells = indices({2, 3, 4, 5, 9, 10, 15});  // 3 rows of 6, padded left and right
  for (const at::ScalarType dtype : kDtypes) {
    for (const std::vector<int64_t>& trailing : {std::vector<int64_t>{}, {4}, {2, 3}}) {
      std::vector<int64_t> shape{7};
      shape.insert(shape.end(), trailing.begin(), trailing.end());
      const at::Tensor valid = strided(shape, dtype);
      const at::Tensor padded = to_padded(valid, cells, 3, 6);
      EXPECT_EQ(padded.scalar_type(), dtype);
      EXPECT_EQ(padded.size(0), 3);
      EXPECT_EQ(padded.size(1), 6);
      EXPECT_EQ(padded.dim(), valid.dim() + 1);
      EXPECT_TRUE(from_padded(padded, cells).equal(valid)) << dtype;
      EXPECT_EQ(padded.count_nonzero().item<int64_t>(), valid.count_nonzero().item<int64_t>());
    }
  }
}

TEST(Padded, AcceptsAnyLayoutOfThePaddedTensor) {
  const at::Tensor cells = indices({1, 3, 8});
  const at::Tensor padded = at::arange(24, at::kLong).view({2, 4, 3}).transpose(0, 2);
  EXPECT_EQ(values(from_padded(padded, cells).select(1, 0)), (std::vector<int64_t>{3, 9, 2}));
}

TEST(Padded, GradientsPassThroughTheValidCells) {
  const at::Tensor cells = indices({1, 3});
  const at::Tensor valid = at::ones({2, 2}, at::kDouble).requires_grad_(true);
  const at::Tensor upstream = at::arange(8, at::kDouble).view({2, 2, 2});
  to_padded(valid, cells, 2, 2).backward(upstream);
  EXPECT_TRUE(valid.grad().equal(from_padded(upstream, cells)));
  const at::Tensor padded = at::ones({2, 2, 2}, at::kDouble).requires_grad_(true);
  from_padded(padded, cells).backward(at::ones({2, 2}, at::kDouble));
  EXPECT_TRUE(padded.grad().equal(to_padded(at::ones({2, 2}, at::kDouble), cells, 2, 2)));
}

TEST(Padded, WrongShapesAreRefused) {
  const at::Tensor cells = indices({0, 1});
  EXPECT_THROW(to_padded(at::zeros({3}), cells, 2, 4), InvalidArgument);
  EXPECT_THROW(to_padded(at::zeros({}), cells, 2, 4), InvalidArgument);
  EXPECT_THROW(to_padded(at::zeros({2}), cells.view({2, 1}), 2, 4), InvalidArgument);
  EXPECT_THROW(from_padded(at::zeros({3}), cells), InvalidArgument);
  EXPECT_THROW(from_padded(at::zeros({3, 2}), cells.view({2, 1})), InvalidArgument);
}

}  // namespace
}  // namespace zorro::reference
