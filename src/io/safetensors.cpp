#include "zorro/io/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "io/atomic_file.h"
#include "io/json_text.h"
#include "io/mapping.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLongestHeader = 100'000'000;
constexpr size_t kLengthBytes = 8;

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
};
constexpr std::array<DtypeName, 10> kDtypes = {{{"F64", at::kDouble},
                                                {"F32", at::kFloat},
                                                {"F16", at::kHalf},
                                                {"BF16", at::kBFloat16},
                                                {"I64", at::kLong},
                                                {"I32", at::kInt},
                                                {"I16", at::kShort},
                                                {"I8", at::kChar},
                                                {"U8", at::kByte},
                                                {"BOOL", at::kBool}}};

template <typename... Parts>
[[noreturn]] void fail(const std::filesystem::path& path, const Parts&... what) {
  throw CheckpointError(concat("[safetensors] ", path.string(), ": ", what...));
}

uint64_t read_length(const FileMapping& mapping) {
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i)
    length |= static_cast<uint64_t>(mapping.data()[i]) << (8 * i);
  return length;
}

std::string_view header_text(const std::filesystem::path& path, const FileMapping& mapping) {
  const auto* text = reinterpret_cast<const char*>(mapping.data());
  if (std::string_view(text, mapping.size()).starts_with("version https://git-lfs"))
    fail(path, "is a Git LFS pointer, not the weights. Fetch them with git lfs pull.");
  if (mapping.size() < kLengthBytes)
    fail(path, "must begin with an 8-byte header length, got ", mapping.size(), " bytes.");
  const uint64_t length = read_length(mapping);
  if (length > kLongestHeader)
    fail(path, "header must have at most ", kLongestHeader, " bytes, got ", length, ".");
  if (length > mapping.size() - kLengthBytes)
    fail(path, "header must lie in the file, got ", length, " bytes of header in ", mapping.size(),
         " bytes. The file is cut.");
  const std::string_view header(text + kLengthBytes, length);
  if (!header.starts_with('{')) fail(path, "header must begin with '{'.");
  return header;
}

/// a * b, or a failure that names the tensor.
int64_t product(const std::filesystem::path& path, const std::string& name, int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) fail(path, "tensor \"", name, "\" is too large.");
  return result;
}

int64_t integer(const std::filesystem::path& path, const std::string& name, const Json& value,
                const char* what) {
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail(path, "tensor \"", name, "\": ", what, " must be a non-negative integer, got ",
         value.dump(), ".");
  return static_cast<int64_t>(value.get<uint64_t>());
}

at::ScalarType dtype_of(const std::filesystem::path& path, const std::string& name,
                        const Json& value) {
  const auto* text = value.is_string() ? &value.get_ref<const std::string&>() : nullptr;
  const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& dtype) {
    return text != nullptr && *text == dtype.name;
  });
  if (found == kDtypes.end())
    fail(path, "tensor \"", name, "\": dtype ", value.dump(), " is not supported.");
  return found->dtype;
}

/// One tensor's header entry; the offset still counts from the end of the header.
SafetensorsFile::Entry parse_entry(const std::filesystem::path& path, const std::string& name,
                                   const Json& value) {
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
      !value.contains("shape") || !value.contains("data_offsets") || !value["shape"].is_array() ||
      !value["data_offsets"].is_array() || value["data_offsets"].size() != 2)
    fail(path, "tensor \"", name, "\" must have dtype, shape and two data_offsets.");
  SafetensorsFile::Entry entry{dtype_of(path, name, value["dtype"]), {}, 0, 0};
  auto bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  for (const Json& size : value["shape"]) {
    entry.shape.push_back(integer(path, name, size, "shape"));
    bytes = product(path, name, bytes, entry.shape.back());
  }
  entry.offset = integer(path, name, value["data_offsets"][0], "data_offsets");
  const int64_t end = integer(path, name, value["data_offsets"][1], "data_offsets");
  entry.bytes = end - entry.offset;
  if (entry.bytes != bytes)
    fail(path, "tensor \"", name, "\": data_offsets must span ", bytes,
         " bytes by dtype and shape, got ", entry.bytes, ".");
  return entry;
}

