#pragma once

#include <map>
#include <string>
#include <vector>

#include "zorro/nn/mixer.h"

// Which tensor of a file is which weight, or which part of one.
namespace zorro {

/// A name of a file without what wrappers put before it (model.language_model., language_model.).
std::string without_wrapper(const std::string& name);

/// Whether a tensor belongs to a part that a text decoder does not run (vision, multi-token
/// prediction): carried through a save as it is. docs/architecture.md.
bool is_untouched(const std::string& name);

/// Buffers that old checkpoints carry and nobody needs.
bool is_forgotten(const std::string& name);

/// One tensor of a file: the weight that it fills, or the part of an expert stack.
struct FilePart {
  const Weight* weight = nullptr;
  int64_t expert = -1;               ///< -1: the whole weight
  int64_t row_begin = 0, rows = -1;  ///< of the expert's matrix; -1: all
  std::vector<int64_t> shape() const;
  /// The part of a tensor of the weight's shape.
  at::Tensor view(const at::Tensor& whole) const;
};

/// The parts by their names without wrapper. `names` are those of the file: experts may be stacked,
/// one by one, or one by one with gate and up joined.
std::map<std::string, FilePart> file_parts(const std::vector<Weight>& weights,
                                           const std::vector<std::string>& names);

}  // namespace zorro
