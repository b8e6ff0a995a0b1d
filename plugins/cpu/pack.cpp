// Weight quantizers as a C API, bit-identical to moec/reference/weights.py (fp32, true division, nearest
// even).
#include "float_formats.h"
#include <algorithm>
#include <vector>

// Compiled twice, chosen when the library loads. Wider vectors change no bit: there is no contraction into
// FMA.
#ifdef MOEC_X86
#define MOEC_WIDE __attribute__((target_clones("default", "avx2")))
#else
#define MOEC_WIDE
#endif

namespace moec {
namespace {

constexpr int kGroup = 64;
constexpr float kHalfMax = 65504.0f;
constexpr float kShrink[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};

// fp16 scale; one that rounds to zero becomes 1.
inline uint16_t half_scale(float scale) {
  const uint16_t half = float_to_half(std::min(std::max(scale, -kHalfMax), kHalfMax));
  return (half & 0x7FFF) == 0 ? uint16_t{0x3C00} : half;
}

// clip(rne(x) + zero, 0, top); what is clamped first lies far outside the codes.
inline float code_of(float x, float zero, float top) {
  x = std::min(std::max(x, -4194304.0f), 4194303.0f);
  return std::min(std::max(round_even(x) + zero, 0.0f), top);
}

inline float widen(float x) {
  return x;
}
inline float widen(uint16_t bf16) {
  return bf16_to_float(bf16);
}

// A group of weights, float or bf16, filled up with zeros.
template <class T> void load_group(const T *row, int64_t columns, int64_t group, float *w) {
  const int64_t count = std::min<int64_t>(kGroup, columns - group * kGroup);
  row += group * kGroup;
  for (int64_t i = 0; i < count; ++i)
    w[i] = widen(row[i]);
  std::fill(w + count, w + kGroup, 0.0f);
}

// The signed value of the first column with the largest magnitude.
inline float extreme(const float *w) {
  uint32_t largest = 0;
  for (int i = 0; i < kGroup; ++i)
    largest = std::max(largest, bits_of(w[i]) & 0x7FFFFFFF);
  int first = 0;
  while ((bits_of(w[first]) & 0x7FFFFFFF) != largest)
    ++first;
  return w[first];
}

template <int half> inline void add_half(float *e) {
  for (int i = 0; i < half; ++i)
    e[i] += e[i + half];
}

// Squared error of codes, each column counted by its importance, summed by halves.
inline float squared_error(const float *w, const float *codes, float scale, const float *importance) {
  float e[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float d = w[i] - (codes[i] - 8.0f) * scale;
    e[i] = d * d * importance[i];
  }
  add_half<32>(e);
  add_half<16>(e);
  add_half<8>(e);
  add_half<4>(e);
  add_half<2>(e);
  add_half<1>(e);
  return e[0];
}

MOEC_WIDE uint16_t quantize_group_int4(const float *w, const float *importance, uint8_t *out) {
  float best_codes[kGroup] = {}, codes[kGroup];
  float best_error = INFINITY;
  uint16_t best = 0x3C00;
  const float top = extreme(w);
  for (float factor : kShrink) {
    const uint16_t half = half_scale(top * factor / -8.0f);
    const float scale = half_to_float(half);
    for (int i = 0; i < kGroup; ++i)
      codes[i] = code_of(w[i] / scale, 8.0f, 15.0f);
    const float error = squared_error(w, codes, scale, importance);
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

MOEC_WIDE uint16_t quantize_group_int8(const float *w, const float *, uint8_t *out) {
  const uint16_t half = half_scale(std::fabs(extreme(w)) / 127.0f);
  const float scale = half_to_float(half);
  for (int i = 0; i < kGroup; ++i)
    out[i] = static_cast<uint8_t>(static_cast<int>(code_of(w[i] / scale, 128.0f, 255.0f)));
  return half;
}

// False if a weight is not finite.
bool finite(const float *w) {
  uint32_t largest = 0;
  for (int i = 0; i < kGroup; ++i)
    largest = std::max(largest, bits_of(w[i]) & 0x7FFFFFFF);
  return largest < 0x7F800000;
}

template <class T, class Quantize>
int quantize_rows(const T *weight, const float *importance, int64_t rows, int64_t columns, int bytes,
                  uint8_t *codes, uint16_t *scales, const Quantize &quantize) {
  const int64_t groups = (columns + kGroup - 1) / kGroup;
  std::vector<float> counts(static_cast<size_t>(groups) * kGroup, importance ? 0.0f : 1.0f);
  if (importance)
    std::copy(importance, importance + columns, counts.begin());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      float w[kGroup];
      load_group(weight + r * columns, columns, g, w);
      if (!finite(w))
        return 1;
      scales[r * groups + g] = quantize(w, counts.data() + g * kGroup, codes + (r * groups + g) * bytes);
    }
  return 0;
}

} // namespace
} // namespace moec

// weight [rows][columns] -> codes [rows][groups*32] or [rows][groups*64], scales fp16 [rows][groups].
// importance fp32 [columns] or null. Returns 1, with the outputs unfinished, if a weight is not finite.
#define MOEC_QUANTIZER(name, type, bytes, quantize)                                                          \
  extern "C" __attribute__((visibility("default"))) int name(const type *weight, const float *importance,    \
                                                             int64_t rows, int64_t columns, uint8_t *codes,  \
                                                             uint16_t *scales) {                             \
    return moec::quantize_rows(weight, importance, rows, columns, bytes, codes, scales, moec::quantize);     \
  }
MOEC_QUANTIZER(moec_quantize_int4, float, 32, quantize_group_int4)
MOEC_QUANTIZER(moec_quantize_int8, float, 64, quantize_group_int8)
MOEC_QUANTIZER(moec_quantize_int4_bf16, uint16_t, 32, quantize_group_int4)
MOEC_QUANTIZER(moec_quantize_int8_bf16, uint16_t, 64, quantize_group_int8)
