// Matrix times a few vectors, written once over a SIMD type S of eight lanes. Included only by kernels_*.cpp.
//
// A (row, vector) pair runs through the same additions in the same order however many rows and vectors share
// a pass, so that a token's result depends neither on its neighbours nor on the batch.
#pragma once
#include "float_formats.h"
#include "kernels.h"
#include "ring_kernels.h"

namespace moec {
namespace {

constexpr int kGroup = 64;
// Rows of one token are read one after another, a single stream that the memory system foresees, and asked
// for so many bytes ahead of their use. One core of a Zen 4, the sample with a context of 16, four rows at a
// time -> one: 11.7 -> 8.6 ms a token.
constexpr int kAhead = 2048;

// Per lane of dot_codes (bytes 4i..4i+3 of both halves) -8 times the sum of its activations.
inline void lane_offsets(const int8_t *codes, int32_t *offset) {
  for (int lane = 0; lane < 8; ++lane) {
    int sum = 0;
    for (int i = 4 * lane; i < 4 * lane + 4; ++i)
      sum += codes[i] + codes[32 + i];
    offset[lane] = -8 * sum;
  }
}

inline void quantize_group(const float *x, int count, int8_t *codes, float *scale, int32_t *offset) {
  float top = 1e-33f;
  for (int i = 0; i < count; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    top = a > top ? a : top;
  }
  *scale = top / (127.0f * 128.0f);
  float values[kGroup];
  for (int i = 0; i < kGroup; ++i)
    values[i] = i < count ? round_even(x[i] / *scale) : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const int value = static_cast<int>(values[i]), at = (i & 1) * 32 + i / 2;
    const int high = (value + 64) >> 7;
    codes[at] = static_cast<int8_t>(high);
    codes[kGroup + at] = static_cast<int8_t>(value - high * 128);
  }
  for (int plane = 0; plane < QuantizedVector::kPlanes; ++plane)
    lane_offsets(codes + plane * kGroup, offset + plane * 8);
}

void quantize_vector(const float *x, int count, const QuantizedVector &out) {
  constexpr int kPlanes = QuantizedVector::kPlanes;
  for (int g = 0; g * kGroup < count; ++g) {
    const int rest = count - g * kGroup;
    quantize_group(x + g * kGroup, rest < kGroup ? rest : kGroup, out.codes + g * kPlanes * kGroup,
                   out.scales + g, out.offsets + g * kPlanes * 8);
  }
}

// One group of a row times one of a vector. Both integer sums, and the sum of them, are exact in fp32.
template <class S>
typename S::F dot_group(const typename S::Codes &codes, const QuantizedVector &x, int group) {
  const int8_t *planes = x.codes + group * QuantizedVector::kPlanes * kGroup;
  const int32_t *offsets = x.offsets + group * QuantizedVector::kPlanes * 8;
  const typename S::F high = S::dot_codes(codes, planes, offsets);
  return S::fma(high, S::set1(128.0f), S::dot_codes(codes, planes + kGroup, offsets + 8));
}

template <class S, int R, int M>
void int4_int8_tile(const Int4Matrix &w, int row, const QuantizedVector *x, float *y, int64_t stride) {
  const int groups = (w.columns + kGroup - 1) / kGroup;
  typename S::F acc[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m)
      acc[r][m] = S::set1(0.0f);
  for (int g = 0; g < groups; ++g)
    for (int r = 0; r < R; ++r) {
      const int64_t at = static_cast<int64_t>(row + r) * groups + g;
      __builtin_prefetch(w.codes + at * 32 + kAhead);
      const typename S::Codes codes = S::load_codes(w.codes + at * 32);
      const float scale = S::half(w.scales[at]);
      for (int m = 0; m < M; ++m) {
        const typename S::F dot = dot_group<S>(codes, x[m], g);
        acc[r][m] = S::fma(dot, S::set1(scale * x[m].scales[g]), acc[r][m]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m)
      y[m * stride + r] = S::sum(acc[r][m]);
}

template <class S, int R, int M>
void int4_fp32_tile(const Int4Matrix &w, int row, const float *const *x, float *y, int64_t stride) {
  const int groups = (w.columns + kGroup - 1) / kGroup;
  typename S::F acc[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m)
      acc[r][m] = S::set1(0.0f);
  for (int g = 0; g < groups; ++g)
    for (int r = 0; r < R; ++r) {
      const int64_t at = static_cast<int64_t>(row + r) * groups + g;
      const typename S::F scale = S::set1(S::half(w.scales[at]));
      for (int part = 0; part < 8; ++part) {
        const typename S::F weight = S::mul(S::code_values(w.codes + at * 32, part), scale);
        for (int m = 0; m < M; ++m)
          acc[r][m] = S::fma(weight, S::load(x[m] + g * kGroup + part * 8), acc[r][m]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m)
      y[m * stride + r] = S::sum(acc[r][m]);
}

template <class S, int R, int M>
void bf16_tile(const uint16_t *w, int columns, int row, const float *const *x, float *y, int64_t stride) {
  typename S::F acc[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m)
      acc[r][m] = S::set1(0.0f);
  int c = 0;
  for (; c + S::kWidth <= columns; c += S::kWidth)
    for (int r = 0; r < R; ++r) {
      const typename S::F weight = S::load_bf16(w + static_cast<int64_t>(row + r) * columns + c);
      for (int m = 0; m < M; ++m)
        acc[r][m] = S::fma(weight, S::load(x[m] + c), acc[r][m]);
    }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) {
      float sum = S::sum(acc[r][m]);
      for (int i = c; i < columns; ++i)
        sum += bf16_to_float(w[static_cast<int64_t>(row + r) * columns + i]) * x[m][i];
      y[m * stride + r] = sum;
    }
}

// Covers rows [begin, end) and `count` vectors by tiles; `tile(rows, vectors, row, first vector)`.
template <int R, int M, class Tile> void for_tiles(int begin, int end, int count, const Tile &tile) {
  int m = 0;
  for (; m + M <= count; m += M) {
    int row = begin;
    for (; row + 2 <= end; row += 2)
      tile(Size<2>(), Size<M>(), row, m);
    for (; row < end; ++row)
      tile(Size<1>(), Size<M>(), row, m);
  }
  for (; m < count; ++m) {
    int row = begin;
    for (; row + R <= end; row += R)
      tile(Size<R>(), Size<1>(), row, m);
    for (; row < end; ++row)
      tile(Size<1>(), Size<1>(), row, m);
  }
}

template <class S>
void int4_int8(const Int4Matrix &w, int begin, int end, const QuantizedVector *x, int count, float *y,
               int64_t stride) {
  for_tiles<1, 4>(begin, end, count, [&](auto rows, auto vectors, int row, int m) {
    int4_int8_tile<S, rows.value, vectors.value>(w, row, x + m, y + m * stride + row - begin, stride);
  });
}

template <class S>
void int4_fp32(const Int4Matrix &w, int begin, int end, const float *const *x, int count, float *y,
               int64_t stride) {
  for_tiles<4, 4>(begin, end, count, [&](auto rows, auto vectors, int row, int m) {
    int4_fp32_tile<S, rows.value, vectors.value>(w, row, x + m, y + m * stride + row - begin, stride);
  });
}

template <class S>
void bf16_fp32(const uint16_t *w, int columns, int begin, int end, const float *const *x, int count, float *y,
               int64_t stride) {
  for_tiles<4, 4>(begin, end, count, [&](auto rows, auto vectors, int row, int m) {
    bf16_tile<S, rows.value, vectors.value>(w, columns, row, x + m, y + m * stride + row - begin, stride);
  });
}

// 1 / (1 + exp(-slope * x))
template <class S> void sigmoid(const float *x, float slope, float *out, int count) {
  const typename S::F one = S::set1(1.0f), minus = S::set1(-slope);
  const auto value = [&](const float *p) {
    return S::div(one, S::add(one, exp_clamped<S>(S::mul(S::load(p), minus))));
  };
  int i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth)
    S::store(out + i, value(x + i));
  if (i < count) {
    float lanes[S::kWidth] = {};
    std::memcpy(lanes, x + i, static_cast<size_t>(count - i) * 4);
    S::store(lanes, value(lanes));
    std::memcpy(out + i, lanes, static_cast<size_t>(count - i) * 4);
  }
}

template <class S> float dot(const float *a, const float *b, int count) {
  typename S::F acc[2] = {S::set1(0.0f), S::set1(0.0f)};
  int c = 0;
  for (; c + 2 * S::kWidth <= count; c += 2 * S::kWidth)
    for (int i = 0; i < 2; ++i)
      acc[i] = S::fma(S::load(a + c + i * S::kWidth), S::load(b + c + i * S::kWidth), acc[i]);
  float sum = S::sum(S::add(acc[0], acc[1]));
  for (; c < count; ++c)
    sum += a[c] * b[c];
  return sum;
}

} // namespace
} // namespace moec
