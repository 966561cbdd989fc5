#include "zorro/io/model_config.h"

#include <gtest/gtest.h>

#include "cpp/io/temporary_folder.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

/// The text of a small config with further keys.
std::string config(const std::string& more = "") {
  return R"({"model_type":"qwen3","vocab_size":320,"hidden_size":48,"intermediate_size":96,"num_hidden_layers":4,
             "num_attention_heads":4,"num_key_value_heads":2,"head_dim":16)" +
         more + "}";
}

ModelConfig parse(const std::string& text) { return parse_model_config(text, "config.json"); }

template <typename Error>
void expect_refused(const std::string& text, const std::string& part) {
  try {
    parse(text);
    ADD_FAILURE() << "accepted: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(ModelConfig, B15_HeadDimIsItsOwnNumber) {
  const ModelConfig read = parse(config());
  EXPECT_EQ(read.head_dim, 16);
  EXPECT_EQ(read.num_query_heads, 4);
  EXPECT_EQ(read.num_kv_heads, 2);
  EXPECT_EQ(parse(R"({"model_type":"qwen3"})").head_dim,
            128);  // the family's default, never hidden / heads
  expect_refused<CheckpointError>(
      R"({"model_type":"qwen3","num_attention_heads":4,"num_key_value_heads":3})", "got 4 and 3");
}

TEST(ModelConfig, BothRopeLayoutsSayTheSame) {
  for (const char* rope : {R"(,"rope_theta":1000000.0,"rope_scaling":null)",
                           R"(,"rope_parameters":{"rope_type":"default","rope_theta":1000000.0})",
                           R"(,"rope_theta":1000000.0,"rope_scaling":{"type":"mrope"})"})
    EXPECT_EQ(parse(config(rope)).rope.theta, 1e6) << rope;
  EXPECT_EQ(parse(config()).rope.theta, 10000);
}

TEST(ModelConfig, B14_ScalingIsReadFromBothLayoutsAndWhatIsNotWrittenIsRefused) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const RopeConfig rope =
        parse(
            config(concat(",\"", key, R"(":{"rope_type":"yarn","factor":4,"attention_factor":1.5,)",
                          R"("original_max_position_embeddings":64})")))
            .rope;
    EXPECT_EQ(rope.type, "yarn");
    EXPECT_EQ(rope.factor, 4);
    EXPECT_EQ(rope.original_max_positions, 64);
    EXPECT_EQ(rope.attention_factor, 1.5);
  }
  expect_refused<CheckpointError>(config(R"(,"rope_scaling":{"rope_type":"linear"})"), "factor");
  for (const char* type : {"dynamic", "longrope", "surprise"}) {
    expect_refused<NotSupported>(
        config(concat(R"(,"rope_scaling":{"rope_type":")", type, R"(","factor":4})")), type);
    expect_refused<NotSupported>(
        config(concat(R"(,"rope_scaling":{"type":")", type, R"(","factor":4})")), type);
    expect_refused<NotSupported>(
        config(concat(R"(,"rope_parameters":{"rope_type":")", type, R"("})")), type);
  }
}

TEST(ModelConfig, WhatIsNotWrittenIsRefusedByName) {
  expect_refused<NotSupported>(R"({"model_type":"qwen4_exp"})", "qwen4_exp");
  expect_refused<NotSupported>(config(R"(,"quantization_config":{})"), "quantization_config");
  expect_refused<NotSupported>(config(R"(,"hidden_act":"gelu")"), "gelu");
  expect_refused<NotSupported>(config(R"(,"attention_dropout":0.1)"), "attention_dropout");
  expect_refused<NotSupported>(config(R"(,"use_sliding_window":true,"sliding_window":64)"),
                               "sliding");
  expect_refused<NotSupported>(config(R"(,"layer_types":["sliding_attention"])"),
                               "sliding_attention");
  EXPECT_NO_THROW(parse(config(R"(,"use_sliding_window":false,"sliding_window":64)")));
  const std::string types =
      R"(["full_attention","full_attention","full_attention","full_attention"])";
  EXPECT_NO_THROW(parse(config(concat(R"(,"layer_types":)", types, R"(,"eos_token_id":[1,2])"))));
}

TEST(ModelConfig, NonsenseIsRefusedWithKeyAndValue) {
  expect_refused<CheckpointError>("{", "not valid JSON");
  expect_refused<CheckpointError>("[]", "JSON object");
  expect_refused<CheckpointError>("{}", "model_type");
  for (const char* value : {"0", "-3", "1.5", "\"many\"", "4294967296", "18446744073709551615"})
    expect_refused<CheckpointError>(concat(R"({"model_type":"qwen3","hidden_size":)", value, "}"),
                                    "hidden_size");
  expect_refused<CheckpointError>(config(R"(,"rms_norm_eps":0)"), "rms_norm_eps");
  expect_refused<CheckpointError>(config(R"(,"rms_norm_eps":"x")"), "rms_norm_eps");
  expect_refused<CheckpointError>(config(R"(,"tie_word_embeddings":1)"), "tie_word_embeddings");
  expect_refused<CheckpointError>(config(R"(,"dtype":"int8")"), "dtype");
  expect_refused<CheckpointError>(config(R"(,"dtype":8)"), "dtype");
  expect_refused<CheckpointError>(config(R"(,"rope_theta":-1)"), "rope_theta");
  expect_refused<CheckpointError>(config(R"(,"rope_scaling":3)"), "rope_scaling");
  expect_refused<CheckpointError>(config(R"(,"layer_types":3)"), "layer_types");
  expect_refused<CheckpointError>(config(R"(,"pad_token_id":320)"), "pad_token_id");
  expect_refused<CheckpointError>(R"({"model_type":"qwen3","head_dim":15})", "head_dim");
  EXPECT_THROW(read_model_config("/nonexistent"), CheckpointError);
}

