#pragma once

namespace zorro {

/// The library's version, "major.minor.patch".
const char* version();

}  // namespace zorro
