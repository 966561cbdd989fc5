#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace zorro {

/// Rotary position settings, resolved from the old (rope_theta, rope_scaling) or the new
/// (rope_parameters) layout.
struct RopeConfig {
  std::string type = "default";  ///< default, linear, llama3 or yarn
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;
  double factor = 1.0;
  double original_max_positions = 0;                 ///< llama3 and yarn
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3
  double beta_fast = 32, beta_slow = 1;              ///< yarn
  bool truncate = true;                              ///< yarn
  double attention_factor = 0;                       ///< yarn; 0: 0.1 ln(factor) + 1
  std::vector<int64_t>
      mrope_section;  ///< interleaved axes of multimodal positions; empty: one axis
};

/// The gated delta net of a hybrid family's linear-attention layers.
struct LinearAttentionConfig {
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_kernel = 0;
};

/// The experts of a sparse family.
struct MoeConfig {
  int64_t experts = 0, choices = 0, intermediate_size = 0;
  int64_t shared_intermediate_size = 0;  ///< 0: no shared expert
  bool normalize = false;                ///< weights of the chosen experts sum to 1
  double aux_loss_coef = 0.001;
};

enum class LayerType { kFullAttention, kLinearAttention };

/// The fields of a config.json that a decoder needs, of the text part when there are others.
struct ModelConfig {
  /// The family: qwen3, qwen3_moe, qwen3_next, qwen3_5, qwen3_5_moe, qwen2, llama, mistral.
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
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  int64_t pad_token_id = -1;      ///< -1: none. Its embedding row gets no lookup gradient.
  std::string dtype = "float32";  ///< as the file says ("bfloat16", "float16", "float32")
  RopeConfig rope;
  std::vector<LayerType> layer_types;  ///< [num_layers]; empty: all full attention
  std::vector<bool> sparse_layers;     ///< [num_layers] which have experts; empty: none
  LinearAttentionConfig linear;
  MoeConfig moe;
  bool is_wrapped = false;  ///< the text part of a multimodal file
};

/// Reads and checks a config.json text; `where` names it in messages.
///
/// Throws  CheckpointError: not JSON, a key of the wrong type, missing, zero, negative or absurdly
/// large; heads not a
///         multiple of kv heads. NotSupported: unknown model_type or RoPE scaling, sliding window
///         in use, quantization, hidden_act other than silu, attention_dropout > 0 - each by name.
ModelConfig parse_model_config(std::string_view text, const std::string& where);
ModelConfig read_model_config(const std::filesystem::path& folder);

/// A config.json for a model built from sizes (not loaded from a folder); flat, whatever is_wrapped
/// says.
std::string to_json(const ModelConfig& config);

}  // namespace zorro