TEST(ModelConfig, WhatIsWrittenIsReadBack) {
  const ModelConfig first =
      parse(config(R"(,"attention_bias":true,"tie_word_embeddings":true,"pad_token_id":3,
                                            "dtype":"bfloat16","rope_theta":5000.0,"rms_norm_eps":1e-5)"));
  const TemporaryFolder folder;
  folder.write("config.json", to_json(first));
  const ModelConfig second = read_model_config(folder.path());
  EXPECT_EQ(to_json(second), to_json(first));
  EXPECT_TRUE(second.attention_bias && second.tie_word_embeddings);
  EXPECT_EQ(second.pad_token_id, 3);
  EXPECT_EQ(second.dtype, "bfloat16");
  EXPECT_EQ(second.rope.theta, 5000);
  EXPECT_EQ(second.rms_norm_eps, 1e-5);
}

TEST(ModelConfig, FamiliesFillInWhatTheirFilesLeaveOut) {
  const ModelConfig next = parse(R"({"model_type":"qwen3_next","num_hidden_layers":8})");
  EXPECT_EQ(next.head_dim, 256);
  EXPECT_EQ(next.rope.partial_rotary_factor, 0.25);
  EXPECT_EQ(next.moe.experts, 512);
  EXPECT_TRUE(next.moe.normalize);
  ASSERT_EQ(next.layer_types.size(), 8U);
  for (size_t layer = 0; layer < 8; ++layer)
    EXPECT_EQ(next.layer_types[layer] == LayerType::kFullAttention, layer % 4 == 3) << layer;
  const ModelConfig moe =
      parse(R"({"model_type":"qwen3_moe","num_hidden_layers":4,"decoder_sparse_step":2,)"
            R"("mlp_only_layers":[3],"num_local_experts":16})");
  EXPECT_EQ(moe.sparse_layers, (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(moe.moe.experts, 16);
  EXPECT_FALSE(moe.moe.normalize);
  EXPECT_EQ(moe.head_dim, 64);
  EXPECT_TRUE(parse(R"({"model_type":"qwen3_5_moe_text"})").moe.normalize);
  EXPECT_TRUE(parse(R"({"model_type":"qwen2"})").attention_bias);
  EXPECT_FALSE(parse(R"({"model_type":"mistral","sliding_window":null,"attention_bias":true})")
                   .attention_bias);
}

TEST(ModelConfig, B44_TheTextPartOfAWrappedFileIsRead) {
  const ModelConfig read = parse(
      R"({"model_type":"qwen3_5","tie_word_embeddings":false,"vision_config":{},"dtype":"bfloat16",)"
      R"("text_config":{"model_type":"qwen3_5_text","hidden_size":64,"tie_word_embeddings":true}})");
  EXPECT_EQ(read.model_type, "qwen3_5");
  EXPECT_TRUE(read.is_wrapped);
  EXPECT_EQ(read.hidden_size, 64);
  EXPECT_FALSE(read.tie_word_embeddings);  // the outer file decides
  EXPECT_EQ(read.dtype, "bfloat16");
}

TEST(ModelConfig, NonsenseOfTheFamiliesIsRefused) {
  expect_refused<CheckpointError>(R"({"model_type":"qwen3_moe","num_experts_per_tok":200})",
                                  "num_experts_per_tok");
  expect_refused<CheckpointError>(
      R"({"model_type":"qwen3_5","linear_num_key_heads":3,"linear_num_value_heads":4})",
      "linear_num_value_heads");
  expect_refused<CheckpointError>(
      R"({"model_type":"qwen3_5","num_hidden_layers":2,"layer_types":["full_attention"]})",
      "layer_types");
  expect_refused<NotSupported>(
      R"({"model_type":"qwen3_5","num_hidden_layers":1,"layer_types":["surprise"]})", "surprise");
  expect_refused<NotSupported>(R"({"model_type":"qwen3_5","attn_output_gate":false})",
                               "attn_output_gate");
  expect_refused<CheckpointError>(R"({"model_type":"qwen3_moe","mlp_only_layers":[-1]})",
                                  "mlp_only_layers");
  expect_refused<CheckpointError>(R"({"model_type":"qwen3_5","partial_rotary_factor":2})",
                                  "partial_rotary_factor");
  expect_refused<NotSupported>(R"({"model_type":"mistral","sliding_window":64})", "sliding_window");
  expect_refused<CheckpointError>(R"({"model_type":"qwen3_5","text_config":3})", "text_config");
}

}  // namespace
}  // namespace zorro
