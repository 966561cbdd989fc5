// Any bytes as a safetensors file: tensors that can be read to the last byte, or one of our errors.
#include <ATen/core/Tensor.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "zorro/core/error.h"
#include "zorro/io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int file = memfd_create("fuzz", MFD_CLOEXEC);
  ZORRO_ASSERT(file >= 0 && write(file, data, size) == static_cast<ssize_t>(size));
  try {
    const auto opened = zorro::SafetensorsFile::open("/proc/self/fd/" + std::to_string(file));
    volatile uint8_t sink = 0;
    for (const std::string& name : opened.names()) {
      const at::Tensor tensor = opened.tensor(name);
      const auto* bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
      for (size_t i = 0; i < tensor.nbytes(); ++i) sink = static_cast<uint8_t>(sink + bytes[i]);
    }
  } catch (const zorro::CheckpointError&) {
  }
  close(file);
  return 0;
}
