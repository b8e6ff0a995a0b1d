// mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}: D = A B + D in PTX's fragment layout, products exact.
#pragma once
#include "scheduler.h"

namespace simt {

struct FragmentA {
  uint32_t v[4];
};
struct FragmentB {
  uint32_t v[2];
};

template <float (*Decode)(uint16_t)> inline float element(uint32_t word, int i) {
  return Decode(static_cast<uint16_t>(word >> (16 * i)));
}

// Lane 4*row + (k%8)/2 holds A[row][k] and A[row+8][k]; register 2*(k/8) + (row >= 8), half k%2.
template <float (*Decode)(uint16_t)> inline void gather_a(Slots slots, float a[2][16]) {
  for (int k = 0; k < 16; k++) {
    FragmentA f;
    memcpy(&f, slots[(self->lane >> 2) * 4 + k % 8 / 2], sizeof f);
    for (int half = 0; half < 2; half++)
      a[half][k] = element<Decode>(f.v[k / 8 * 2 + half], k & 1);
  }
}

// Lane 4*column + (k%8)/2 holds B[k][column]; register k/8, half k%2.
template <float (*Decode)(uint16_t)> inline void gather_b(Slots slots, float b[2][16]) {
  for (int n = 0; n < 2; n++)
    for (int k = 0; k < 16; k++) {
      FragmentB f;
      memcpy(&f, slots[((self->lane & 3) * 2 + n) * 4 + k % 8 / 2], sizeof f);
      b[n][k] = element<Decode>(f.v[k / 8], k & 1);
    }
}

template <float (*Decode)(uint16_t)>
inline void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const char *operation) {
  float rows[2][16], columns[2][16];
  gather_a<Decode>(exchange(~0u, FragmentA{{a[0], a[1], a[2], a[3]}}, operation), rows);
  gather_b<Decode>(exchange(~0u, FragmentB{{b[0], b[1]}}, operation), columns);
  for (int half = 0; half < 2; half++)
    for (int n = 0; n < 2; n++) {
      float sum = 0;
      for (int k = 0; k < 16; k++)
        sum += rows[half][k] * columns[n][k];
      d[half * 2 + n] += sum;
    }
}

} // namespace simt

inline void mma_m16n8k16_f16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
  simt::mma_m16n8k16<simt::half_bits_to_float>(d, a, b, "mma.m16n8k16.f16");
}
inline void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
  simt::mma_m16n8k16<simt::bf16_bits_to_float>(d, a, b, "mma.m16n8k16.bf16");
}
