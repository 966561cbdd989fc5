#include "zorro/io/model_config.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "io/json_text.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLargestSize = std::numeric_limits<int32_t>::max();

/// Typed access to a config's keys; every complaint names the file and the key.
class Reader {
 public:
  Reader(const Json& json, const std::string& where) : json_(json), where_(where) {}

  template <typename... Parts>
  [[noreturn]] void bad(const char* key, const Parts&... what) const {
    throw CheckpointError(concat("[config] ", where_, ": ", key, " ", what...));
  }

  template <typename... Parts>
  void refuse_if(bool condition, const char* key, const Parts&... what) const {
    ZORRO_CHECK_AS(NotSupported, !condition, "[config] ", where_, ": ", key, " ", what...);
  }

  const Json* find(const char* key) const {
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  int64_t size(const char* key, std::optional<int64_t> otherwise = {}) const {
    const Json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) bad(key, "must be there, got nothing.");
    const bool fits = value->is_number_integer() &&
                      (!value->is_number_unsigned() ||
                       value->get<uint64_t>() <= static_cast<uint64_t>(kLargestSize));
    if (!fits || value->get<int64_t>() < 1)
      bad(key, "must be an integer in [1, ", kLargestSize, "], got ", value->dump(), ".");
    return value->get<int64_t>();
  }

  double number(const char* key, double otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_number()) bad(key, "must be a number, got ", value->dump(), ".");
    return value->get<double>();
  }

  bool flag(const char* key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) bad(key, "must be true or false, got ", value->dump(), ".");
    return value->get<bool>();
  }

  std::string text(const char* key, const std::string& otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) bad(key, "must be a string, got ", value->dump(), ".");
    return value->get<std::string>();
  }

  const std::string& where() const { return where_; }

 private:
  const Json& json_;
  const std::string& where_;
};

/// What a family's class assumes where its file is silent.
struct Family {
  const char* name;  ///< model_type of the text part, without the suffix _text
  const char* architecture;
  int64_t vocab, hidden, intermediate, layers, query_heads, kv_heads, head_dim, max_positions;
  bool hybrid = false, sparse = false;
  bool shared_expert = false;
  int64_t experts = 0, choices = 0, moe_intermediate = 0;
  bool has_sliding_flag = true;  ///< a window counts only with use_sliding_window
};

// head_dim 0: hidden / query heads. kv_heads 0: as many as query heads.
constexpr Family kFamilies[] = {
    {"qwen3", "Qwen3ForCausalLM", 151936, 4096, 22016, 32, 32, 0, 128, 32768},
    {"qwen3_moe", "Qwen3MoeForCausalLM", 151936, 2048, 6144, 24, 32, 4, 0, 32768, false, true,
     false, 128, 8, 768},
    {"qwen3_next", "Qwen3NextForCausalLM", 151936, 2048, 5632, 48, 16, 2, 256, 32768, true, true,
     true, 512, 10, 512},
    {"qwen3_5", "Qwen3_5ForCausalLM", 248320, 4096, 12288, 32, 16, 4, 256, 32768, true},
    {"qwen3_5_moe", "Qwen3_5MoeForCausalLM", 248320, 2048, 512, 40, 16, 2, 256, 32768, true, true,
     true, 256, 8, 512},
    {"qwen2", "Qwen2ForCausalLM", 151936, 4096, 22016, 32, 32, 0, 0, 32768},
    {"llama", "LlamaForCausalLM", 32000, 4096, 11008, 32, 32, 0, 0, 2048},
    {"mistral", "MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 0, 131072, false, false, false,
     0, 0, 0, false},
};

const Family& family_of(const Reader& reader, std::string& model_type) {
  model_type = reader.text("model_type", "");
  if (model_type.empty()) reader.bad("model_type", "must be there, got nothing.");
  const std::string given = model_type;
  if (model_type.ends_with("_text")) model_type.resize(model_type.size() - 5);
  std::string known;
  for (const Family& family : kFamilies) {
    if (model_type == family.name) return family;
    known += (known.empty() ? "" : ", ") + std::string(family.name);
  }
  reader.refuse_if(true, "model_type", "must be one of ", known, ", got \"", given,
                   "\". This family is not written yet.");
  return kFamilies[0];
}

