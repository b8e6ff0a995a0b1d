// Weight quantizers as a C API, bit-identical to moec/reference/weights.py (fp32, true division, nearest
// even).
#include "float_formats.h"
#include <algorithm>

namespace moec {
namespace {

constexpr int kGroup = 64;
constexpr float kHalfMax = 65504.0f;
constexpr float kShrink[] = {1.0f, 0.95f, 0.9f, 0.85f};

// fp16 scale; one that rounds to zero becomes 1.
uint16_t half_scale(float scale) {
  const uint16_t half = float_to_half(std::min(std::max(scale, -kHalfMax), kHalfMax));
  return (half & 0x7FFF) == 0 ? uint16_t{0x3C00} : half;
}

// clip(rne(x) + zero, 0, top); what is clamped first lies far outside the codes.
float code_of(float x, float zero, float top) {
  x = std::min(std::max(x, -4194304.0f), 4194303.0f);
  return std::min(std::max(round_even(x) + zero, 0.0f), top);
}

void load_group(const float *row, int columns, int group, float *w) {
  for (int i = 0; i < kGroup; ++i)
    w[i] = group * kGroup + i < columns ? row[group * kGroup + i] : 0.0f;
}

// The signed value of the first column with the largest magnitude.
float extreme(const float *w) {
  int best = 0;
  for (int i = 1; i < kGroup; ++i)
    best = std::fabs(w[i]) > std::fabs(w[best]) ? i : best;
  return w[best];
}

// Squared error of codes, summed by halves.
float squared_error(const float *w, const float *codes, float scale) {
  float e[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float d = w[i] - (codes[i] - 8.0f) * scale;
    e[i] = d * d;
  }
  for (int half = kGroup / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      e[i] += e[i + half];
  return e[0];
}

uint16_t quantize_group_int4(const float *w, uint8_t *out) {
  float best_codes[kGroup] = {}, codes[kGroup];
  float best_error = INFINITY;
  uint16_t best = 0x3C00;
  const float top = extreme(w);
  for (float factor : kShrink) {
    const uint16_t half = half_scale(top * factor / -8.0f);
    const float scale = half_to_float(half);
    for (int i = 0; i < kGroup; ++i)
      codes[i] = code_of(w[i] / scale, 8.0f, 15.0f);
    const float error = squared_error(w, codes, scale);
    if (error < best_error) {
      best_error = error;
      best = half;
      std::copy(codes, codes + kGroup, best_codes);
    }
  }
  for (int i = 0; i < kGroup; i += 2)
    out[i / 2] =
        static_cast<uint8_t>(static_cast<int>(best_codes[i]) | static_cast<int>(best_codes[i + 1]) << 4);
  return best;
}

uint16_t quantize_group_int8(const float *w, uint8_t *out) {
  const uint16_t half = half_scale(std::fabs(extreme(w)) / 127.0f);
  const float scale = half_to_float(half);
  for (int i = 0; i < kGroup; ++i)
    out[i] = static_cast<uint8_t>(static_cast<int>(code_of(w[i] / scale, 128.0f, 255.0f)));
  return half;
}

template <class Quantize>
void quantize_rows(const float *weight, int64_t rows, int64_t columns, int bytes, uint8_t *codes,
                   uint16_t *scales, const Quantize &quantize) {
  const int64_t groups = (columns + kGroup - 1) / kGroup;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      float w[kGroup];
      load_group(weight + r * columns, static_cast<int>(columns), static_cast<int>(g), w);
      scales[r * groups + g] = quantize(w, codes + (r * groups + g) * bytes);
    }
}

} // namespace
} // namespace moec

#define MOEC_EXPORT extern "C" __attribute__((visibility("default")))

// weight fp32 [rows][columns] -> codes [rows][groups*32], scales fp16 [rows][groups]
MOEC_EXPORT void moec_quantize_int4(const float *weight, int64_t rows, int64_t columns, uint8_t *codes,
                                    uint16_t *scales) {
  moec::quantize_rows(weight, rows, columns, 32, codes, scales, moec::quantize_group_int4);
}

// weight fp32 [rows][columns] -> codes [rows][groups*64], scales fp16 [rows][groups]
MOEC_EXPORT void moec_quantize_int8(const float *weight, int64_t rows, int64_t columns, uint8_t *codes,
                                    uint16_t *scales) {
  moec::quantize_rows(weight, rows, columns, 64, codes, scales, moec::quantize_group_int8);
}
