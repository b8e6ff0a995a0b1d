#include "mkv2_pack.h"
#include "float_formats.h"
#include "int8_block.h"
#include "kernels.h"
#include <algorithm>
#include <vector>

namespace moec {
namespace {

constexpr int kTokens = KvLayout::kBlockTokens;
constexpr float kHalfMax = 65504.0f;

float clamp(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

// round_even is exact below 2^22; what is clamped here lies far outside any code or zero point.
float round_code(float x) {
  return round_even(clamp(x, -4194304.0f, 4194303.0f));
}

struct Scratch {
  std::vector<float> rows, top, bottom, scale, zero;
  std::vector<uint8_t> codes;
};

// rows: [64][stride]; codes: [64][k_dim]
void quantize_keys(const KvLayout &layout, const float *rows, int stride, Scratch &s, uint8_t *block) {
  const int dk = layout.k_dim;
  s.top.assign(rows, rows + dk);
  s.bottom.assign(rows, rows + dk);
  s.scale.resize(static_cast<size_t>(dk));
  s.zero.resize(static_cast<size_t>(dk));
  for (int t = 1; t < kTokens; ++t)
    for (int c = 0; c < dk; ++c) {
      const float x = rows[t * stride + c];
      s.top[c] = x > s.top[c] ? x : s.top[c];
      s.bottom[c] = x < s.bottom[c] ? x : s.bottom[c];
    }
  auto *zeros = reinterpret_cast<int8_t *>(block + layout.k_zero);
  for (int c = 0; c < dk; ++c) {
    const bool promoted = c < layout.promoted;
    const float half = (promoted ? 1.0f : 0.8f) * ((s.top[c] - s.bottom[c]) / 2.0f);
    const float middle = (s.top[c] + s.bottom[c]) / 2.0f;
    const uint8_t code = e4m3_up(half * 2.0f / (promoted ? 15.0f : 3.0f));
    s.scale[c] = e4m3_to_float(code);
    s.zero[c] = clamp(round_code((middle - half) / s.scale[c]), -128.0f, 127.0f);
    block[layout.k_scale + c] = code;
    zeros[c] = static_cast<int8_t>(s.zero[c]);
  }
  s.codes.resize(static_cast<size_t>(kTokens) * dk);
  for (int t = 0; t < kTokens; ++t)
    for (int c = 0; c < dk; ++c) {
      const float code = round_code(rows[t * stride + c] / s.scale[c]) - s.zero[c];
      s.codes[t * dk + c] =
          static_cast<uint8_t>(static_cast<int>(clamp(code, 0.0f, c < layout.promoted ? 15.0f : 3.0f)));
    }
}

// Packs bits 2*plane.. of codes [64][stride], the first `count` channels of each token.
void pack_plane(const uint8_t *codes, int stride, int count, int plane, uint8_t *out) {
  const int shift = 2 * plane;
  for (int t = 0; t < kTokens; ++t)
    for (int c = 0; c < count; c += 4) {
      const uint8_t *q = codes + t * stride + c;
      const int b = (q[0] >> shift & 3) | (q[1] >> shift & 3) << 2 | (q[2] >> shift & 3) << 4 |
                    (q[3] >> shift & 3) << 6;
      *out++ = static_cast<uint8_t>(b);
    }
}

// One group of a block's token: y[group] relative to v_ref already. The reference says why the grid moves by
// token and codes are stretched.
void quantize_value_group(const float *y, int group, int token, uint8_t *codes, uint8_t *scale_code,
                          uint8_t *zero_code) {
  float top = y[0], bottom = y[0];
  for (int c = 1; c < group; ++c) {
    top = y[c] > top ? y[c] : top;
    bottom = y[c] < bottom ? y[c] : bottom;
  }
  const float half = 0.8f * ((top - bottom) / 2.0f);
  *scale_code = e4m3_up(half * 2.0f / 3.0f);
  const float scale = e4m3_to_float(*scale_code), offset = token % 2 ? 1.75f : 1.25f;
  *zero_code = e4m3_nearest(clamp((top + bottom) / 2.0f - offset * scale, -448.0f, 448.0f));
  const float zero = e4m3_to_float(*zero_code);
  for (int c = 0; c < group; ++c) {
    const float code = round_code((y[c] - zero) / scale * 1.0625f - 0.09375f);
    codes[c] = static_cast<uint8_t>(static_cast<int>(clamp(code, 0.0f, 3.0f)));
  }
}

void quantize_values(const KvLayout &layout, const float *v_ref, float *rows, int stride, Scratch &s,
                     uint8_t *block) {
  const int dv = layout.v_dim, ng = layout.num_v_groups, group = layout.v_group;
  s.codes.resize(static_cast<size_t>(kTokens) * dv);
  for (int t = 0; t < kTokens; ++t)
    for (int g = 0; g < ng; ++g) {
      float *y = rows + t * stride + g * group;
      for (int c = 0; c < group; ++c)
        y[c] /= v_ref[g];
      quantize_value_group(y, group, t, s.codes.data() + t * dv + g * group,
                           block + layout.v_scale + t * ng + g, block + layout.v_zero + t * ng + g);
    }
}

} // namespace

void hadamard(float *x, int count, int group) {
  kernels().rotate(x, count, group);
}

void append_row(const KvLayout &layout, const HeadCalibration &calibration, const float *k, const float *v,
                void *row) {
  const int dk = layout.k_dim, dv = layout.v_dim;
  thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(layout.row_dim()));
  float *x = scratch.data(), *y = x + dk;
  if (layout.quantized) {
    for (int c = 0; c < dk; ++c)
      x[c] = (k[calibration.k_order[c]] - calibration.k_mean[c]) / calibration.k_ref[c];
    for (int c = 0; c < dv; ++c)
      y[c] = clamp(v[c], -kHalfMax, kHalfMax);
    hadamard(y, dv, layout.v_group);
  } else {
    std::copy(k, k + dk, x);
    std::copy(v, v + dv, y);
  }
  if (layout.ring_fp32) {
    std::copy(x, x + dk + dv, static_cast<float *>(row));
    return;
  }
  for (int c = 0; c < dk + dv; ++c)
    x[c] = clamp(x[c], -kHalfMax, kHalfMax);
  kernels().to_half(x, static_cast<uint16_t *>(row), dk + dv);
}

void flush_block(const KvLayout &layout, const float *v_ref, const uint16_t *ring, int64_t index,
                 uint8_t *block) {
  thread_local Scratch s;
  const int stride = layout.row_dim();
  s.rows.resize(static_cast<size_t>(kTokens) * stride);
  for (int t = 0; t < kTokens; ++t) {
    const int64_t row = layout.row(layout.sinks + kTokens * index + t);
    kernels().from_half(ring + row * stride, s.rows.data() + t * stride, stride);
  }
  std::fill(block, block + layout.block_bytes, uint8_t{0});
  if (layout.int8)
    return quantize_int8_block(layout, v_ref, s.rows.data(), block);
  quantize_keys(layout, s.rows.data(), stride, s, block);
  pack_plane(s.codes.data(), layout.k_dim, layout.k_dim, 0, block + layout.k_lo);
  pack_plane(s.codes.data(), layout.k_dim, layout.promoted, 1, block + layout.k_hi);
  quantize_values(layout, v_ref, s.rows.data() + layout.k_dim, stride, s, block);
  pack_plane(s.codes.data(), layout.v_dim, layout.v_dim, 0, block + layout.v_codes);
}

} // namespace moec
