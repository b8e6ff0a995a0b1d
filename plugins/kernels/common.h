// Arithmetic that host plans and device code share.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define MOEC_HD __host__ __device__ __forceinline__
#else
#define MOEC_HD inline
#endif

namespace moec::kernels {

MOEC_HD int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}
MOEC_HD size_t align_up(size_t v, size_t multiple) {
  return (v + multiple - 1) / multiple * multiple;
}
MOEC_HD int at_least_zero(int v) {
  return v < 0 ? 0 : v;
}
MOEC_HD int smaller(int a, int b) {
  return a < b ? a : b;
}
MOEC_HD int larger(int a, int b) {
  return a > b ? a : b;
}

} // namespace moec::kernels
