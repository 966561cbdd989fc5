#include <algorithm>
#include <iostream>

#include "commands.h"
#include "memory.h"
#include "report.h"
#include "zorro/core/progress.h"
#include "zorro/io/safetensors.h"

namespace zorro::app {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

Json config_json(const ModelConfig& config) {
  return {{"family", config.model_type},
          {"layers", config.num_layers},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"query_heads", config.num_query_heads},
          {"kv_heads", config.num_kv_heads},
          {"head_dim", config.head_dim},
          {"vocab_size", config.vocab_size},
          {"max_positions", config.max_positions},
          {"rope_theta", config.rope.theta},
          {"rms_norm_eps", config.rms_norm_eps},
          {"attention_bias", config.attention_bias},
          {"tied_embeddings", config.tie_word_embeddings},
          {"config_dtype", config.dtype}};
}

Json tensor_rows(const CheckpointFolder& folder, int64_t& parameters, int64_t& bytes) {
  Json rows = Json::array();
  for (const std::string& name : folder.names()) {
    const SafetensorsFile::Entry& entry = folder.entry(name);
    int64_t count = 1;
    for (const int64_t size : entry.shape) count *= size;
    parameters += count;
    bytes += entry.bytes;
    rows.push_back({{"name", name},
                    {"shape", entry.shape},
                    {"dtype", c10::toString(entry.dtype)},
                    {"bytes", entry.bytes}});
  }
  return rows;
}

void print_tensors(const CheckpointFolder& folder) {
  Table table({"tensor", "shape", "dtype", "bytes"});
  for (const std::string& name : folder.names()) {
    const SafetensorsFile::Entry& entry = folder.entry(name);
    table.add(
        {name, shape_text(entry.shape), c10::toString(entry.dtype), with_thousands(entry.bytes)});
  }
  table.print();
}

int run_inspect(const CommonOptions& options) {
  const ModelConfig config = read_model_config(options.model);
  const CheckpointFolder folder = CheckpointFolder::open(options.model);
  int64_t parameters = 0, bytes = 0;
  Json tensors = tensor_rows(folder, parameters, bytes);
  Json json = config_json(config);
  json["stored_parameters"] = parameters;
  json["stored_bytes"] = bytes;
  json["shards"] = folder.shards().size();
  if (options.json) {
    json["tensors"] = std::move(tensors);
    print_json(json);
    return 0;
  }
  for (const auto& [key, value] : json.items()) {
    std::string label = key;
    std::replace(label.begin(), label.end(), '_', ' ');
    std::cout << label << ": " << (value.is_string() ? value.get<std::string>() : value.dump())
              << "\n";
  }
  std::cout << "\n";
  print_tensors(folder);
  return 0;
}

}  // namespace

void add_inspect_command(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("inspect", "Family, sizes and tensors of a model folder");
  auto options = std::make_shared<CommonOptions>();
  add_model_option(*command, *options, true);
  command->add_flag("--json", options->json, "Print one JSON object on stdout");
  command->footer("Example:\n  zorro inspect --model DIR");
  command->callback([options, &run] { run = [options] { return run_inspect(*options); }; });
}

}  // namespace zorro::app
