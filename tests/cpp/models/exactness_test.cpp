// The packed model against each row alone, in float64: the product's promise, and the mutations
// that must break it.
#include <gtest/gtest.h>

#include "cpp/models/tiny_model.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using reference::OwnedSamples;

constexpr double kScores = 1e-10, kGradients = 1e-9;

void expect_equal(const ModelNumbers& x, const ModelNumbers& y) {
  EXPECT_LT(score_error(x.logprob, y.logprob), kScores);
  EXPECT_LT(score_error(x.entropy, y.entropy), kScores);
  EXPECT_LT(gradient_error(x.gradients, y.gradients), kGradients);
}

OwnedSamples ba(uint64_t seed = 1) {
  Random random(seed);
  return reference::batch_ba(random, 97);
}

TEST(Exactness, EveryArmEqualsTheRowsAlone) {
  for (const auto& [tied, bias] :
       std::vector<std::pair<bool, bool>>{{false, false}, {true, false}, {false, true}}) {
    const auto model = tiny_model(tiny_config(tied, bias));
    const OwnedSamples samples = ba();
    const ModelNumbers truth = alone(*model, samples);
    for (const Sharing sharing : {Sharing::kNone, Sharing::kPrompts, Sharing::kPrefixes})
      for (const AttentionPath path : {AttentionPath::kComposed, AttentionPath::kLevels}) {
        ForwardOptions options;
        options.attention = path;
        expect_equal(run(*model, samples.forest(sharing), options), truth);
      }
  }
}

TEST(Exactness, HeadsAndCheckpointingChangeNothing) {
  const auto model = tiny_model();
  const OwnedSamples samples = ba();
  const ModelNumbers truth = run(*model, samples.forest(Sharing::kNone));
  for (const HeadMode mode : {HeadMode::kNone, HeadMode::kCompute, HeadMode::kMemory})
    for (const bool checkpointing : {false, true}) {
      ForwardOptions options;
      options.head.mode = mode;
      options.head.budget_bytes = 4096;
      options.checkpointing = checkpointing;
      expect_equal(run(*model, samples.forest(Sharing::kPrompts), options), truth);
    }
}

TEST(Exactness, B40_CheckpointingGivesTheSameBits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto model = tiny_model(tiny_config(), dtype);
    *model->weights()[3].slot = model->weights()[3].slot->detach();  // a frozen weight in layer 0
    ForwardOptions on;
    on.checkpointing = true;
    // Two micro-batches forwarded before the first backward: each keeps its own forest.
    const auto two = [&](const ForwardOptions& options) {
      std::vector<at::Tensor> losses;
      for (const uint64_t seed : {1, 2}) {
        const Batch batch = Batch::from(ba(seed).forest(Sharing::kPrompts));
        losses.push_back(model->score(batch, options).logprob.square().sum());
      }
      std::vector<at::Tensor> leaves;
      for (const Weight& weight : model->weights())
        if (weight.slot->requires_grad()) leaves.push_back(*weight.slot);
      auto grads = torch::autograd::grad({losses[0]}, leaves);
      const auto second = torch::autograd::grad({losses[1]}, leaves);
      grads.insert(grads.end(), second.begin(), second.end());
      return grads;
    };
    const auto plain = two({}), checkpointed = two(on);
    for (size_t i = 0; i < plain.size(); ++i)
      EXPECT_TRUE(at::equal(plain[i], checkpointed[i])) << i;
  }
}

TEST(Exactness, Float32AndBfloat16StayWithinTheirTolerances) {
  const OwnedSamples samples = ba();
  const auto model = tiny_model(tiny_config(), at::kFloat);
  const ModelNumbers naive = run(*model, samples.forest(Sharing::kNone));
  const ModelNumbers dedup = run(*model, samples.forest(Sharing::kPrompts));
  EXPECT_LT(score_error(dedup.logprob, naive.logprob), 1e-5);
  EXPECT_LT(score_error(dedup.entropy, naive.entropy), 1e-5);
  EXPECT_LT(gradient_error(dedup.gradients, naive.gradients), 1e-5);
  EXPECT_LT(score_error(dedup.logprob, alone(*model, samples).logprob), 1e-4);

  const auto brain = tiny_model(tiny_config(), at::kBFloat16);
  const ModelNumbers truth = alone(*brain, samples);
  const auto rms = [&](Sharing sharing) {
    const at::Tensor x = run(*brain, samples.forest(sharing)).logprob.to(at::kDouble);
    return (x - truth.logprob).square().mean().sqrt().item<double>();
  };
  EXPECT_LE(rms(Sharing::kPrompts), 1.25 * rms(Sharing::kNone));
}

TEST(Exactness, B01_EveryFirstTokenHasItsOwnLabel) {
  const auto model = tiny_model();
  OwnedSamples samples;
  for (const int64_t first : {5, 6, 7, 8}) samples.add({1, 2, 3, first, 9, 9}, 3);
  samples.add({4, 5}, 1);  // a one-token prompt, responses of one token
  samples.add({4, 6}, 1);
  const ModelNumbers packed = run(*model, samples.forest(Sharing::kPrompts));
  expect_equal(packed, alone(*model, samples));
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < i; ++j)
      EXPECT_NE(packed.logprob[3 * i].item<double>(), packed.logprob[3 * j].item<double>());
  EXPECT_EQ(packed.logprob.size(0), 14);
}