std::vector<int64_t> read_list(const Reader& reader, const char* key) {
  std::vector<int64_t> values;
  const Json* list = reader.find(key);
  if (list == nullptr) return values;
  if (!list->is_array()) reader.bad(key, "must be a list, got ", list->dump(), ".");
  for (const Json& value : *list) {
    if (!value.is_number_integer() || value < 0 || value > kLargestSize)
      reader.bad(key, "must hold integers >= 0, got ", value.dump(), ".");
    values.push_back(value.get<int64_t>());
  }
  return values;
}

/// The dictionary of the old layout if it says anything, else that of the new one, else nothing.
RopeConfig read_rope(const Reader& reader, const Family& family, int64_t max_positions) {
  const Json empty = Json::object();
  const Json* settings = &empty;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const Json* value = reader.find(key);
    if (value == nullptr) continue;
    if (!value->is_object()) reader.bad(key, "must be an object, got ", value->dump(), ".");
    if (!value->empty()) settings = value;
  }
  const Reader rope(*settings, reader.where());
  RopeConfig result;
  result.type = rope.text("rope_type", rope.text("type", "default"));
  if (result.type == "mrope") result.type = "default";
  bool known = false;
  for (const char* type : {"default", "linear", "llama3", "yarn"}) known |= result.type == type;
  reader.refuse_if(!known, "rope_type", "must be default, linear, llama3 or yarn, got \"",
                   result.type, "\".");
  result.theta = rope.number("rope_theta", reader.number("rope_theta", 10000.0));
  if (!(result.theta > 0)) reader.bad("rope_theta", "must be > 0, got ", result.theta, ".");
  if (family.hybrid) {  // the other families do not read it
    result.partial_rotary_factor =
        rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 0.25));
    if (!(result.partial_rotary_factor > 0 && result.partial_rotary_factor <= 1))
      reader.bad("partial_rotary_factor", "must lie in (0, 1], got ", result.partial_rotary_factor,
                 ".");
    result.mrope_section = read_list(rope, "mrope_section");
  }
  if (result.type == "default") return result;
  result.factor = rope.number("factor", 0);
  if (!(result.factor >= 1)) reader.bad("factor", "must be >= 1, got ", result.factor, ".");
  result.original_max_positions =
      rope.number("original_max_position_embeddings", static_cast<double>(max_positions));
  result.low_freq_factor = rope.number("low_freq_factor", 1);
  result.high_freq_factor = rope.number("high_freq_factor", 4);
  if (!(result.high_freq_factor > result.low_freq_factor && result.low_freq_factor > 0))
    reader.bad("high_freq_factor", "must exceed low_freq_factor > 0, got ", result.high_freq_factor,
               " and ", result.low_freq_factor, ".");
  result.beta_fast = rope.number("beta_fast", 32);
  result.beta_slow = rope.number("beta_slow", 1);
  result.truncate = rope.flag("truncate", true);
  result.attention_factor = rope.number("attention_factor", 0);
  for (const char* key : {"mscale", "mscale_all_dim"})
    reader.refuse_if(rope.find(key) != nullptr, key, "is not supported in RoPE settings.");
  return result;
}

void refuse_unsupported(const Reader& reader, const Family& family) {
  reader.refuse_if(reader.find("quantization_config") != nullptr, "quantization_config",
                   "is not supported: load a checkpoint with plain weights.");
  const std::string activation = reader.text("hidden_act", "silu");
  reader.refuse_if(activation != "silu", "hidden_act", "must be silu, got \"", activation, "\".");
  const double dropout = reader.number("attention_dropout", 0);
  reader.refuse_if(dropout != 0, "attention_dropout", "must be 0, got ", dropout, ".");
  const bool windowed = family.has_sliding_flag ? reader.flag("use_sliding_window", false) : true;
  reader.refuse_if(windowed && reader.find("sliding_window") != nullptr,
                   family.has_sliding_flag ? "use_sliding_window" : "sliding_window",
                   family.has_sliding_flag
                       ? "must be false: the sliding window is not written yet."
                       : "must be null: the sliding window is not written yet.");
  reader.refuse_if(!reader.flag("attn_output_gate", true), "attn_output_gate", "must be true.");
}

