#include "int8_block.h"
#include "float_formats.h"
#include <cmath>

namespace moec {
namespace {

constexpr int kTokens = KvLayout::kBlockTokens;
constexpr float kTopCode = 127.0f;

float magnitude(float x, float largest) {
  const float m = std::fabs(x);
  return m > largest ? m : largest;
}

float step_of(uint8_t amplitude_code) {
  return e4m3_to_float(amplitude_code) / kTopCode;
}

int8_t code_of(float x, float step) {
  const float y = x / step; // clamped first: round_even is exact below 2^22 only
  return static_cast<int8_t>(round_even(y < -kTopCode ? -kTopCode : y > kTopCode ? kTopCode : y));
}

void quantize_keys(const KvLayout &layout, const float *rows, uint8_t *block) {
  const int dk = layout.k_dim, stride = layout.row_dim();
  auto *codes = reinterpret_cast<int8_t *>(block + layout.k_lo);
  for (int c = 0; c < dk; ++c) {
    float largest = 0;
    for (int t = 0; t < kTokens; ++t)
      largest = magnitude(rows[t * stride + c], largest);
    const uint8_t amplitude = e4m3_up(largest);
    block[layout.k_scale + c] = amplitude;
    for (int t = 0; t < kTokens; ++t)
      codes[t * dk + c] = code_of(rows[t * stride + c], step_of(amplitude));
  }
}

} // namespace

void quantize_int8_block(const KvLayout &layout, const float *v_ref, float *rows, uint8_t *block) {
  const int dk = layout.k_dim, dv = layout.v_dim, ng = layout.num_v_groups, group = layout.v_group;
  quantize_keys(layout, rows, block);
  for (int t = 0; t < kTokens; ++t)
    for (int g = 0; g < ng; ++g) {
      float *y = rows + t * layout.row_dim() + dk + g * group;
      float largest = 0;
      for (int c = 0; c < group; ++c) {
        y[c] /= v_ref[g];
        largest = magnitude(y[c], largest);
      }
      const uint8_t amplitude = e4m3_up(largest);
      block[layout.v_scale + t * ng + g] = amplitude;
      auto *codes = reinterpret_cast<int8_t *>(block + layout.v_codes) + t * dv + g * group;
      for (int c = 0; c < group; ++c)
        codes[c] = code_of(y[c], step_of(amplitude));
    }
}

} // namespace moec
