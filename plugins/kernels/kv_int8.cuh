// How attention reads blocks of the cache format int8 (moec/reference/kv_int8.py): codes are bytes, a group's
// step is its E4M3 amplitude / 127, and there are no zeros.
#pragma once
#include "e4m3.cuh"
#include "kv_rows.cuh"

namespace moec::kernels {

constexpr float kTopCode = 127.0f;

MOEC_DEVICE float int8_step(uint8_t amplitude) {
  return e4m3_decode(amplitude) / (MOEC_BUG(10) ? 128.0f : kTopCode);
}

// Byte j of a word as a signed number. Built from the bits of 2^23 + (code + 128): the conversion unit of a
// GPU has an eighth of the throughput of its adders.
MOEC_DEVICE float int8_code(unsigned word, int j) {
  const unsigned bits = 0x4b000000u | ((word ^ 0x80808080u) >> 8 * j & 0xffu);
#if defined(__CUDACC__)
  return __uint_as_float(bits) - 8388736.0f;
#else
  return simt::bit_cast<float>(bits) - 8388736.0f;
#endif
}

// Four codes, the first one's offset a multiple of 4.
MOEC_DEVICE unsigned int8_quad(const uint8_t *codes, int offset) {
  return *reinterpret_cast<const unsigned *>(codes + offset);
}

} // namespace moec::kernels
