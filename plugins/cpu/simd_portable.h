// Eight lanes in GCC's vector extension: no instruction set beyond the compiler's default. Included only by
// kernels_*.cpp, hence the anonymous namespace: nothing here may be shared between differently compiled
// files.
#pragma once
#include "float_formats.h"

namespace moec {
namespace {

struct Portable {
  static constexpr int kWidth = 8;
  static constexpr int kAccumulators = 6;
  typedef float F __attribute__((vector_size(32)));
  typedef uint32_t I __attribute__((vector_size(32)));
  typedef int32_t S __attribute__((vector_size(32)));

  static F load(const float *p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float *p, F x) { std::memcpy(p, &x, sizeof x); }
  static F set1(float x) { return F{x, x, x, x, x, x, x, x}; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F div(F a, F b) { return a / b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static float sum(F x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
  static I load_words(const uint32_t *p) {
    I x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  // Lane i gets the word's bits from 2*i on.
  static I spread(uint32_t w) { return I{w, w >> 2, w >> 4, w >> 6, w >> 8, w >> 10, w >> 12, w >> 14}; }
  static I drop_code(I x) { return x >> 2; }
  // The low two bits of each lane as a float.
  static F low_code(I x) { return __builtin_convertvector((S)(x & 3), F); }
  // Each lane gets the one that is STRIDE lanes away, within its pair.
  template <int STRIDE> static F swap(F x) {
    return __builtin_shuffle(
        x, I{0 ^ STRIDE, 1 ^ STRIDE, 2 ^ STRIDE, 3 ^ STRIDE, 4 ^ STRIDE, 5 ^ STRIDE, 6 ^ STRIDE, 7 ^ STRIDE});
  }
  static F load_int8(const int8_t *p) {
    F x;
    for (int i = 0; i < 8; ++i)
      x[i] = static_cast<float>(p[i]);
    return x;
  }
  static F load_e4m3(const uint8_t *p) {
    F x;
    for (int i = 0; i < 8; ++i)
      x[i] = e4m3_to_float(p[i]);
    return x;
  }
  // Sixteen bytes of each of 64 rows that are `stride` bytes apart: out[byte][row].
  static void transpose_bytes(const int8_t *rows, int stride, int8_t (*out)[64]) {
    for (int row = 0; row < 64; ++row)
      for (int i = 0; i < 16; ++i)
        out[i][row] = rows[row * stride + i];
  }
  static float half(uint16_t h) { return half_to_float(h); }
  static F load_half(const uint16_t *p) {
    F x;
    for (int i = 0; i < 8; ++i)
      x[i] = half_to_float(p[i]);
    return x;
  }
  static void store_half(uint16_t *p, F x) {
    for (int i = 0; i < 8; ++i)
      p[i] = float_to_half(x[i]);
  }
  static F load_bf16(const uint16_t *p) {
    F x;
    for (int i = 0; i < 8; ++i)
      x[i] = bf16_to_float(p[i]);
    return x;
  }
  // 2^n of integral lanes in [-126, 127].
  static F pow2(F n) { return (F)((__builtin_convertvector(n, S) + 127) << 23); }

  // Int4 groups: 32 bytes of codes against 64 activations (even columns, then odd ones).
  struct Codes {
    uint8_t low[32], high[32];
  };
  static Codes load_codes(const uint8_t *p) {
    Codes c;
    for (int i = 0; i < 32; ++i) {
      c.low[i] = p[i] & 15;
      c.high[i] = p[i] >> 4;
    }
    return c;
  }
  static F dot_codes(const Codes &c, const int8_t *x, const int32_t *offset) {
    S lanes;
    std::memcpy(&lanes, offset, sizeof lanes);
    for (int i = 0; i < 32; ++i)
      lanes[i / 4] += c.low[i] * x[i] + c.high[i] * x[32 + i];
    return __builtin_convertvector(lanes, F);
  }
  // 64 bytes of codes against 64 activations.
  static F dot_bytes(const uint8_t *codes, const int8_t *x, const int32_t *offset) {
    S lanes;
    std::memcpy(&lanes, offset, sizeof lanes);
    for (int i = 0; i < 64; ++i)
      lanes[i / 8] += codes[i] * x[i];
    return __builtin_convertvector(lanes, F);
  }
  // Eight weights (code - 8): `part` 0..3 of the even columns, 4..7 of the odd ones.
  static F code_values(const uint8_t *p, int part) {
    F x;
    for (int i = 0; i < 8; ++i) {
      const uint8_t b = p[8 * (part & 3) + i];
      x[i] = static_cast<float>(part < 4 ? b & 15 : b >> 4) - 8.0f;
    }
    return x;
  }
};

} // namespace
} // namespace moec
