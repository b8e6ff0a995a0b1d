// Dense layers: rows of 4- or 8-bit codes times a few vectors of int8, written once over a SIMD type S of
// eight lanes. Included only by kernels_*.cpp.
//
// As in gemv_kernels.h a (row, vector) pair runs through the same additions however many share a pass.
#pragma once
#include "gemv_kernels.h"
#include <cmath>
#include <limits>

namespace moec {
namespace {

inline void quantize_int8_group(const float *x, int8_t *split, int8_t *plain, float *scale, int *sum) {
  float top = 1e-35f;
  int bad = 0;
  for (int i = 0; i < kGroup; ++i) {
    const float a = std::fabs(x[i]);
    top = a > top ? a : top;
    bad |= !(a <= std::numeric_limits<float>::max());
  }
  const float step = top / 127.0f;
  *scale = bad ? std::numeric_limits<float>::quiet_NaN() : step;
  int total = 0;
  for (int i = 0; i < kGroup; ++i) {
    const int code = bad ? 0 : static_cast<int>(round_even(x[i] / step));
    plain[i] = static_cast<int8_t>(code);
    total += code;
  }
  for (int i = 0; i < kGroup / 2; ++i) {
    split[i] = plain[2 * i];
    split[kGroup / 2 + i] = plain[2 * i + 1];
  }
  *sum = total;
}

void quantize_int8(const float *x, int count, const Int8Vector &out) {
  for (int g = 0; g * kGroup < count; ++g) {
    const float *group = x + g * kGroup;
    float padded[kGroup] = {};
    if (count - g * kGroup < kGroup) {
      std::memcpy(padded, group, static_cast<size_t>(count - g * kGroup) * sizeof(float));
      group = padded;
    }
    int sum;
    quantize_int8_group(group, out.split + g * kGroup, out.plain + g * kGroup, out.scales + g, &sum);
    for (int lane = 0; lane < 8; ++lane)
      out.offsets4[g * 8 + lane] = out.offsets8[g * 8 + lane] = 0;
    out.offsets4[g * 8] = -8 * sum;
    out.offsets8[g * 8] = -128 * sum;
  }
}

template <class S, int Bits> struct DenseGroup;

template <class S> struct DenseGroup<S, 4> {
  static constexpr int kBytes = kGroup / 2;
  typename S::Codes codes;
  explicit DenseGroup(const uint8_t *p) : codes(S::load_codes(p)) {}
  typename S::F dot(const Int8Vector &x, int g) const {
    return S::dot_codes(codes, x.split + g * kGroup, x.offsets4 + g * 8);
  }
};

template <class S> struct DenseGroup<S, 8> {
  static constexpr int kBytes = kGroup;
  const uint8_t *codes;
  explicit DenseGroup(const uint8_t *p) : codes(p) {}
  typename S::F dot(const Int8Vector &x, int g) const {
    return S::dot_bytes(codes, x.plain + g * kGroup, x.offsets8 + g * 8);
  }
};

template <class S, int Bits, int R, int M>
void dense_tile(const DenseRows &w, int row, const Int8Vector *x, float *y, int64_t stride) {
  using Group = DenseGroup<S, Bits>;
  typename S::F acc[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m)
      acc[r][m] = S::set1(0.0f);
  for (int g = 0; g < w.groups; ++g)
    for (int r = 0; r < R; ++r) {
      const int64_t at = static_cast<int64_t>(row + r) * w.groups + g;
      const uint8_t *codes = w.codes + at * Group::kBytes;
      __builtin_prefetch(codes + kAhead);
      const Group group(codes);
      const typename S::F scale = S::set1(w.scales[at]);
      for (int m = 0; m < M; ++m)
        acc[r][m] = S::fma(S::mul(group.dot(x[m], g), S::set1(x[m].scales[g])), scale, acc[r][m]);
    }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m)
      y[m * stride + r] = S::sum(acc[r][m]);
}

template <class S, int Bits>
void dense(const DenseRows &w, int rows, const Int8Vector *x, int count, float *y, int64_t stride) {
  for_tiles<1, 4>(0, rows, count, [&](auto r, auto vectors, int row, int m) {
    dense_tile<S, Bits, r.value, vectors.value>(w, row, x + m, y + m * stride + row, stride);
  });
}

} // namespace
} // namespace moec
