// Chooses the kernels once per process.
#include "kernels.h"
#include "op_base.h"
#include <cstdlib>

namespace moec {
namespace {

#ifdef MOEC_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

const Kernels *find(const std::string &wanted) {
#ifdef MOEC_X86
  if ((wanted.empty() || wanted == "avx512") && has_avx512())
    return &avx512_kernels();
  if ((wanted.empty() || wanted == "avx2") && has_avx2())
    return &avx2_kernels();
#endif
  return wanted.empty() || wanted == "portable" ? &portable_kernels() : nullptr;
}

} // namespace

const Kernels &kernels() {
  static const Kernels *chosen = [] {
    const char *wanted = std::getenv("MOEC_CPU_ISA");
    const Kernels *found = find(wanted ? wanted : "");
    if (!found)
      throw Error(std::string("MOEC_CPU_ISA=") + wanted +
                  ": unknown or not supported by this CPU "
                  "(portable, avx2, avx512)");
    return found;
  }();
  return *chosen;
}

} // namespace moec

// Null when MOEC_CPU_ISA names kernels that this CPU cannot run.
extern "C" __attribute__((visibility("default"))) const char *moec_cpu_isa() {
  try {
    return moec::kernels().name;
  } catch (const moec::Error &) {
    return nullptr;
  }
}
