// What every kernel includes: CUDA under nvcc, the SIMT emulator under a host compiler.
#pragma once
#include "common.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define MOEC_DYN_SMEM(type, name)                                                                            \
  extern __shared__ __align__(128) unsigned char moec_dynamic_smem[];                                        \
  type *name = reinterpret_cast<type *>(moec_dynamic_smem)
#define MOEC_LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
// Three CTAs an SM hide enough latency here; asking for no more keeps ptxas from spilling to get them.
#define MOEC_KERNEL __launch_bounds__(128, 3)
#define MOEC_DEVICE __device__ __forceinline__
#else
#include "simt/simt.h"
#define MOEC_KERNEL
#define MOEC_DEVICE inline
#endif

// Tests compile the kernels with one of these numbers to see the mistake found; 0 in every product build.
#if !defined(MOEC_PLANT_BUG)
#define MOEC_PLANT_BUG 0
#endif
#define MOEC_BUG(n) (MOEC_PLANT_BUG == (n))

namespace moec::kernels {

constexpr int kThreads = 128; // of every kernel, as in MOEC_KERNEL
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

MOEC_DEVICE float load(const float *p) {
  return *p;
}
MOEC_DEVICE float load(const __half *p) {
  return __half2float(*p);
}
MOEC_DEVICE float load(const __nv_bfloat16 *p) {
  return __bfloat162float(*p);
}
MOEC_DEVICE void store(float *p, float v) {
  *p = v;
}
MOEC_DEVICE void store(__half *p, float v) {
  *p = __float2half_rn(v);
}
MOEC_DEVICE void store(__nv_bfloat16 *p, float v) {
  *p = __float2bfloat16_rn(v);
}

MOEC_DEVICE float warp_sum(float v) {
  for (int offset = 16; offset > (MOEC_BUG(6) ? 1 : 0); offset >>= 1)
    v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
}
MOEC_DEVICE float warp_max(float v) {
  for (int offset = 16; offset; offset >>= 1)
    v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, offset));
  return v;
}

inline dim3 grid_of(int x, int y, int z) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

// The status of the launches so far on this thread, as cudaError_t.
inline int launch_status() {
#if defined(__CUDACC__)
  return static_cast<int>(cudaGetLastError());
#else
  return 0;
#endif
}
constexpr int kInvalidValue = 1; // cudaErrorInvalidValue

} // namespace moec::kernels