TEST(Exactness, B03_PaddingOnAnySideGivesTheSameValues) {
  const auto model = tiny_model();
  const OwnedSamples samples = ba();
  const ModelNumbers truth = alone(*model, samples);
  constexpr int64_t kPrompt = 12, kResponse = 7, kWidth = kPrompt + kResponse;
  for (const auto& [left_prompt, left_response] : std::vector<std::pair<bool, bool>>{
           {true, false}, {false, false}, {true, true}, {false, true}}) {
    std::vector<int64_t> ids(8 * kWidth, 0), mask(8 * kWidth, 0);
    for (size_t row = 0; row < 8; ++row) {
      const int64_t prompt = samples.scored_begin[row];
      const auto length = static_cast<int64_t>(samples.tokens[row].size());
      const int64_t prompt_at = left_prompt ? kPrompt - prompt : 0;
      const int64_t response_at = kPrompt + (left_response ? kResponse - (length - prompt) : 0);
      for (int64_t i = 0; i < length; ++i) {
        const int64_t column = i < prompt ? prompt_at + i : response_at + i - prompt;
        const size_t cell = row * kWidth + static_cast<size_t>(column);
        ids[cell] = samples.tokens[row][static_cast<size_t>(i)];
        mask[cell] = 1;
      }
    }
    const PaddedSamples padded = samples_from_padded({8, kWidth, kResponse, ids, mask, {}, 1});
    expect_equal(run(*model, PrefixForest::build(padded.samples, {})), truth);
  }
}

