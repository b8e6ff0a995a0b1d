// Attention of many queries over one block, for prefill: the codes are unpacked once and used by every query
// of a chunk. Included only by kernels_*.cpp. Additions run in the order of attention_kernels.h: same bits as
// in decode.
#pragma once
#include "attention_kernels.h"

namespace moec {
namespace {

template <class S> void unpack_keys(const KvLayout &layout, const uint8_t *block, KeyPanel &panel) {
  constexpr int V = 2;
  KeyWords words;
  load_key_words(layout, block, words);
  load_key_scales(layout, block, panel.scales);
  for (int token = 0; token < kTokens; token += V * S::kWidth)
    for_key_codes<S, V>(layout, words, token, [&](int c, const typename S::F(&code)[V]) {
      for (int v = 0; v < V; ++v)
        S::store(panel.codes[c] + token + v * S::kWidth, code[v]);
    });
}

template <class S, int H, int V>
void panel_logits_tile(const KvLayout &layout, const KeyPanel &panel, int64_t stride, const float *q,
                       float *out) {
  alignas(64) float folded[H][kMaxHeadDim];
  float bias[H];
  for (int h = 0; h < H; ++h)
    bias[h] = fold_query<S>(panel.scales, layout.k_dim, q + h * layout.k_dim, folded[h]);
  for (int token = 0; token < kTokens; token += V * S::kWidth) {
    typename S::F acc[H][V];
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < V; ++v)
        acc[h][v] = S::set1(bias[h]);
    for (int c = 0; c < layout.k_dim; ++c) {
      typename S::F code[V];
      for (int v = 0; v < V; ++v)
        code[v] = S::load(panel.codes[c] + token + v * S::kWidth);
      for (int h = 0; h < H; ++h) {
        const typename S::F weight = S::set1(folded[h][c]);
        for (int v = 0; v < V; ++v)
          acc[h][v] = S::fma(code[v], weight, acc[h][v]);
      }
    }
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < V; ++v)
        S::store(out + h * stride + token + v * S::kWidth, acc[h][v]);
  }
}

template <class S>
void panel_logits(const KvLayout &layout, const KeyPanel &panel, HeadSpan span, const float *q, float *out) {
  constexpr int H = 6, V = S::kAccumulators / H < 2 ? 1 : S::kAccumulators / H;
  const int dk = layout.k_dim;
  int h = 0;
  for (; h + H <= span.heads; h += H)
    panel_logits_tile<S, H, V>(layout, panel, span.stride, q + h * dk, out + h * span.stride);
  for (; h + 2 <= span.heads; h += 2)
    panel_logits_tile<S, 2, V>(layout, panel, span.stride, q + h * dk, out + h * span.stride);
  for (; h < span.heads; ++h)
    panel_logits_tile<S, 1, V>(layout, panel, span.stride, q + h * dk, out + h * span.stride);
}

template <class S>
void unpack_values(const KvLayout &layout, const uint8_t *block, const float *v_ref, ValuePanel &panel) {
  const uint8_t *codes = block + layout.v_codes;
  for (int g = 0; g < layout.num_v_groups; ++g)
    load_value_scales(layout, block, g, v_ref[g], panel.scales[g]);
  for (int t = 0; t < kTokens; ++t, codes += layout.v_dim / 4) {
    int c = 0;
    for (; c + S::kWidth <= layout.v_dim; c += S::kWidth) {
      uint32_t word;
      std::memcpy(&word, codes + c / 4, 4);
      S::store(panel.codes[t] + c, S::low_code(S::spread(word)));
    }
    for (; c < layout.v_dim; ++c)
      panel.codes[t][c] = static_cast<float>(codes[c / 4] >> (2 * (c & 3)) & 3);
  }
}

template <class S, int H, int C>
void panel_values_tile(const ValuePanel &panel, int channel, const FoldedProbability<H> &p, float *acc,
                       int v_dim) {
  typename S::F sum[H][C];
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c)
      sum[h][c] = S::add(S::load(acc + h * v_dim + channel + c * S::kWidth), S::set1(p.low[h]));
  for (int t = 0; t < kTokens; ++t) {
    typename S::F code[C];
    for (int c = 0; c < C; ++c)
      code[c] = S::load(panel.codes[t] + channel + c * S::kWidth);
    for (int h = 0; h < H; ++h) {
      const typename S::F weight = S::set1(p.scaled[h][t]);
      for (int c = 0; c < C; ++c)
        sum[h][c] = S::fma(code[c], weight, sum[h][c]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c)
      S::store(acc + h * v_dim + channel + c * S::kWidth, sum[h][c]);
}

template <class S, int H>
void panel_values_heads(const KvLayout &layout, const ValuePanel &panel, int64_t stride, const float *p,
                        float *acc) {
  constexpr int C = S::kAccumulators / 6 < 2 ? 1 : S::kAccumulators / 6;
  const int width = layout.v_group, dv = layout.v_dim;
  FoldedProbability<H> folded;
  for (int g = 0; g < layout.num_v_groups; ++g) {
    for (int h = 0; h < H; ++h)
      folded.low[h] = fold_probability<S>(panel.scales[g], p + h * stride, folded.scaled[h]);
    int c = g * width;
    const int end = c + width;
    for (; c + C * S::kWidth <= end; c += C * S::kWidth)
      panel_values_tile<S, H, C>(panel, c, folded, acc, dv);
    for (; c + S::kWidth <= end; c += S::kWidth)
      panel_values_tile<S, H, 1>(panel, c, folded, acc, dv);
    for (; c < end; ++c)
      for (int h = 0; h < H; ++h) {
        float sum = acc[h * dv + c] + folded.low[h];
        for (int t = 0; t < kTokens; ++t)
          sum += panel.codes[t][c] * folded.scaled[h][t];
        acc[h * dv + c] = sum;
      }
  }
}

template <class S>
void panel_values(const KvLayout &layout, const ValuePanel &panel, HeadSpan span, const float *p,
                  float *acc) {
  constexpr int H = 6;
  const int dv = layout.v_dim;
  int h = 0;
  for (; h + H <= span.heads; h += H)
    panel_values_heads<S, H>(layout, panel, span.stride, p + h * span.stride, acc + h * dv);
  for (; h + 2 <= span.heads; h += 2)
    panel_values_heads<S, 2>(layout, panel, span.stride, p + h * span.stride, acc + h * dv);
  for (; h < span.heads; ++h)
    panel_values_heads<S, 1>(layout, panel, span.stride, p + h * span.stride, acc + h * dv);
}

} // namespace
} // namespace moec