std::vector<LayerType> read_layer_types(const Reader& reader, const Family& family,
                                        int64_t num_layers) {
  std::vector<LayerType> layers;
  if (const Json* types = reader.find("layer_types")) {
    if (!types->is_array()) reader.bad("layer_types", "must be a list, got ", types->dump(), ".");
    for (const Json& type : *types) {
      const bool is_full = type == "full_attention" || type == "attention";
      const bool is_linear = type == "linear_attention" || type == "mamba";
      reader.refuse_if(!is_full && !(is_linear && family.hybrid), "layer_types",
                       family.hybrid ? "must hold full_attention and linear_attention, got "
                                     : "must all be full_attention, got ",
                       type.dump(), ".");
      layers.push_back(is_full ? LayerType::kFullAttention : LayerType::kLinearAttention);
    }
    if (static_cast<int64_t>(layers.size()) != num_layers)
      reader.bad("layer_types", "must have num_hidden_layers = ", num_layers, " entries, got ",
                 layers.size(), ".");
  } else if (family.hybrid) {
    const int64_t interval = reader.size("full_attention_interval", 4);
    for (int64_t layer = 0; layer < num_layers; ++layer)
      layers.push_back((layer + 1) % interval == 0 ? LayerType::kFullAttention
                                                   : LayerType::kLinearAttention);
  }
  return layers;
}

LinearAttentionConfig read_linear(const Reader& reader) {
  LinearAttentionConfig linear;
  linear.key_heads = reader.size("linear_num_key_heads", 16);
  linear.value_heads = reader.size("linear_num_value_heads", 32);
  linear.key_dim = reader.size("linear_key_head_dim", 128);
  linear.value_dim = reader.size("linear_value_head_dim", 128);
  linear.conv_kernel = reader.size("linear_conv_kernel_dim", 4);
  if (linear.value_heads % linear.key_heads != 0)
    reader.bad("linear_num_value_heads", "must be a multiple of linear_num_key_heads, got ",
               linear.value_heads, " and ", linear.key_heads, ".");
  return linear;
}

void read_moe(const Reader& reader, const Family& family, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  moe.experts = reader.size("num_experts", reader.size("num_local_experts", family.experts));
  moe.choices = reader.size("num_experts_per_tok", family.choices);
  moe.intermediate_size = reader.size("moe_intermediate_size", family.moe_intermediate);
  if (family.shared_expert)
    moe.shared_intermediate_size = reader.size("shared_expert_intermediate_size", 512);
  const bool is_newest = config.model_type == "qwen3_5_moe";
  moe.normalize = is_newest || reader.flag("norm_topk_prob", family.shared_expert);
  moe.aux_loss_coef = reader.number("router_aux_loss_coef", 0.001);
  if (moe.choices > moe.experts)
    reader.bad("num_experts_per_tok", "must be at most num_experts, got ", moe.choices, " and ",
               moe.experts, ".");
  const int64_t step = is_newest ? 1 : reader.size("decoder_sparse_step", 1);
  const std::vector<int64_t> dense =
      is_newest ? std::vector<int64_t>{} : read_list(reader, "mlp_only_layers");
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    config.sparse_layers.push_back((layer + 1) % step == 0 &&
                                   std::find(dense.begin(), dense.end(), layer) == dense.end());
}

std::string read_dtype(const Reader& reader) {
  const std::string dtype = reader.text("dtype", reader.text("torch_dtype", "float32"));
  for (const char* known : {"float32", "float16", "bfloat16", "float64"})
    if (dtype == known) return dtype;
  reader.bad("dtype", "must be float32, float16, bfloat16 or float64, got \"", dtype, "\".");
}

