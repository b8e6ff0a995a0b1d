// Attention over one block of int8 codes, straight from the codes. Included only by kernels_*.cpp.
//
// K: lanes are tokens, as in attention_kernels.h, so codes are transposed, sixteen channels at a time. V:
// lanes are channels. Additions run in the order of panel_kernels.h: decode has the bits of prefill.
#pragma once
#include "attention_kernels.h"
#include <algorithm>

namespace moec {
namespace {

constexpr int kChannelsAtOnce = 16; // of a transposition

// Steps of E4M3 amplitudes, as moec/reference/kv_int8.py divides them.
template <class S> void int8_steps(const uint8_t *amplitudes, int count, float *out) {
  int i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth)
    S::store(out + i, S::div(S::load_e4m3(amplitudes + i), S::set1(127.0f)));
  for (; i < count; ++i)
    out[i] = e4m3_to_float(amplitudes[i]) / 127.0f;
}

// Steps of V, token by token.
struct Int8ValueSteps {
  alignas(64) float value[kTokens * kMaxHeadDim / 4];
};

// scale[token] of one group, in the units of rotated V.
void int8_group_scales(const Int8ValueSteps &steps, int groups, int group, float ref, float *scale) {
  for (int t = 0; t < kTokens; ++t)
    scale[t] = steps.value[t * groups + group] * ref;
}

// out[i] = a[i] * b[i]; what fold_query and fold_probability add for zeros is 0 here.
template <class S> void int8_fold(const float *a, const float *b, int count, float *out) {
  int i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth)
    S::store(out + i, S::mul(S::load(a + i), S::load(b + i)));
  for (; i < count; ++i)
    out[i] = a[i] * b[i];
}

const int8_t *int8_section(const uint8_t *block, size_t offset) {
  return reinterpret_cast<const int8_t *>(block + offset);
}

// The K codes of a block, transposed: lanes are tokens.
struct Int8Channels {
  alignas(64) int8_t codes[kMaxHeadDim][kTokens];
};

// All of them first: right behind the stores of a transposition, loads of their parts would wait.
template <class S> void load_int8_channels(const KvLayout &layout, const uint8_t *block, Int8Channels &out) {
  const int8_t *codes = int8_section(block, layout.k_lo);
  const int dk = layout.k_dim;
  int c = 0;
  for (; c + kChannelsAtOnce <= dk; c += kChannelsAtOnce)
    S::transpose_bytes(codes + c, dk, out.codes + c);
  for (; c < dk; ++c)
    for (int t = 0; t < kTokens; ++t)
      out.codes[c][t] = codes[t * dk + c];
}