/// Tensors must tile the data buffer: no hole, no overlap, nothing after the last one.
void check_tiling(const std::filesystem::path& path,
                  const std::map<std::string, SafetensorsFile::Entry>& entries,
                  const std::vector<std::string>& names, size_t data_bytes) {
  int64_t end = 0;
  for (const std::string& name : names) {
    const SafetensorsFile::Entry& entry = entries.at(name);
    if (entry.offset != end)
      fail(path, "tensor \"", name, "\" must begin at byte ", end, " of the data, got ",
           entry.offset, ". Tensors must leave no hole and not overlap.");
    end += entry.bytes;
    if (static_cast<uint64_t>(end) > data_bytes)
      fail(path, "tensor \"", name, "\" must end within ", data_bytes, " bytes of data, got ", end,
           ". The file is cut.");
  }
  if (static_cast<uint64_t>(end) != data_bytes)
    fail(path, "must end with its last tensor at byte ", end, " of the data, got ", data_bytes,
         " bytes.");
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile file;
  file.path_ = path;
  file.mapping_ = std::make_shared<const FileMapping>(path);
  const std::string_view header = header_text(path, *file.mapping_);
  Json json;
  try {
    json = parse_json(header);
  } catch (const std::invalid_argument& error) {
    fail(path, "header is not valid JSON: ", error.what(), ".");
  }
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      file.entries_.emplace(name, parse_entry(path, name, value));
      file.names_.push_back(name);
      continue;
    }
    if (!value.is_object()) fail(path, "__metadata__ must be an object of strings.");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) fail(path, "__metadata__[\"", key, "\"] must be a string.");
      file.metadata_[key] = text.get<std::string>();
    }
  }
  std::sort(file.names_.begin(), file.names_.end(), [&](const auto& a, const auto& b) {
    const Entry &x = file.entries_.at(a), &y = file.entries_.at(b);
    return std::tie(x.offset, x.bytes, a) < std::tie(y.offset, y.bytes, b);
  });
  const size_t data_begin = kLengthBytes + header.size();
  check_tiling(path, file.entries_, file.names_, file.mapping_->size() - data_begin);
  for (auto& [name, entry] : file.entries_) entry.offset += static_cast<int64_t>(data_begin);
  return file;
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail(path_, "has no tensor \"", name, "\".");
  return found->second;
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const Entry& found = entry(name);
  const std::byte* data = mapping_->data() + found.offset;
  const at::TensorOptions options = at::TensorOptions().dtype(found.dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(data) % c10::elementSize(found.dtype) == 0;
  if (!aligned || found.bytes == 0) {
    at::Tensor copy = at::empty(found.shape, options);
    if (found.bytes > 0)
      std::memcpy(copy.mutable_data_ptr(), data, static_cast<size_t>(found.bytes));
    return copy;
  }
  // The mapping is read-only memory; from_blob has no const form. The view keeps the mapping alive.
  return at::from_blob(
      const_cast<std::byte*>(data), found.shape, [keep = mapping_](void*) mutable { keep.reset(); },
      options);
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  NamedTensors sorted = tensors;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    const auto size = [](const at::Tensor& x) { return c10::elementSize(x.scalar_type()); };
    return std::make_pair(size(b.second), a.first) < std::make_pair(size(a.second), b.first);
  });
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const auto& [name, tensor] : sorted) {
    const auto* dtype = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& known) {
      return known.dtype == tensor.scalar_type();
    });
    if (dtype == kDtypes.end())
      fail(path, "tensor \"", name, "\": dtype ", tensor.scalar_type(), " cannot be written.");
    if (header.contains(name)) fail(path, "tensor \"", name, "\" must be given once.");
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    header[name] = {{"dtype", dtype->name},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.empty() ? "{}" : header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');

  try {
    AtomicFile file(path);
    std::array<unsigned char, kLengthBytes> length{};
    for (size_t i = 0; i < kLengthBytes; ++i)
      length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
    file.write(length.data(), length.size());
    file.write(text.data(), text.size());
    for (const auto& [name, tensor] : sorted) {
      const at::Tensor flat = tensor.detach().cpu().contiguous();
      file.write(flat.const_data_ptr(), flat.nbytes());
    }
    file.commit();
  } catch (const std::filesystem::filesystem_error& error) {
    fail(path, "could not be written: ", error.code().message(), ".");
  }
}

}  // namespace zorro
