// Loading and saving Hugging Face folders.
#include <gtest/gtest.h>

#include "cpp/io/temporary_folder.h"
#include "cpp/models/tiny_model.h"
#include "zorro/core/error.h"
#include "zorro/io/safetensors.h"

namespace zorro {
namespace {

/// The tensors of a small model, to be changed and written as a folder.
struct Draft {
  explicit Draft(bool tied) : config(tiny_config(tied)) {
    const auto model = tiny_model(config, at::kFloat);
    for (const Weight& weight : model->weights()) tensors[weight.name] = weight.slot->detach();
  }
  std::filesystem::path write(const TemporaryFolder& folder, const std::string& name) const {
    const auto path = folder / name;
    std::filesystem::create_directory(path);
    write_safetensors(path / "model.safetensors", {tensors.begin(), tensors.end()});
    std::ofstream(path / "config.json") << to_json(config);
    return path;
  }
  ModelConfig config;
  std::map<std::string, at::Tensor> tensors;
};

void expect_refused(const Draft& draft, const std::string& part) {
  const TemporaryFolder folder;
  try {
    CausalLM::load(draft.write(folder, "m"));
    ADD_FAILURE() << "accepted: " << part;
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Checkpoint, SavesTheSameNamesDtypesAndBytes) {
  const TemporaryFolder folder;
  Draft draft(false);
  draft.tensors["model.norm.weight"] = draft.tensors["model.norm.weight"].to(at::kBFloat16);
  const auto source = draft.write(folder, "m");
  std::ofstream(source / "tokenizer.json") << "{}";
  std::ofstream(source / "notes.txt") << "not ours";
  CausalLM::load(source)->save(folder / "n");
  EXPECT_EQ(read_bytes(folder / "n/model.safetensors"), read_bytes(folder / "m/model.safetensors"));
  EXPECT_EQ(read_bytes(folder / "n/config.json"), read_bytes(folder / "m/config.json"));
  EXPECT_TRUE(std::filesystem::exists(folder / "n/tokenizer.json"));
  EXPECT_FALSE(std::filesystem::exists(folder / "n/notes.txt"));
  EXPECT_EQ(folder.num_entries(), 2U);
}

TEST(Checkpoint, ShardsStayShards) {
  const TemporaryFolder folder;
  const Draft draft(false);
  const auto source = draft.write(folder, "m");
  std::filesystem::remove(source / "model.safetensors");
  NamedTensors first, second;
  std::string map;
  for (const auto& [name, tensor] : draft.tensors) {
    const bool in_first = first.size() < 5;
    (in_first ? first : second).emplace_back(name, tensor);
    map += concat(map.empty() ? "" : ",", "\"", name, "\":\"part-", in_first ? 1 : 2,
                  ".safetensors\"");
  }
  write_safetensors(source / "part-1.safetensors", first);
  write_safetensors(source / "part-2.safetensors", second);
  std::ofstream(source / "model.safetensors.index.json")
      << R"({"metadata":{"total_size":1},"weight_map":{)" << map << "}}";
  CausalLM::load(source)->save(folder / "n");
  for (const char* file : {"part-1.safetensors", "part-2.safetensors"})
    EXPECT_EQ(read_bytes(folder / concat("n/", file)), read_bytes(source / file));
  EXPECT_NO_THROW(CausalLM::load(folder / "n"));
}

TEST(Checkpoint, ARandomModelLoadsBack) {
  const TemporaryFolder folder;
  for (const bool tied : {false, true}) {
    const auto model = tiny_model(tiny_config(tied), at::kFloat);
    const auto path = folder / (tied ? "tied" : "untied");
    model->save(path);
    const auto back = CausalLM::load(path);
    const auto ours = model->weights(), theirs = back->weights();
    ASSERT_EQ(ours.size(), theirs.size());
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(*ours[i].slot, *theirs[i].slot));
  }
}

TEST(Checkpoint, B42_TiedFlagAndFilesMayDisagree) {
  const TemporaryFolder folder;
  Draft tied(true);
  EXPECT_TRUE(CausalLM::load(tied.write(folder, "absent"))->warning().empty());
  tied.tensors["lm_head.weight"] = tied.tensors["model.embed_tokens.weight"];
  const auto both = CausalLM::load(tied.write(folder, "equal"));
  EXPECT_TRUE(both->config().tie_word_embeddings);
  both->save(folder / "equal-saved");
  EXPECT_EQ(read_bytes(folder / "equal-saved/model.safetensors"),
            read_bytes(folder / "equal/model.safetensors"));
  Draft only_head = tied;
  only_head.tensors.erase("model.embed_tokens.weight");
  EXPECT_TRUE(CausalLM::load(only_head.write(folder, "head"))->config().tie_word_embeddings);

  tied.tensors["lm_head.weight"] = tied.tensors["lm_head.weight"] + 1;
  const auto differs = CausalLM::load(tied.write(folder, "differs"));
  EXPECT_FALSE(differs->config().tie_word_embeddings);
  EXPECT_NE(differs->warning().find("kept apart"), std::string::npos);
  differs->save(folder / "differs-saved");
  const auto again = CausalLM::load(folder / "differs-saved");
  EXPECT_TRUE(again->warning().empty());
  EXPECT_TRUE(at::equal(again->head_weight(), differs->head_weight()));

  Draft untied(false);
  EXPECT_NO_THROW(CausalLM::load(untied.write(folder, "untied")));
  untied.tensors.erase("lm_head.weight");
  expect_refused(untied, "lm_head.weight");
}

TEST(Checkpoint, B43_AFolderThatDoesNotFitIsRefusedByTensor) {
  const std::string q = "model.layers.1.self_attn.q_proj.weight";
  Draft missing(false);
  missing.tensors.erase(q);
  expect_refused(missing, q);
  Draft shape(false);
  shape.tensors[q] = shape.tensors[q].slice(0, 0, 8);
  expect_refused(shape, q);
  expect_refused(shape, "[64, 32]");
  expect_refused(shape, "[8, 32]");
  Draft extra(false);
  extra.tensors["model.layers.1.self_attn.q_porj.weight"] = at::zeros({1});
  expect_refused(extra, "q_porj");
  Draft integers(false);
  integers.tensors[q] = integers.tensors[q].to(at::kInt);
  expect_refused(integers, q);
  Draft buffer(false);
  buffer.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::zeros({8});
  const TemporaryFolder folder;
  EXPECT_NO_THROW(CausalLM::load(buffer.write(folder, "m")));
}

TEST(Checkpoint, WhatIsNotWrittenOrAsked) {
  const TemporaryFolder folder;
  const Draft draft(false);
  const auto path = draft.write(folder, "m");
  EXPECT_THROW(CausalLM::load(folder / "absent"), CheckpointError);
  EXPECT_THROW(CausalLM::load(path, {at::kHalf, at::kCPU}), InvalidArgument);
  ModelConfig other = draft.config;
  other.model_type = "gpt2";
  EXPECT_THROW(CausalLM::random(other, 1), NotSupported);
  const auto model = CausalLM::load(path);
  EXPECT_THROW(model->save(path), CheckpointError);
  EXPECT_THROW(model->save(folder / "no/where"), CheckpointError);
  EXPECT_EQ(folder.num_entries(), 1U);
}

TEST(Checkpoint, OtherDtypesAreConvertedOnLoad) {
  const TemporaryFolder folder;
  Draft draft(false);
  for (auto& [name, tensor] : draft.tensors) tensor = tensor.to(at::kHalf);
  const auto path = draft.write(folder, "m");
  const auto model = CausalLM::load(path, {at::kDouble, at::kCPU});
  EXPECT_EQ(model->head_weight().scalar_type(), at::kDouble);
  model->save(folder / "n");
  EXPECT_EQ(read_bytes(folder / "n/model.safetensors"), read_bytes(path / "model.safetensors"));
}

}  // namespace
}  // namespace zorro
