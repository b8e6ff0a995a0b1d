// Sixteen lanes in AVX-512 for attention; eight lanes with VNNI for int4. Included only by
// kernels_avx512.cpp.
#pragma once
#include "simd_avx2.h"

namespace moec {
namespace {

struct Avx512 {
  static constexpr int kWidth = 16;
  static constexpr int kAccumulators = 24; // of 32 registers
  using F = __m512;
  using I = __m512i;

  static F load(const float *p) { return _mm512_loadu_ps(p); }
  static void store(float *p, F x) { _mm512_storeu_ps(p, x); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float sum(F x) {
    return Avx2::sum(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
  }
  static I load_words(const uint32_t *p) { return _mm512_loadu_si512(p); }
  static I spread(uint32_t w) {
    const I shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int>(w)), shifts);
  }
  static I drop_code(I x) { return _mm512_srli_epi32(x, 2); }
  static F low_code(I x) { return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_setr_ps(0, 1, 2, 3)), x); }
  template <int STRIDE> static F swap(F x) {
    if constexpr (STRIDE >= 4)
      return _mm512_shuffle_f32x4(x, x, STRIDE == 4 ? 0xB1 : 0x4E);
    return _mm512_permute_ps(x, STRIDE == 1 ? 0xB1 : 0x4E);
  }
  static F load_int8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(Avx2::load_row(p))); }
  static F load_e4m3(const uint8_t *p) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(wide, 7)), _mm512_set1_ps(256.0f));
  }
  // As Avx2::transpose_bytes, all rows at once.
  static void transpose_bytes(const int8_t *rows, int stride, int8_t (*out)[64]) {
    I x[16], y[16];
    for (int i = 0; i < 16; ++i) {
      x[i] = _mm512_castsi128_si512(Avx2::load_row(rows + i * stride));
      x[i] = _mm512_inserti32x4(x[i], Avx2::load_row(rows + (i + 16) * stride), 1);
      x[i] = _mm512_inserti32x4(x[i], Avx2::load_row(rows + (i + 32) * stride), 2);
      x[i] = _mm512_inserti32x4(x[i], Avx2::load_row(rows + (i + 48) * stride), 3);
    }
    interleave(x, y);
    interleave(y, x);
    interleave(x, y);
    interleave(y, x);
    for (int i = 0; i < 16; ++i)
      _mm512_storeu_si512(out[i], x[i]);
  }
  static void interleave(const I (&from)[16], I (&to)[16]) {
    for (int i = 0; i < 8; ++i) {
      to[2 * i] = _mm512_unpacklo_epi8(from[i], from[i + 8]);
      to[2 * i + 1] = _mm512_unpackhi_epi8(from[i], from[i + 8]);
    }
  }
  static F load_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static F pow2(F n) {
    const I biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }
};

struct Avx512Narrow : Avx2 {
  static F dot_codes(const Codes &c, const int8_t *x, const int32_t *offset) {
    const I *v = reinterpret_cast<const I *>(x);
    I lanes = _mm256_loadu_si256(reinterpret_cast<const I *>(offset));
    lanes = _mm256_dpbusd_epi32(lanes, c.low, _mm256_loadu_si256(v));
    lanes = _mm256_dpbusd_epi32(lanes, c.high, _mm256_loadu_si256(v + 1));
    return _mm256_cvtepi32_ps(lanes);
  }
  static F dot_bytes(const uint8_t *codes, const int8_t *x, const int32_t *offset) {
    const I *w = reinterpret_cast<const I *>(codes), *v = reinterpret_cast<const I *>(x);
    I lanes = _mm256_loadu_si256(reinterpret_cast<const I *>(offset));
    lanes = _mm256_dpbusd_epi32(lanes, _mm256_loadu_si256(w), _mm256_loadu_si256(v));
    lanes = _mm256_dpbusd_epi32(lanes, _mm256_loadu_si256(w + 1), _mm256_loadu_si256(v + 1));
    return _mm256_cvtepi32_ps(lanes);
  }
};

} // namespace
} // namespace moec
