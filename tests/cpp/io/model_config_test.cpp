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

TEST(ModelConfig, B14_ScalingThatIsNotWrittenIsRefusedByName) {
  for (const char* type : {"yarn", "llama3", "linear", "dynamic", "surprise"}) {
    expect_refused<NotSupported>(
        config(concat(R"(,"rope_scaling":{"rope_type":")", type, R"(","factor":4})")), type);
    expect_refused<NotSupported>(
        config(concat(R"(,"rope_scaling":{"type":")", type, R"(","factor":4})")), type);
    expect_refused<NotSupported>(
        config(concat(R"(,"rope_parameters":{"rope_type":")", type, R"("})")), type);
  }
}

TEST(ModelConfig, WhatIsNotWrittenIsRefusedByName) {
  expect_refused<NotSupported>(R"({"model_type":"qwen3_moe"})", "qwen3_moe");
  expect_refused<NotSupported>(R"({"model_type":"qwen4_exp"})", "qwen4_exp");
  expect_refused<NotSupported>(config(R"(,"quantization_config":{})"), "quantization_config");
  expect_refused<NotSupported>(config(R"(,"hidden_act":"gelu")"), "gelu");
  expect_refused<NotSupported>(config(R"(,"attention_dropout":0.1)"), "attention_dropout");
  expect_refused<NotSupported>(config(R"(,"use_sliding_window":true,"sliding_window":64)"),
                               "sliding");
  expect_refused<NotSupported>(config(R"(,"layer_types":["sliding_attention"])"),
                               "sliding_attention");
  EXPECT_NO_THROW(parse(config(R"(,"use_sliding_window":false,"sliding_window":64)")));
  EXPECT_NO_THROW(parse(config(R"(,"layer_types":["full_attention"],"eos_token_id":[1,2])")));
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

}  // namespace
}  // namespace zorro
