// CUDA C++ on the CPU with SIMT semantics, for numeric tests without a GPU.
//
// Include this instead of the CUDA headers and compile a kernel with any C++17 compiler. It provides the
// keywords, threadIdx and friends, barriers, warp collectives, atomics, cp.async under the names of
// cuda_pipeline_primitives.h, and mma.m16n8k16. It finds missing waits and barriers (poison and three
// schedules), divergent collectives, deadlocks, and writes past dynamic shared memory. It does not model
// memory ordering between blocks (they run one after another) nor bank conflicts or time.
#pragma once
#include <cmath>

#include "scheduler.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (simt::self->index)
#define blockIdx (simt::machine.block_index)
#define blockDim (simt::machine.block)
#define gridDim (simt::machine.grid)
constexpr int warpSize = 32;

using std::max;
using std::min;

// --- block barriers
// -----------------------------------------------------------------------------------------------
inline void __syncthreads() {
  simt::wait_barrier(0, 0, 0, "__syncthreads");
}
inline int __syncthreads_count(int p) {
  return simt::wait_barrier(0, 0, p != 0, "__syncthreads_count");
}
inline int __syncthreads_or(int p) {
  return simt::wait_barrier(0, 0, p != 0, "__syncthreads_or") != 0;
}
inline int __syncthreads_and(int p) {
  return simt::wait_barrier(0, 0, p == 0, "__syncthreads_and") == 0;
}

// --- warp collectives
// ---------------------------------------------------------------------------------------------
namespace simt {
template <class V> inline V read_slot(Slots slots, int lane) {
  V value;
  memcpy(&value, slots[lane], sizeof value);
  return value;
}

// Lane `source` of the segment [first, first + width) or, outside of it, the own value, as the hardware does.
template <class V> inline V shuffle(unsigned mask, V value, int source, int width, const char *operation) {
  const int first = self->lane & ~(width - 1);
  Slots slots = exchange(mask, value, operation);
  if (source < first || source >= first + width)
    source = self->lane;
  if (!(mask >> source & 1))
    fail("%s reads lane %d, which is outside mask %08x", operation, source, mask);
  return read_slot<V>(slots, source);
}

template <class V, class F> inline V reduce(unsigned mask, V value, const char *operation, F combine) {
  Slots slots = exchange(mask, value, operation);
  V result = value;
  for (int lane = 0; lane < 32; lane++)
    if ((mask >> lane & 1) && lane != self->lane)
      result = combine(result, read_slot<V>(slots, lane));
  return result;
}
} // namespace simt

inline void __syncwarp(unsigned mask = ~0u) {
  simt::exchange(mask, 0, "__syncwarp");
}
template <class V> inline V __shfl_sync(unsigned mask, V v, int source, int width = 32) {
  const int first = simt::self->lane & ~(width - 1);
  return simt::shuffle(mask, v, first + (source & (width - 1)), width, "__shfl_sync");
}
template <class V> inline V __shfl_xor_sync(unsigned mask, V v, int x, int width = 32) {
  return simt::shuffle(mask, v, simt::self->lane ^ x, width, "__shfl_xor_sync");
}
template <class V> inline V __shfl_down_sync(unsigned mask, V v, int d, int width = 32) {
  return simt::shuffle(mask, v, simt::self->lane + d, width, "__shfl_down_sync");
}
template <class V> inline V __shfl_up_sync(unsigned mask, V v, int d, int width = 32) {
  return simt::shuffle(mask, v, simt::self->lane - d, width, "__shfl_up_sync");
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  const unsigned own = p ? 1u << simt::self->lane : 0u;
  return simt::reduce(mask, own, "__ballot_sync", [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int p) {
  return __ballot_sync(mask, p) != 0;
}
inline int __all_sync(unsigned mask, int p) {
  return __ballot_sync(mask, !p) == 0;
}
template <class V> inline V __reduce_add_sync(unsigned mask, V v) {
  return simt::reduce(mask, v, "__reduce_add_sync", [](V a, V b) { return a + b; });
}
template <class V> inline V __reduce_max_sync(unsigned mask, V v) {
  return simt::reduce(mask, v, "__reduce_max_sync", [](V a, V b) { return a > b ? a : b; });
}
template <class V> inline V __reduce_min_sync(unsigned mask, V v) {
  return simt::reduce(mask, v, "__reduce_min_sync", [](V a, V b) { return a < b ? a : b; });
}

// --- memory
// -------------------------------------------------------------------------------------------------------
template <class V> inline V __ldg(const V *p) {
  return *p;
}
template <class V> inline V __ldcs(const V *p) {
  return *p;
}
template <class V> inline V __ldcg(const V *p) {
  return *p;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace simt {
template <class V, class F> inline V atomic_update(V *p, F next) {
  const V old = *p; // threads switch at barriers only, so a plain update is atomic
  *p = next(old);
  return old;
}
} // namespace simt
template <class V> inline V atomicAdd(V *p, V v) {
  return simt::atomic_update(p, [=](V old) { return static_cast<V>(old + v); });
}
template <class V> inline V atomicMax(V *p, V v) {
  return simt::atomic_update(p, [=](V old) { return old > v ? old : v; });
}
template <class V> inline V atomicMin(V *p, V v) {
  return simt::atomic_update(p, [=](V old) { return old < v ? old : v; });
}
template <class V> inline V atomicOr(V *p, V v) {
  return simt::atomic_update(p, [=](V old) { return old | v; });
}
template <class V> inline V atomicExch(V *p, V v) {
  return simt::atomic_update(p, [=](V) { return v; });
}
template <class V> inline V atomicCAS(V *p, V expected, V v) {
  return simt::atomic_update(p, [=](V old) { return old == expected ? v : old; });
}

// --- cp.async
// ----------------------------------------------------------------------------------------------------- The
// bytes are read now, as a GPU may, and appear at the wait, as a GPU may: in between the destination is
// poison.
inline void __pipeline_memcpy_async(void *destination, const void *source, size_t size,
                                    size_t zero_fill = 0) {
  if (size != 4 && size != 8 && size != 16)
    simt::fail("cp.async of %zu bytes: only 4, 8 and 16 exist", size);
  if ((reinterpret_cast<uintptr_t>(destination) | reinterpret_cast<uintptr_t>(source)) % size)
    simt::fail("cp.async of %zu bytes is misaligned", size);
  simt::AsyncCopy copy{destination, {0}, size};
  memcpy(copy.bytes, source, size - zero_fill);
  memset(destination, 0xFF, size);
  simt::self->open_copies.push_back(copy);
}
inline void __pipeline_commit() {
  simt::self->copy_groups.push_back(std::move(simt::self->open_copies));
  simt::self->open_copies.clear();
}
inline void __pipeline_wait_prior(size_t pending) {
  auto &groups = simt::self->copy_groups;
  const size_t done = groups.size() > pending ? groups.size() - pending : 0;
  for (size_t i = 0; i < done; i++)
    simt::finish_copies(groups[i]);
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(done));
}

#include "mma.h"

#define MOEC_DYN_SMEM(type, name) type *name = reinterpret_cast<type *>(simt::machine.shared)
#define MOEC_LAUNCH(kernel, grid, block, smem, stream, ...)                                                  \
  (static_cast<void>(stream), simt::launch(grid, block, smem, [&] { kernel(__VA_ARGS__); }))