TEST(Exactness, B05_OrderOfRowsChangesOnlyTheOrderOfValues) {
  const auto model = tiny_model();
  const OwnedSamples samples = ba();
  const at::Tensor truth = run(*model, samples.forest(Sharing::kPrompts)).logprob;
  Random random(3);
  for (int round = 0; round < 5; ++round) {
    std::vector<size_t> order = {0, 1, 2, 3, 4, 5, 6, 7};
    for (size_t i = 8; i-- > 1;)
      std::swap(order[i], order[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
    OwnedSamples shuffled;
    std::vector<at::Tensor> expected;
    const std::vector<int64_t> offsets = samples.forest(Sharing::kPrompts).scored_offsets;
    for (const size_t i : order) {
      shuffled.add(samples.tokens[i], samples.scored_begin[i]);
      expected.push_back(truth.slice(0, offsets[i], offsets[i + 1]));
    }
    EXPECT_LT(
        score_error(run(*model, shuffled.forest(Sharing::kPrompts)).logprob, at::cat(expected)),
        kScores);
  }
}

TEST(Exactness, B12_OtherRowsDoNotChangeABit) {
  const auto model = tiny_model(tiny_config(), at::kFloat);
  Random random(4);
  OwnedSamples first = reference::star(random, 9, 4, 3, 97),
               second = reference::star(random, 7, 5, 3, 97);
  const auto score = [&](const OwnedSamples& a, const OwnedSamples& b) {
    OwnedSamples both = a;
    for (size_t i = 0; i < 3; ++i) both.add(b.tokens[i], b.scored_begin[i]);
    return model->score(Batch::from(both.forest(Sharing::kPrompts))).logprob.detach();
  };
  const at::Tensor before = score(first, second);
  for (auto& tokens : first.tokens)
    for (int64_t& token : tokens) token = (token + 31) % 97;
  EXPECT_TRUE(at::equal(score(first, second).slice(0, 12), before.slice(0, 12)));
  const at::Tensor unchanged = score(first, second);
  for (size_t i = 7; i < 12; ++i) second.tokens[0][i] = (second.tokens[0][i] + 13) % 97;
  EXPECT_TRUE(at::equal(score(first, second).slice(0, 17), unchanged.slice(0, 17)));
}

TEST(Exactness, B13_PositionsMayBeShiftedOrPadded) {
  const auto model = tiny_model();
  const OwnedSamples samples = ba();
  const at::Tensor truth = run(*model, samples.forest(Sharing::kPrompts)).logprob;
  for (const int64_t shift : {1000, 5}) {
    std::vector<std::vector<int64_t>> positions;
    std::vector<Sample> views = samples.views();
    for (const Sample& view : views) {
      positions.emplace_back();
      for (size_t i = 0; i < view.token_ids.size(); ++i)
        positions.back().push_back(shift + static_cast<int64_t>(i));
    }
    for (size_t i = 0; i < views.size(); ++i) views[i].positions = positions[i];
    EXPECT_LT(score_error(run(*model, PrefixForest::build(views, {})).logprob, truth), 1e-9);
  }
}

TEST(Exactness, EmptyResponsesDisturbNobody) {
  const auto model = tiny_model();
  OwnedSamples samples = ba();
  const ModelNumbers truth = alone(*model, samples);
  samples.add({50, 51}, 2);
  samples.add(std::vector<int64_t>(samples.tokens[0].begin(), samples.tokens[0].begin() + 9), 9);
  for (const Sharing sharing : {Sharing::kNone, Sharing::kPrompts, Sharing::kPrefixes})
    expect_equal(run(*model, samples.forest(sharing)), truth);
}

TEST(Exactness, DeepTriesAndMultiTurnSamples) {
  const auto model = tiny_model();
  Random random(6);
  OwnedSamples samples;
  const auto system = reference::random_tokens(random, 9, 97);
  for (int question = 0; question < 2; ++question) {
    const auto asked = reference::joined(system, reference::random_tokens(random, 5, 97));
    for (int answer = 0; answer < 3; ++answer)
      samples.add(reference::joined(asked, reference::random_tokens(random, 1 + answer, 97)), 14);
    samples.add(samples.tokens.back(),
                1);  // multi-turn: everything after the first token is scored
  }
  expect_equal(run(*model, samples.forest(Sharing::kPrefixes)), alone(*model, samples));
}

TEST(Mutation, EachOneFailsByFarMoreThanTheTolerance) {
  const auto model = tiny_model();
  const OwnedSamples samples = ba();
  const ModelNumbers truth = alone(*model, samples);
  const PrefixForest good = samples.forest(Sharing::kPrompts);
  const auto error_of = [&](const auto& edit) {
    PrefixForest forest = good;
    edit(forest);
    return worst_error(run(*model, forest), truth);
  };
  ASSERT_LT(error_of([](PrefixForest&) {}), kGradients);
  // The label of row 2's first token from the packed neighbour of its predictor: row 0's first
  // token.
  const auto label = [](PrefixForest& f) {
    int64_t& token = f.scored[static_cast<size_t>(f.scored_offsets[2])];
    token = f.previous[static_cast<size_t>(token)] + 1;
  };
  const auto rectangle = [](PrefixForest& f) {
    Node& prompt = f.nodes[0];
    prompt.subtree_end = prompt.end;
    for (int64_t t = prompt.begin; t < prompt.end; ++t)
      f.visible_until[static_cast<size_t>(t)] = prompt.end;
  };
  const auto position = [](PrefixForest& f) {
    f.positions[static_cast<size_t>(f.nodes[1].begin)] += 1;
  };
  EXPECT_GT(error_of(label), 100 * kGradients);
  EXPECT_GT(error_of(rectangle), 100 * kGradients);
  EXPECT_GT(error_of(position), 100 * kGradients);
  {
    at::NoGradGuard no_grad;
    model->weights()[1].slot->view({-1})[0].mul_(1.001);
  }
  EXPECT_GT(error_of([](PrefixForest&) {}), 100 * kGradients);
}

TEST(Model, B27_TokensBeyondTheVocabularyAreRefused) {
  const auto model = tiny_model();
  OwnedSamples samples;
  samples.add({1, 97}, 1);
  try {
    model->score(Batch::from(samples.forest(Sharing::kPrompts)));
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("97"), std::string::npos);
  }
}

TEST(Model, B28_ATiedHeadIsOneTensorWithBothGradients) {
  const auto model = tiny_model(tiny_config(/*tied=*/true));
  const OwnedSamples samples = ba();
  for (const Weight& weight : model->weights()) EXPECT_NE(weight.name, "lm_head.weight");
  EXPECT_TRUE(model->head_weight().is_same(*model->weights()[0].slot));
  for (const HeadMode mode : {HeadMode::kNone, HeadMode::kCompute, HeadMode::kMemory}) {
    ForwardOptions options;
    options.head.mode = mode;
    expect_equal(run(*model, samples.forest(Sharing::kPrompts), options), alone(*model, samples));
  }
}

TEST(Model, PadRowOfTheEmbeddingGetsNoLookupGradient) {
  ModelConfig config = tiny_config();
  config.pad_token_id = 3;
  const auto model = tiny_model(config);
  OwnedSamples samples;
  samples.add({1, 3, 5, 3, 6}, 2);
  const ModelNumbers numbers = run(*model, samples.forest(Sharing::kPrompts));
  EXPECT_EQ(numbers.gradients.at("model.embed_tokens.weight")[3].abs().sum().item<double>(), 0);
  EXPECT_GT(numbers.gradients.at("model.embed_tokens.weight")[5].abs().sum().item<double>(), 0);
}

TEST(Model, LogitsStandWhereScoresArePredicted) {
  const auto model = tiny_model();
  const Batch batch = Batch::from(ba().forest(Sharing::kPrompts));
  const at::Tensor logits = model->logits(batch);
  const at::Tensor expected =
      logits.log_softmax(-1).gather(1, batch.tensors.label.unsqueeze(1)).squeeze(1);
  EXPECT_LT(score_error(model->score(batch).logprob, expected), kScores);
  EXPECT_THROW(at_predictors(logits, batch), InvalidArgument);
}

}  // namespace
}  // namespace zorro
