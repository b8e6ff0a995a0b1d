// The Walsh-Hadamard transform of V, in vectors. Included only by kernels_*.cpp. It makes the sums and
// differences of moec/reference/kv_block.py, each rounded once: the same bits.
#pragma once
#include "kernels.h"
#include <cmath>

namespace moec {
namespace {

struct ButterflySigns {
  alignas(64) float value[4][16] = {}; // of strides 1, 2, 4, 8: +1 where a lane becomes a + b, -1 where a - b
  constexpr ButterflySigns() {
    for (int k = 0; k < 4; ++k)
      for (int lane = 0; lane < 16; ++lane)
        value[k][lane] = lane >> k & 1 ? -1.0f : 1.0f;
  }
};
constexpr ButterflySigns kSigns; // no initializer that runs: it would have this file's instructions

// The strides within a vector: the lane that is a stride away, plus or minus the own one.
template <class S> typename S::F butterflies_within(typename S::F x) {
  x = S::fma(x, S::load(kSigns.value[0]), S::template swap<1>(x));
  x = S::fma(x, S::load(kSigns.value[1]), S::template swap<2>(x));
  x = S::fma(x, S::load(kSigns.value[2]), S::template swap<4>(x));
  if constexpr (S::kWidth > 8)
    x = S::fma(x, S::load(kSigns.value[3]), S::template swap<8>(x));
  return x;
}

template <class S> void rotate_vectors(float *x, int count, typename S::F norm) {
  typename S::F v[KvLayout::kBlockTokens / S::kWidth]; // a group has at most 64 elements
  for (int i = 0; i < count; ++i)
    v[i] = butterflies_within<S>(S::load(x + i * S::kWidth));
  for (int stride = 1; stride < count; stride *= 2)
    for (int base = 0; base < count; base += 2 * stride)
      for (int i = base; i < base + stride; ++i) {
        const typename S::F a = v[i], b = v[i + stride];
        v[i] = S::add(a, b);
        v[i + stride] = S::sub(a, b);
      }
  for (int i = 0; i < count; ++i)
    S::store(x + i * S::kWidth, S::mul(v[i], norm));
}

void rotate_scalars(float *x, int group, float norm) {
  for (int stride = 1; stride < group; stride *= 2)
    for (int base = 0; base < group; base += 2 * stride)
      for (int i = base; i < base + stride; ++i) {
        const float a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
  for (int i = 0; i < group; ++i)
    x[i] *= norm;
}

template <class S> void rotate(float *x, int count, int group) {
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(group)));
  for (float *end = x + count; x < end; x += group)
    if (group >= S::kWidth)
      rotate_vectors<S>(x, group / S::kWidth, S::set1(norm));
    else
      rotate_scalars(x, group, norm);
}

} // namespace
} // namespace moec
