#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace zorro {

/// Rotary position settings, resolved from the old (rope_theta, rope_scaling) or the new
/// (rope_parameters) layout.
struct RopeConfig {
  std::string type = "default";
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;
};

/// The fields of a config.json that a dense decoder needs. docs: models.md of the family.
struct ModelConfig {
  std::string model_type;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_query_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;  ///< its own number, not hidden_size / heads
  int64_t max_positions = 0;
  double rms_norm_eps = 1e-6;
  bool attention_bias = false;
  bool tie_word_embeddings = false;
  int64_t pad_token_id = -1;      ///< -1: none. Its embedding row gets no lookup gradient.
  std::string dtype = "float32";  ///< as the file says ("bfloat16", "float16", "float32")
  RopeConfig rope;
};

/// Reads and checks a config.json text; `where` names it in messages.
///
/// Throws  CheckpointError: not JSON, a key of the wrong type, missing, zero, negative or absurdly
/// large; heads not a
///         multiple of kv heads. NotSupported: unknown model_type, RoPE scaling, sliding window in
///         use, quantization, hidden_act other than silu, attention_dropout > 0 - each by name.
ModelConfig parse_model_config(std::string_view text, const std::string& where);
ModelConfig read_model_config(const std::filesystem::path& folder);

/// A config.json for a model built from sizes (not loaded from a folder).
std::string to_json(const ModelConfig& config);

}  // namespace zorro