// Logits of V vectors of tokens. Not inlined: in its caller GCC keeps some of the sums in memory.
template <class S, int H, int V>
__attribute__((noinline)) void int8_logits_tile(const Int8Channels &channels, int k_dim, int token,
                                                const float (*folded)[kMaxHeadDim], int64_t stride,
                                                float *out) {
  typename S::F acc[H][V];
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v)
      acc[h][v] = S::set1(0.0f);
  for (int c = 0; c < k_dim; ++c) {
    typename S::F weight[H];
    for (int h = 0; h < H; ++h)
      weight[h] = S::set1(folded[h][c]);
    for (int v = 0; v < V; ++v) {
      const typename S::F code = S::load_int8(channels.codes[c] + token + v * S::kWidth);
      for (int h = 0; h < H; ++h)
        acc[h][v] = S::fma(code, weight[h], acc[h][v]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v)
      S::store(out + h * stride + token + v * S::kWidth, acc[h][v]);
}

template <class S, int H>
void int8_block_logits(const KvLayout &layout, const uint8_t *block, int64_t stride, const float *q,
                       float *out) {
  constexpr int kMost = S::kAccumulators / H, kVectors = kTokens / S::kWidth;
  constexpr int V = kMost >= kVectors ? kVectors : kMost >= 4 ? 4 : 2;
  Int8Channels channels;
  load_int8_channels<S>(layout, block, channels);
  alignas(64) float steps[kMaxHeadDim], folded[H][kMaxHeadDim];
  int8_steps<S>(block + layout.k_scale, layout.k_dim, steps);
  for (int h = 0; h < H; ++h)
    int8_fold<S>(q + h * layout.k_dim, steps, layout.k_dim, folded[h]);
  for (int token = 0; token < kTokens; token += V * S::kWidth)
    int8_logits_tile<S, H, V>(channels, layout.k_dim, token, folded, stride, out);
}

// As add_values, of bytes. Not inlined: in its caller GCC keeps a sum of the loop in memory.
template <class S, int H, int C>
__attribute__((noinline)) void add_int8_values(const int8_t *codes, const float (*p)[kTokens], float *acc,
                                               int v_dim) {
  typename S::F sum[H][C];
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c)
      sum[h][c] = S::load(acc + h * v_dim + c * S::kWidth);
  for (int t = 0; t < kTokens; ++t, codes += v_dim) {
    typename S::F weight[H];
    for (int h = 0; h < H; ++h)
      weight[h] = S::set1(p[h][t]);
    for (int c = 0; c < C; ++c) {
      const typename S::F code = S::load_int8(codes + c * S::kWidth);
      for (int h = 0; h < H; ++h)
        sum[h][c] = S::fma(code, weight[h], sum[h][c]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c)
      S::store(acc + h * v_dim + c * S::kWidth, sum[h][c]);
}

// Channels that do not fill a vector.
template <int H>
void add_int8_values_narrow(const int8_t *codes, int count, const float (*p)[kTokens], float *acc,
                            int v_dim) {
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < count; ++c) {
      float sum = acc[h * v_dim + c];
      for (int t = 0; t < kTokens; ++t)
        sum += static_cast<float>(codes[t * v_dim + c]) * p[h][t];
      acc[h * v_dim + c] = sum;
    }
}

template <class S, int H>
void int8_block_values(const KvLayout &layout, const uint8_t *block, const float *v_ref, int64_t stride,
                       const float *p, float *acc) {
  constexpr int C = S::kAccumulators / H < 4 ? 2 : 4;
  const int dv = layout.v_dim, width = layout.v_group;
  Int8ValueSteps steps;
  alignas(64) float scale[kTokens], folded[H][kTokens];
  int8_steps<S>(block + layout.v_scale, kTokens * layout.num_v_groups, steps.value);
  for (int g = 0; g < layout.num_v_groups; ++g) {
    int8_group_scales(steps, layout.num_v_groups, g, v_ref[g], scale);
    for (int h = 0; h < H; ++h)
      int8_fold<S>(p + h * stride, scale, kTokens, folded[h]);
    const int8_t *codes = int8_section(block, layout.v_codes) + g * width;
    float *out = acc + g * width;
    int c = 0;
    for (; c + C * S::kWidth <= width; c += C * S::kWidth)
      add_int8_values<S, H, C>(codes + c, folded, out + c, dv);
    for (; c + S::kWidth <= width; c += S::kWidth)
      add_int8_values<S, H, 1>(codes + c, folded, out + c, dv);
    if (c < width)
      add_int8_values_narrow<H>(codes + c, width - c, folded, out + c, dv);
  }
}

// One block as panels: codes as floats, the step as the scale.
template <class S> void unpack_int8_keys(const KvLayout &layout, const uint8_t *block, KeyPanel &panel) {
  Int8Channels channels;
  load_int8_channels<S>(layout, block, channels);
  int8_steps<S>(block + layout.k_scale, layout.k_dim, panel.scales.scale);
  std::fill_n(panel.scales.zero, layout.k_dim, 0.0f);
  for (int c = 0; c < layout.k_dim; ++c)
    for (int t = 0; t < kTokens; t += S::kWidth)
      S::store(panel.codes[c] + t, S::load_int8(channels.codes[c] + t));
}

template <class S>
void unpack_int8_values(const KvLayout &layout, const uint8_t *block, const float *v_ref, ValuePanel &panel) {
  const int8_t *codes = int8_section(block, layout.v_codes);
  Int8ValueSteps steps;
  int8_steps<S>(block + layout.v_scale, kTokens * layout.num_v_groups, steps.value);
  for (int g = 0; g < layout.num_v_groups; ++g) {
    int8_group_scales(steps, layout.num_v_groups, g, v_ref[g], panel.scales[g].scale);
    std::fill_n(panel.scales[g].zero, kTokens, 0.0f);
  }
  for (int t = 0; t < kTokens; ++t, codes += layout.v_dim) {
    int c = 0;
    for (; c + S::kWidth <= layout.v_dim; c += S::kWidth)
      S::store(panel.codes[t] + c, S::load_int8(codes + c));
    for (; c < layout.v_dim; ++c)
      panel.codes[t][c] = codes[c];
  }
}

} // namespace
} // namespace moec
