// The kernels for CPUs with AVX2, FMA and F16C; compiled with those enabled.
#include "simd_avx2.h"
// clang-format off: the kernels need the SIMD type first
#include "kernel_table.h"
// clang-format on

namespace moec {

const Kernels &avx2_kernels() {
  static const Kernels table = make_kernels<Avx2, Avx2>("avx2");
  return table;
}

} // namespace moec
