#pragma once

#include "zorro/train/arms.h"

namespace zorro::app {

/// Tells malloc to keep big blocks instead of returning their pages after every tensor. First thing
/// in main.
void keep_freed_memory();

/// Counts the bytes of CPU tensors from the first call on, in this process.
MemoryProbe tensor_memory();

/// "3.2 MiB".
std::string bytes_text(int64_t bytes);

}  // namespace zorro::app
