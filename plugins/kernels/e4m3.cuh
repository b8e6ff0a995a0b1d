// The 8-bit float E4M3 (OCP FN) with the two roundings of MKV2; bit-identical to moec/reference/e4m3.py.
#pragma once
#include "device.h"

namespace moec::kernels {

constexpr float kE4m3Max = 448.0f;
constexpr float kE4m3SmallestNormal = 0.015625f; // 2^-6
constexpr int kE4m3MaxCode = 126;

MOEC_DEVICE uint32_t float_bits(float v) {
#if defined(__CUDACC__)
  return __float_as_uint(v);
#else
  return simt::bit_cast<uint32_t>(v);
#endif
}

// An E4M3 code moved to the place of a half's exponent and mantissa is its value / 256, subnormals too.
MOEC_DEVICE float e4m3_decode(uint8_t code) {
  const unsigned bits = (code & 0x7fu) << 7 | (code & 0x80u) << 8;
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) * 256.0f;
#else
  return simt::half_bits_to_float(static_cast<uint16_t>(bits)) * 256.0f;
#endif
}

// The code of the smallest positive finite value >= v: at least 1 (2^-9), at most 126 (448).
MOEC_DEVICE uint8_t e4m3_up(float v) {
  if (!(v > 0.001953125f))
    return 1;
  if (v >= kE4m3Max)
    return kE4m3MaxCode;
  if (v <= kE4m3SmallestNormal)
    return static_cast<uint8_t>(ceilf(v * 512.0f));
  return static_cast<uint8_t>(((float_bits(v) + 0xfffffu) >> 20) - (120u << 3)); // exponent bias 127 -> 7
}

// The code of the nearest value, ties to even, saturating; zero is always 0x00.
MOEC_DEVICE uint8_t e4m3_rne(float v) {
  const float magnitude = fminf(fabsf(v), kE4m3Max);
  unsigned code;
  if (magnitude < kE4m3SmallestNormal) {
    code = static_cast<unsigned>(rintf(magnitude * 512.0f));
  } else {
    const uint32_t bits = float_bits(magnitude);
    code = ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(v < 0.0f && code ? code | 0x80u : code);
}

} // namespace moec::kernels
