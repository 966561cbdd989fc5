#include "models/tensor_names.h"

#include <set>
#include <string_view>

namespace zorro {
namespace {

bool strip(std::string& name, std::string_view prefix, std::string_view instead) {
  if (!name.starts_with(prefix)) return false;
  name.replace(0, prefix.size(), instead);
  return true;
}

constexpr std::string_view kGateUp = "experts.gate_up_proj", kDown = "experts.down_proj";

/// The names of one expert's matrices, whichever the file uses.
void add_expert(const Weight& weight, const std::string& layer, int64_t expert, bool is_joined,
                std::map<std::string, FilePart>& parts) {
  const std::string prefix = layer + "experts." + std::to_string(expert) + ".";
  if (!weight.name.ends_with(kGateUp)) {
    parts[prefix + "down_proj.weight"] = {&weight, expert, 0, -1};
    return;
  }
  if (is_joined) {
    parts[prefix + "gate_up_proj.weight"] = {&weight, expert, 0, -1};
    return;
  }
  const int64_t half = weight.shape[1] / 2;
  parts[prefix + "gate_proj.weight"] = {&weight, expert, 0, half};
  parts[prefix + "up_proj.weight"] = {&weight, expert, half, half};
}

}  // namespace

std::string without_wrapper(const std::string& name) {
  std::string bare = name;
  if (strip(bare, "language_model.model.", "model.")) return bare;
  if (strip(bare, "language_model.lm_head.", "lm_head.")) return bare;
  while (strip(bare, "model.language_model.", "model.")) {
  }
  return bare;
}

bool is_untouched(const std::string& name) {
  if (name.starts_with("mtp.") || name.starts_with("visual.")) return true;
  return name.find(".visual.") != std::string::npos;
}

bool is_forgotten(const std::string& name) {
  constexpr std::string_view kSuffix = ".rotary_emb.inv_freq";
  return name.size() > kSuffix.size() && name.ends_with(kSuffix);
}

std::vector<int64_t> FilePart::shape() const {
  if (expert < 0) return weight->shape;
  return {rows < 0 ? weight->shape[1] : rows, weight->shape[2]};
}

at::Tensor FilePart::view(const at::Tensor& whole) const {
  if (expert < 0) return whole;
  const at::Tensor matrix = whole.select(0, expert);
  return rows < 0 ? matrix : matrix.narrow(0, row_begin, rows);
}

std::map<std::string, FilePart> file_parts(const std::vector<Weight>& weights,
                                           const std::vector<std::string>& names) {
  std::set<std::string> bare;
  for (const std::string& name : names) bare.insert(without_wrapper(name));
  std::map<std::string, FilePart> parts;
  for (const Weight& weight : weights) {
    const bool is_stack = weight.name.ends_with(kGateUp) || weight.name.ends_with(kDown);
    const std::string layer = weight.name.substr(0, weight.name.rfind("experts."));
    const bool one_by_one = is_stack && bare.count(weight.name) == 0 &&
                            bare.count(layer + "experts.0.down_proj.weight") != 0;
    if (!one_by_one) {
      parts[weight.name] = {&weight, -1, 0, -1};
      continue;
    }
    const bool is_joined = bare.count(layer + "experts.0.gate_up_proj.weight") != 0;
    for (int64_t expert = 0; expert < weight.shape[0]; ++expert)
      add_expert(weight, layer, expert, is_joined, parts);
  }
  return parts;
}

}  // namespace zorro
