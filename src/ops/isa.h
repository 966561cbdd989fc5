#pragma once

#include <ATen/Version.h>

#include <string>

namespace zorro {

/// Instruction sets that CPU kernels exist for; all give the same numbers up to rounding.
enum class Isa { kBaseline, kAvx2, kAvx512 };

/// ATen's own choice, which a user may lower by ATEN_CPU_CAPABILITY.
inline Isa cpu_isa() {
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return Isa::kAvx512;
  if (capability == "AVX2") return Isa::kAvx2;
  return Isa::kBaseline;
}

}  // namespace zorro
