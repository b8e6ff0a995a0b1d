#include "device.h"
#include "launchers.h"

namespace moec::kernels {

#if defined(__CUDACC__)
__device__ int32_t error_word;

int32_t *default_error_flag() {
  void *address = nullptr;
  return cudaGetSymbolAddress(&address, error_word) == cudaSuccess ? static_cast<int32_t *>(address)
                                                                   : nullptr;
}
#else
static int32_t error_word;

int32_t *default_error_flag() {
  return &error_word;
}
#endif

} // namespace moec::kernels
