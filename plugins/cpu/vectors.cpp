#include "vectors.h"
#include <algorithm>

namespace moec {
namespace {
constexpr int kPlanes = QuantizedVector::kPlanes;
}

Vectors::Vectors(Arithmetic arithmetic, int count, int columns)
    : arithmetic_(arithmetic), columns_(columns), groups_((columns + kGroup - 1) / kGroup),
      units_(static_cast<size_t>(count) * static_cast<size_t>(groups_)),
      coded_(arithmetic == Arithmetic::kInt4Int8), codes_(coded_ ? units_ * kPlanes * kGroup : 0),
      scales_(coded_ ? units_ : 0), offsets_(coded_ ? units_ * kPlanes * 8 : 0),
      values_(coded_ ? 0 : units_ * kGroup) {}

QuantizedVector Vectors::quantized(int vector) const {
  const size_t at = static_cast<size_t>(vector) * static_cast<size_t>(groups_);
  return {codes_.data() + at * kPlanes * kGroup, scales_.data() + at, offsets_.data() + at * kPlanes * 8};
}

void Vectors::set_group(int vector, int group, const float *x, int count) {
  if (arithmetic_ == Arithmetic::kInt4Int8) {
    const QuantizedVector q = quantized(vector);
    kernels().quantize_vector(
        x, count, {q.codes + group * kPlanes * kGroup, q.scales + group, q.offsets + group * kPlanes * 8});
    return;
  }
  float *out = values_.data() + (static_cast<size_t>(vector) * groups_ + group) * kGroup;
  if (arithmetic_ == Arithmetic::kBf16) {
    std::copy(x, x + count, out);
    return;
  }
  for (int i = 0; i < kGroup; ++i) // even columns, then odd ones
    out[(i & 1) * 32 + i / 2] = i < count ? x[i] : 0.0f;
}

void Vectors::set(int vector, const float *x) {
  for (int g = 0; g < groups_; ++g)
    set_group(vector, g, x + g * kGroup, std::min(kGroup, columns_ - g * kGroup));
}

void Vectors::multiply(const Matrix &w, int begin, int end, const int *which, int count, float *y,
                       int64_t stride) const {
  constexpr int kMost = 64; // vectors in one call
  for (; count > 0; which += kMost, count -= kMost, y += kMost * stride) {
    const int n = std::min(count, kMost);
    const Int4Matrix int4{w.data, reinterpret_cast<const uint16_t *>(w.scales), w.columns};
    if (arithmetic_ == Arithmetic::kInt4Int8) {
      QuantizedVector x[kMost];
      for (int i = 0; i < n; ++i)
        x[i] = quantized(which[i]);
      kernels().int4_int8(int4, begin, end, x, n, y, stride);
      continue;
    }
    const float *x[kMost];
    for (int i = 0; i < n; ++i)
      x[i] = values_.data() + static_cast<size_t>(which[i]) * groups_ * kGroup;
    if (arithmetic_ == Arithmetic::kInt4Fp32)
      kernels().int4_fp32(int4, begin, end, x, n, y, stride);
    else
      kernels().bf16_fp32(reinterpret_cast<const uint16_t *>(w.data), w.columns, begin, end, x, n, y, stride);
  }
}

} // namespace moec
