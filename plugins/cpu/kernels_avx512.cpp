// The kernels for CPUs with AVX-512 (F, BW, DQ, VL, VNNI); compiled with those enabled.
#include "simd_avx512.h"
// clang-format off: the kernels need the SIMD type first
#include "dense_avx512.h"
#include "kernel_table.h"
// clang-format on

namespace moec {

const Kernels &avx512_kernels() {
  static const Kernels table = [] {
    Kernels k = make_kernels<Avx512, Avx512Narrow>("avx512");
    k.dense4 = dense_by_pairs<4>;
    k.dense8 = dense_by_pairs<8>;
    return k;
  }();
  return table;
}

} // namespace moec
