// Any bytes as config.json: a config or one of our errors, nothing else.
#include <cstdint>
#include <string_view>

#include "zorro/core/error.h"
#include "zorro/io/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const zorro::ModelConfig config = zorro::parse_model_config(text, "fuzz");
    // What was accepted must be accepted again after a round trip.
    zorro::parse_model_config(zorro::to_json(config), "round trip");
  } catch (const zorro::CheckpointError&) {
  } catch (const zorro::NotSupported&) {
  }
  return 0;
}