void check_heads(const Reader& reader, const ModelConfig& config) {
  if (config.num_query_heads % config.num_kv_heads != 0)
    reader.bad("num_attention_heads", "must be a multiple of num_key_value_heads, got ",
               config.num_query_heads, " and ", config.num_kv_heads, ".");
  if (config.head_dim % 2 != 0) reader.bad("head_dim", "must be even, got ", config.head_dim, ".");
  if (!(config.rms_norm_eps > 0))
    reader.bad("rms_norm_eps", "must be > 0, got ", config.rms_norm_eps, ".");
}

}  // namespace

ModelConfig parse_model_config(std::string_view text, const std::string& where) {
  Json json;
  try {
    json = parse_json(text);
  } catch (const std::invalid_argument& error) {
    throw CheckpointError(concat("[config] ", where, ": is not valid JSON: ", error.what(), "."));
  }
  ZORRO_CHECK_AS(CheckpointError, json.is_object(), "[config] ", where, ": must be a JSON object.");
  const bool is_wrapped = json.contains("text_config");
  ZORRO_CHECK_AS(CheckpointError, !is_wrapped || json["text_config"].is_object(), "[config] ",
                 where, ": text_config must be an object.");
  const Json& text_json = is_wrapped ? json["text_config"] : json;
  const Reader outer(json, where), reader(text_json, where);
  ModelConfig config;
  const Family& family = family_of(reader, config.model_type);
  config.is_wrapped = is_wrapped;
  refuse_unsupported(outer, family);
  refuse_unsupported(reader, family);
  config.vocab_size = reader.size("vocab_size", family.vocab);
  config.hidden_size = reader.size("hidden_size", family.hidden);
  config.intermediate_size = reader.size("intermediate_size", family.intermediate);
  config.num_layers = reader.size("num_hidden_layers", family.layers);
  config.num_query_heads = reader.size("num_attention_heads", family.query_heads);
  config.num_kv_heads = reader.size("num_key_value_heads",
                                    family.kv_heads > 0 ? family.kv_heads : config.num_query_heads);
  config.head_dim = reader.size(
      "head_dim", family.head_dim > 0
                      ? family.head_dim
                      : std::max<int64_t>(config.hidden_size / config.num_query_heads, 1));
  config.max_positions = reader.size("max_position_embeddings", family.max_positions);
  config.rms_norm_eps = reader.number("rms_norm_eps", 1e-6);
  // qwen2 has biases on q, k and v whatever the file says, mistral none.
  config.attention_bias = config.model_type == "qwen2" ||
                          (config.model_type != "mistral" && reader.flag("attention_bias", false));
  config.mlp_bias = config.model_type == "llama" && reader.flag("mlp_bias", false);
  // The class being built decides: the outer file when it speaks.
  config.tie_word_embeddings =
      outer.flag("tie_word_embeddings", reader.flag("tie_word_embeddings", false));
  config.dtype = read_dtype(reader.find("dtype") || reader.find("torch_dtype") ? reader : outer);
  config.rope = read_rope(reader, family, config.max_positions);
  config.layer_types = read_layer_types(reader, family, config.num_layers);
  if (family.hybrid) config.linear = read_linear(reader);
  if (family.sparse) read_moe(reader, family, config);
  check_heads(reader, config);
  if (const Json* pad = reader.find("pad_token_id")) {
    if (!pad->is_number_integer() || *pad < -1 || *pad >= config.vocab_size)
      reader.bad("pad_token_id", "must be a token id below vocab_size, got ", pad->dump(), ".");
    config.pad_token_id = pad->get<int64_t>();
  }
  return config;
}

ModelConfig read_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  std::ifstream file(path, std::ios::binary);
  ZORRO_CHECK_AS(CheckpointError, file.good() && std::filesystem::is_regular_file(path),
                 "[config] ", path.string(), ": cannot be read. Is this a model folder?");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return parse_model_config(text, path.string());
}

