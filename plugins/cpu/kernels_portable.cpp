// The kernels for any CPU.
#include "simd_portable.h"
// clang-format off: the kernels need the SIMD type first
#include "kernel_table.h"
// clang-format on

namespace moec {

const Kernels &portable_kernels() {
  static const Kernels table = make_kernels<Portable, Portable>("portable");
  return table;
}

} // namespace moec
