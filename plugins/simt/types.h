// CUDA's vector types and 16-bit floats for host compilers: only what kernels and their tests use.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

namespace simt {
template <class To, class From> inline To bit_cast(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline float half_bits_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) // inf or NaN
    return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and is exact for subnormals too.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
#endif
}

// Rounds the low `drop` bits away, to nearest even.
inline uint32_t round_even(uint32_t v, unsigned drop) {
  return (v + ((1u << (drop - 1)) - 1) + (v >> drop & 1)) >> drop;
}

inline uint16_t float_to_half_bits(float f) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(f, 0));
#else
  const uint32_t bits = bit_cast<uint32_t>(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000)
    return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) // 65520 and above round to infinity
    return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) // half subnormal: adding 0.5 leaves the multiple of 2^-24 in the mantissa
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) & 0xffff));
  return static_cast<uint16_t>(sign | round_even(magnitude - (112u << 23), 13));
#endif
}

inline float bf16_bits_to_float(uint16_t b) {
  return bit_cast<float>(static_cast<uint32_t>(b) << 16);
}

inline uint16_t float_to_bf16_bits(float f) {
  const uint32_t bits = bit_cast<uint32_t>(f);
  if ((bits & 0x7fffffff) > 0x7f800000)
    return 0x7fff;
  return static_cast<uint16_t>(round_even(bits, 16));
}
} // namespace simt

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half h) {
  return simt::half_bits_to_float(h.bits);
}
inline __half __float2half_rn(float f) {
  return {simt::float_to_half_bits(f)};
}
inline float __bfloat162float(__nv_bfloat16 b) {
  return simt::bf16_bits_to_float(b.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  return {simt::float_to_bf16_bits(f)};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline __half2 __float2half2_rn(float x) {
  return __floats2half2_rn(x, x);
}
inline float2 __half22float2(__half2 h) {
  return {__half2float(h.x), __half2float(h.y)};
}

// The product of two halves is exact in double, and so is the sum unless the addend is far below: one
// rounding.
inline __half __hfma(__half a, __half b, __half c) {
  const double product = static_cast<double>(__half2float(a)) * __half2float(b);
  return __float2half_rn(static_cast<float>(product + __half2float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hadd2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) + __half2float(b.x), __half2float(a.y) + __half2float(b.y));
}
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}
