// Dense layers for several tokens with 512 bits: two rows of the weights share a register, one in each half,
// so that every lane goes through the additions of dense_tile and has its bits. Included only by
// kernels_avx512.cpp.
#pragma once
#include "dense_kernels.h"
#include <immintrin.h>

namespace moec {
namespace {

inline __m512i both(const void *low, const void *high) {
  const __m256i a = _mm256_loadu_si256(static_cast<const __m256i *>(low));
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), _mm256_loadu_si256(static_cast<const __m256i *>(high)),
                            1);
}

inline __m512i twice(const void *p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
}

// A group of two rows, as two registers: its first 32 operands and its last.
template <int Bits> struct RowPair {
  __m512i first, last;
  RowPair(const uint8_t *a, const uint8_t *b) {
    if constexpr (Bits == 4) {
      const __m512i codes = both(a, b), mask = _mm512_set1_epi8(15);
      first = _mm512_and_si512(codes, mask);
      last = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
    } else {
      first = both(a, b);
      last = both(a + 32, b + 32);
    }
  }
};

template <int Bits, int P, int M>
void pair_tile(const DenseRows &w, int row, const Int8Vector *x, float *y, int64_t stride) {
  constexpr int kBytes = kGroup * Bits / 8;
  __m512 acc[P][M];
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m)
      acc[p][m] = _mm512_setzero_ps();
  for (int g = 0; g < w.groups; ++g) {
    __m512i first[M], last[M];
    for (int m = 0; m < M; ++m) {
      const int8_t *codes = (Bits == 4 ? x[m].split : x[m].plain) + g * kGroup;
      first[m] = twice(codes);
      last[m] = twice(codes + 32);
    }
    for (int p = 0; p < P; ++p) {
      const int64_t at = static_cast<int64_t>(row + 2 * p) * w.groups + g, next = at + w.groups;
      const RowPair<Bits> pair(w.codes + at * kBytes, w.codes + next * kBytes);
      const __m512 scale =
          _mm512_mask_broadcastss_ps(_mm512_set1_ps(w.scales[at]), 0xff00, _mm_load_ss(w.scales + next));
      for (int m = 0; m < M; ++m) {
        __m512i lanes = twice((Bits == 4 ? x[m].offsets4 : x[m].offsets8) + g * 8);
        lanes = _mm512_dpbusd_epi32(lanes, pair.first, first[m]);
        lanes = _mm512_dpbusd_epi32(lanes, pair.last, last[m]);
        const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(lanes), _mm512_set1_ps(x[m].scales[g]));
        acc[p][m] = _mm512_fmadd_ps(dot, scale, acc[p][m]);
      }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m) {
      y[m * stride + 2 * p] = Avx2::sum(_mm512_castps512_ps256(acc[p][m]));
      y[m * stride + 2 * p + 1] = Avx2::sum(_mm512_extractf32x8_ps(acc[p][m], 1));
    }
}

template <int Bits>
void dense_by_pairs(const DenseRows &w, int rows, const Int8Vector *x, int count, float *y, int64_t stride) {
  constexpr int kTokens = 4;
  int m = 0;
  for (; m + kTokens <= count; m += kTokens, y += kTokens * stride) {
    int row = 0;
    for (; row + 4 <= rows; row += 4)
      pair_tile<Bits, 2, kTokens>(w, row, x + m, y + row, stride);
    for (; row < rows; ++row)
      dense_tile<Avx512Narrow, Bits, 1, kTokens>(w, row, x + m, y + row, stride);
  }
  if (m < count)
    dense<Avx512Narrow, Bits>(w, rows, x + m, count - m, y, stride);
}

} // namespace
} // namespace moec
