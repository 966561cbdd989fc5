#include "zorro/io/model_config.h"

#include <fstream>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

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

/// The dictionary of the old layout if it says anything, else that of the new one, else nothing.
RopeConfig read_rope(const Reader& reader) {
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
  reader.refuse_if(result.type != "default", "rope_type", "must be default, got \"", result.type,
                   "\". RoPE scaling is not written yet.");
  result.theta = rope.number("rope_theta", reader.number("rope_theta", 10000.0));
  if (!(result.theta > 0)) reader.bad("rope_theta", "must be > 0, got ", result.theta, ".");
  return result;  // partial_rotary_factor is not read by the dense families
}

void refuse_unsupported(const Reader& reader) {
  reader.refuse_if(reader.find("quantization_config") != nullptr, "quantization_config",
                   "is not supported: load a checkpoint with plain weights.");
  const std::string activation = reader.text("hidden_act", "silu");
  reader.refuse_if(activation != "silu", "hidden_act", "must be silu, got \"", activation, "\".");
  const double dropout = reader.number("attention_dropout", 0);
  reader.refuse_if(dropout != 0, "attention_dropout", "must be 0, got ", dropout, ".");
  reader.refuse_if(
      reader.flag("use_sliding_window", false) && reader.find("sliding_window") != nullptr,
      "use_sliding_window", "must be false: the sliding window is not written yet.");
  const Json* types = reader.find("layer_types");
  if (types == nullptr) return;
  if (!types->is_array()) reader.bad("layer_types", "must be a list, got ", types->dump(), ".");
  for (const Json& type : *types)
    reader.refuse_if(type != "full_attention", "layer_types", "must all be full_attention, got ",
                     type.dump(), ".");
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
  const Reader reader(json, where);
  ModelConfig config;
  config.model_type = reader.text("model_type", "");
  if (config.model_type.empty()) reader.bad("model_type", "must be there, got nothing.");
  reader.refuse_if(config.model_type != "qwen3", "model_type", "must be qwen3, got \"",
                   config.model_type, "\". This family is not written yet.");
  refuse_unsupported(reader);
  config.vocab_size = reader.size("vocab_size", 151936);
  config.hidden_size = reader.size("hidden_size", 4096);
  config.intermediate_size = reader.size("intermediate_size", 22016);
  config.num_layers = reader.size("num_hidden_layers", 32);
  config.num_query_heads = reader.size("num_attention_heads", 32);
  config.num_kv_heads = reader.size("num_key_value_heads", config.num_query_heads);
  config.head_dim = reader.size("head_dim", 128);
  config.max_positions = reader.size("max_position_embeddings", 32768);
  config.rms_norm_eps = reader.number("rms_norm_eps", 1e-6);
  config.attention_bias = reader.flag("attention_bias", false);
  config.tie_word_embeddings = reader.flag("tie_word_embeddings", false);
  config.dtype = read_dtype(reader);
  config.rope = read_rope(reader);
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

std::string to_json(const ModelConfig& config) {
  nlohmann::ordered_json json = {{"architectures", {"Qwen3ForCausalLM"}},
                                 {"model_type", config.model_type},
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
                                 {"rope_theta", config.rope.theta},
                                 {"rope_scaling", nullptr},
                                 {"torch_dtype", config.dtype}};
  if (config.pad_token_id >= 0) json["pad_token_id"] = config.pad_token_id;
  return json.dump(2) + "\n";
}

}  // namespace zorro
