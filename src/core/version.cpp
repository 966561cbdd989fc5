#include "zorro/core/version.h"

namespace zorro {

const char* version() { return ZORRO_VERSION; }

}  // namespace zorro