namespace {

Json rope_json(const RopeConfig& rope, bool is_hybrid) {
  Json json = {{"rope_type", rope.type}, {"rope_theta", rope.theta}};
  if (is_hybrid) json["partial_rotary_factor"] = rope.partial_rotary_factor;
  if (!rope.mrope_section.empty())
    json.update({{"mrope_section", rope.mrope_section}, {"mrope_interleaved", true}});
  if (rope.type == "default") return json;
  json["factor"] = rope.factor;
  if (rope.type != "linear")
    json["original_max_position_embeddings"] = static_cast<int64_t>(rope.original_max_positions);
  if (rope.type == "llama3")
    json.update(
        {{"low_freq_factor", rope.low_freq_factor}, {"high_freq_factor", rope.high_freq_factor}});
  if (rope.type == "yarn") {
    json.update({{"beta_fast", rope.beta_fast}, {"beta_slow", rope.beta_slow}});
    if (rope.attention_factor > 0) json["attention_factor"] = rope.attention_factor;
    if (!rope.truncate) json["truncate"] = false;
  }
  return json;
}

}  // namespace

std::string to_json(const ModelConfig& config) {
  const Family* family = kFamilies;
  for (const Family& entry : kFamilies)
    if (config.model_type == entry.name) family = &entry;
  // The class of a text part is that of the wrapped file's inner dictionary.
  const bool is_text = config.model_type.starts_with("qwen3_5");
  nlohmann::ordered_json json = {{"architectures", {family->architecture}},
                                 {"model_type", config.model_type + (is_text ? "_text" : "")},
                                 {"vocab_size", config.vocab_size},
                                 {"hidden_size", config.hidden_size},
                                 {"intermediate_size", config.intermediate_size},
                                 {"num_hidden_layers", config.num_layers},
                                 {"num_attention_heads", config.num_query_heads},
                                 {"num_key_value_heads", config.num_kv_heads},
                                 {"head_dim", config.head_dim},
                                 {"max_position_embeddings", config.max_positions},
                                 {"rms_norm_eps", config.rms_norm_eps},
                                 {"attention_bias", config.attention_bias},
                                 {"tie_word_embeddings", config.tie_word_embeddings},
                                 {"hidden_act", "silu"},
                                 {"torch_dtype", config.dtype}};
  if (config.rope.type == "default" && !family->hybrid) {
    json["rope_theta"] = config.rope.theta;
    json["rope_scaling"] = nullptr;
  } else {
    json["rope_parameters"] = rope_json(config.rope, family->hybrid);
  }
  if (config.model_type == "llama") json["mlp_bias"] = config.mlp_bias;
  if (config.model_type == "mistral") json["sliding_window"] = nullptr;
  if (family->hybrid) {
    Json types = Json::array();
    for (const LayerType type : config.layer_types)
      types.push_back(type == LayerType::kFullAttention ? "full_attention" : "linear_attention");
    json["layer_types"] = types;
    json["linear_num_key_heads"] = config.linear.key_heads;
    json["linear_num_value_heads"] = config.linear.value_heads;
    json["linear_key_head_dim"] = config.linear.key_dim;
    json["linear_value_head_dim"] = config.linear.value_dim;
    json["linear_conv_kernel_dim"] = config.linear.conv_kernel;
  }
  if (family->sparse) {
    json["num_experts"] = config.moe.experts;
    json["num_experts_per_tok"] = config.moe.choices;
    json["moe_intermediate_size"] = config.moe.intermediate_size;
    if (family->shared_expert)
      json["shared_expert_intermediate_size"] = config.moe.shared_intermediate_size;
    json["norm_topk_prob"] = config.moe.normalize;
    json["router_aux_loss_coef"] = config.moe.aux_loss_coef;
    std::vector<int64_t> dense;
    for (size_t layer = 0; layer < config.sparse_layers.size(); ++layer)
      if (!config.sparse_layers[layer]) dense.push_back(static_cast<int64_t>(layer));
    json["mlp_only_layers"] = dense;
  }
  if (config.pad_token_id >= 0) json["pad_token_id"] = config.pad_token_id;
  return json.dump(2) + "\n";
}

}  // namespace zorro
