// fp16, bf16 and E4M3 <-> fp32, bit-exact and free of instruction-set extensions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace moec {

static inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31)
    return float_of(sign | 0x7F800000 | mantissa << 13);
  if (exponent == 0) { // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Nearest even; overflow gives infinity.
static inline uint16_t float_to_half(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7FFFFFFF;
  if (magnitude > 0x7F800000)
    return static_cast<uint16_t>(sign | 0x7E00);
  if (magnitude >= 0x477FF000) // >= 65520
    return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x38800000) { // below 2^-14: adding 0.5 makes the FPU round to a multiple of 2^-24
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3F000000));
  }
  const uint32_t rounded = magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

static inline float bf16_to_float(uint16_t b) {
  return float_of(static_cast<uint32_t>(b) << 16);
}

// Nearest even for |x| < 2^22, without a call into libm (the sum cannot be held at this size otherwise).
static inline float round_even(float x) {
  const float magic = 12582912.0f; // 1.5 * 2^23
  return (x + magic) - magic;
}

static inline float e4m3_to_float(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15, mantissa = code & 7;
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                        : float_of((exponent + 120) << 23 | mantissa << 20);
  return code & 128 ? -magnitude : magnitude;
}

// Smallest positive finite E4M3 that is >= x: at least 2^-9 (code 1), at most 448 (code 126).
static inline uint8_t e4m3_up(float x) {
  if (!(x > 0x1p-9f))
    return 1;
  if (x >= 448.0f)
    return 126;
  if (x < 0x1p-6f)
    return static_cast<uint8_t>(std::ceil(x * 512.0f));
  return static_cast<uint8_t>(((bits_of(x) + 0xFFFFF) >> 20) - (120 << 3));
}

// Nearest E4M3, ties to even, saturating at +-448; zeros (also rounded ones) are code 0x00.
static inline uint8_t e4m3_nearest(float x) {
  float a = std::fabs(x);
  if (a > 448.0f)
    a = 448.0f;
  const uint32_t u = bits_of(a);
  const uint32_t code = a < 0x1p-6f ? static_cast<uint32_t>(round_even(a * 512.0f))
                                    : ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120 << 3);
  return static_cast<uint8_t>(x < 0 && code > 0 ? code | 128 : code);
}

} // namespace moec
