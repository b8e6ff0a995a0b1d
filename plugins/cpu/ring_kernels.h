// Attention over rows of the fp16 or fp32 ring, and softmax. Included only by kernels_*.cpp.
#pragma once
#include "float_formats.h"
#include "kernels.h"
#include <initializer_list>

namespace moec {
namespace {

template <class S> typename S::F load_element(const float *p) {
  return S::load(p);
}
template <class S> typename S::F load_element(const uint16_t *p) {
  return S::load_half(p);
}
inline float element(const float *p) {
  return *p;
}
inline float element(const uint16_t *p) {
  return half_to_float(*p);
}

// Logits of R rows for H queries.
template <class S, class T, int H, int R>
void row_logits(const T *rows, int row_dim, int k_dim, int64_t stride, const float *q, float *out) {
  typename S::F acc[R][H];
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h)
      acc[r][h] = S::set1(0.0f);
  int c = 0;
  for (; c + S::kWidth <= k_dim; c += S::kWidth) {
    typename S::F k[R];
    for (int r = 0; r < R; ++r)
      k[r] = load_element<S>(rows + r * row_dim + c);
    for (int h = 0; h < H; ++h) {
      const typename S::F x = S::load(q + h * k_dim + c);
      for (int r = 0; r < R; ++r)
        acc[r][h] = S::fma(k[r], x, acc[r][h]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) {
      float sum = S::sum(acc[r][h]);
      for (int i = c; i < k_dim; ++i)
        sum += element(rows + r * row_dim + i) * q[h * k_dim + i];
      out[h * stride + r] = sum;
    }
}

template <class S, class T, int H>
void ring_logits(const KvLayout &layout, const void *data, int count, int64_t stride, const float *q,
                 float *out) {
  constexpr int R = S::kAccumulators / H < 4 ? 2 : 4;
  const int row_dim = layout.k_dim + layout.v_dim;
  const T *rows = static_cast<const T *>(data);
  int r = 0;
  for (; r + R <= count; r += R)
    row_logits<S, T, H, R>(rows + static_cast<int64_t>(r) * row_dim, row_dim, layout.k_dim, stride, q,
                           out + r);
  for (; r < count; ++r)
    row_logits<S, T, H, 1>(rows + static_cast<int64_t>(r) * row_dim, row_dim, layout.k_dim, stride, q,
                           out + r);
}

// acc[h][0 .. C*width-1] += p[h][row] * V of C vectors of channels.
template <class S, class T, int H, int C>
void row_values(const T *v, int row_dim, int count, int64_t stride, const float *p, float *acc, int v_dim) {
  typename S::F sum[H][C];
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c)
      sum[h][c] = S::load(acc + h * v_dim + c * S::kWidth);
  for (int r = 0; r < count; ++r, v += row_dim) {
    typename S::F weight[H];
    for (int h = 0; h < H; ++h)
      weight[h] = S::set1(p[h * stride + r]);
    for (int c = 0; c < C; ++c) {
      const typename S::F x = load_element<S>(v + c * S::kWidth);
      for (int h = 0; h < H; ++h)
        sum[h][c] = S::fma(x, weight[h], sum[h][c]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c)
      S::store(acc + h * v_dim + c * S::kWidth, sum[h][c]);
}

template <class S, class T, int H>
void ring_values(const KvLayout &layout, const void *data, int count, int64_t stride, const float *p,
                 float *acc) {
  constexpr int C = S::kAccumulators / H < 4 ? 2 : 4;
  const int row_dim = layout.k_dim + layout.v_dim, v_dim = layout.v_dim;
  const T *v = static_cast<const T *>(data) + layout.k_dim;
  int c = 0;
  for (; c + C * S::kWidth <= v_dim; c += C * S::kWidth)
    row_values<S, T, H, C>(v + c, row_dim, count, stride, p, acc + c, v_dim);
  for (; c + S::kWidth <= v_dim; c += S::kWidth)
    row_values<S, T, H, 1>(v + c, row_dim, count, stride, p, acc + c, v_dim);
  for (; c < v_dim; ++c)
    for (int h = 0; h < H; ++h) {
      float sum = acc[h * v_dim + c];
      for (int r = 0; r < count; ++r)
        sum += element(v + static_cast<int64_t>(r) * row_dim + c) * p[h * stride + r];
      acc[h * v_dim + c] = sum;
    }
}

// exp of x within [-87, 87] (1.6e-38 .. 6e37), to about one unit in the last place; the ends beyond.
template <class S> typename S::F exp_clamped(typename S::F x) {
  const auto constant = [](float c) { return S::set1(c); };
  x = S::min(S::max(x, constant(-87.0f)), constant(87.0f));
  const typename S::F magic = constant(12582912.0f); // adding it rounds to an integer
  const typename S::F n = S::sub(S::fma(x, constant(1.44269504f), magic), magic);
  typename S::F r = S::fma(n, constant(-0.693359375f), x);
  r = S::fma(n, constant(2.12194440e-4f), r);
  typename S::F y = constant(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = S::fma(y, r, constant(c));
  y = S::add(S::fma(y, S::mul(r, r), r), constant(1.0f));
  return S::mul(y, S::pow2(n));
}

// See Kernels::softmax; x has room for `count` rounded up to 16, and what lies behind count is overwritten.
template <class S> float softmax(float *x, int64_t count, float floor, float *sum) {
  const int64_t padded = (count + 15) / 16 * 16;
  for (int64_t i = count; i < padded; ++i)
    x[i] = -3.0e38f;
  typename S::F top = S::set1(floor);
  for (int64_t i = 0; i < padded; i += S::kWidth)
    top = S::max(top, S::load(x + i));
  float lanes[S::kWidth], highest = floor;
  S::store(lanes, top);
  for (float lane : lanes)
    highest = lane > highest ? lane : highest;
  typename S::F total = S::set1(0.0f);
  const typename S::F shift = S::set1(highest);
  for (int64_t i = 0; i < padded; i += S::kWidth) {
    const typename S::F e = exp_clamped<S>(S::sub(S::load(x + i), shift));
    S::store(x + i, e);
    total = S::add(total, e);
  }
  *sum = S::sum(total);
  return highest;
}

} // namespace
} // namespace moec
