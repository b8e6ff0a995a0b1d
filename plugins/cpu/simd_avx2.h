// Eight lanes in AVX2, FMA and F16C. Included only by kernels_*.cpp (see simd_portable.h).
#pragma once
#include <cstdint>
#include <immintrin.h>

namespace moec {
namespace {

struct Avx2 {
  static constexpr int kWidth = 8;
  static constexpr int kAccumulators = 12; // of 16 registers
  using F = __m256;
  using I = __m256i;

  static F load(const float *p) { return _mm256_loadu_ps(p); }
  static void store(float *p, F x) { _mm256_storeu_ps(p, x); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static float sum(F x) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
  }
  static I load_words(const uint32_t *p) { return _mm256_loadu_si256(reinterpret_cast<const I *>(p)); }
  static I spread(uint32_t w) {
    return _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(w)),
                             _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
  }
  static I drop_code(I x) { return _mm256_srli_epi32(x, 2); }
  // vpermilps reads the low two bits of each lane only: a table of four floats needs no mask.
  static F low_code(I x) { return _mm256_permutevar_ps(_mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3), x); }
  template <int STRIDE> static F swap(F x) {
    if constexpr (STRIDE == 4)
      return _mm256_permute2f128_ps(x, x, 1);
    return _mm256_permute_ps(x, STRIDE == 1 ? 0xB1 : 0x4E);
  }
  static F load_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
  }
  // Positive codes: moved to the place of a half's exponent and mantissa they are their values / 256.
  static F load_e4m3(const uint8_t *p) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(wide, 7)), _mm256_set1_ps(256.0f));
  }
  // Sixteen bytes of each of 64 rows that are `stride` bytes apart: out[byte][row]. Each lane of 16 bytes
  // takes sixteen rows: interleaving rows i and i + 8 rotates the address (row, byte) by one bit, so four
  // times exchange row and byte.
  static void transpose_bytes(const int8_t *rows, int stride, int8_t (*out)[64]) {
    for (int half = 0; half < 64; half += 32) {
      I x[16], y[16];
      for (int i = 0; i < 16; ++i)
        x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_row(rows + (half + i) * stride)),
                                       load_row(rows + (half + i + 16) * stride), 1);
      interleave(x, y);
      interleave(y, x);
      interleave(x, y);
      interleave(y, x);
      for (int i = 0; i < 16; ++i)
        _mm256_storeu_si256(reinterpret_cast<I *>(out[i] + half), x[i]);
    }
  }
  static __m128i load_row(const int8_t *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
  static void interleave(const I (&from)[16], I (&to)[16]) {
    for (int i = 0; i < 8; ++i) {
      to[2 * i] = _mm256_unpacklo_epi8(from[i], from[i + 8]);
      to[2 * i + 1] = _mm256_unpackhi_epi8(from[i], from[i + 8]);
    }
  }
  static float half(uint16_t h) { return _cvtsh_ss(h); }
  static F load_half(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static void store_half(uint16_t *p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static F load_bf16(const uint16_t *p) {
    const I wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F pow2(F n) {
    const I biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }

  struct Codes {
    I low, high;
  };
  static Codes load_codes(const uint8_t *p) {
    const I v = _mm256_loadu_si256(reinterpret_cast<const I *>(p)), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16(v, 4), mask)};
  }
  static F dot_codes(const Codes &c, const int8_t *x, const int32_t *offset) {
    const I *v = reinterpret_cast<const I *>(x);
    const I even = _mm256_maddubs_epi16(c.low, _mm256_loadu_si256(v));
    const I odd =
        _mm256_maddubs_epi16(c.high, _mm256_loadu_si256(v + 1)); // |sum| <= 2*2*15*127: no saturation
    const I lanes = _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
    return _mm256_cvtepi32_ps(
        _mm256_add_epi32(lanes, _mm256_loadu_si256(reinterpret_cast<const I *>(offset))));
  }
  // Pairs of products of 8-bit codes overflow 16 bits: the products are made with 16 bits.
  static F dot_bytes(const uint8_t *codes, const int8_t *x, const int32_t *offset) {
    I lanes = _mm256_loadu_si256(reinterpret_cast<const I *>(offset));
    for (int i = 0; i < 64; i += 16) {
      const I w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + i)));
      const I v = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x + i)));
      lanes = _mm256_add_epi32(lanes, _mm256_madd_epi16(w, v));
    }
    return _mm256_cvtepi32_ps(lanes);
  }
  static F code_values(const uint8_t *p, int part) {
    const I wide =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8 * (part & 3))));
    const I code = part < 4 ? _mm256_and_si256(wide, _mm256_set1_epi32(15)) : _mm256_srli_epi32(wide, 4);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(8)));
  }
};

} // namespace
} // namespace moec
