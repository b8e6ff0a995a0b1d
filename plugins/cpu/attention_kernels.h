// Attention over one KV head, written once over a SIMD type S (simd_*.h). Included only by kernels_*.cpp.
//
// K: lanes are tokens. The packed words of eight or sixteen tokens sit side by side, the low two bits of a
// lane become a float by a table look-up, one shift brings up the next channel. Promoted channels' upper bits
// are extra channels whose query is multiplied by four. Scale is folded into the query, zero point into a
// constant. V: lanes are channels; the scale of a token is folded into its probability. No sum's order
// depends on how many queries, rows or tokens are worked on together.
#pragma once
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include "float_formats.h"
#include "kernels.h"

namespace moec {
namespace {

constexpr int kTokens = KvLayout::kBlockTokens;
constexpr int kCodesPerWord = 16;
constexpr int kMaxWords = kMaxHeadDim / kCodesPerWord;

struct E4m3Table {
  float value[256];
  E4m3Table() {
    for (int i = 0; i < 256; ++i)
      value[i] = e4m3_to_float(static_cast<uint8_t>(i));
  }
};
const E4m3Table kE4m3;

#ifdef __SSE2__
// Four words of four rows -> words[0..3][0..3].
inline void transpose_four(const uint8_t *rows, int row_bytes, uint32_t (*words)[kTokens]) {
  const auto load = [&](int t) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows + t * row_bytes));
  };
  const auto store = [&](int w, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(words[w]), x); };
  const __m128i a = _mm_unpacklo_epi32(load(0), load(1)), b = _mm_unpacklo_epi32(load(2), load(3));
  const __m128i c = _mm_unpackhi_epi32(load(0), load(1)), d = _mm_unpackhi_epi32(load(2), load(3));
  store(0, _mm_unpacklo_epi64(a, b));
  store(1, _mm_unpackhi_epi64(a, b));
  store(2, _mm_unpacklo_epi64(c, d));
  store(3, _mm_unpackhi_epi64(c, d));
}
#endif

// Rows of row_bytes bytes, one per token -> words[w][token]; a partial last word is padded with zero codes.
void transpose_words(const uint8_t *rows, int row_bytes, uint32_t (*words)[kTokens]) {
  const int whole = row_bytes / 4, rest = row_bytes % 4;
  int first = 0; // word that has yet to be read
#ifdef __SSE2__
  for (; first + 4 <= whole; first += 4)
    for (int t = 0; t < kTokens; t += 4)
      transpose_four(rows + t * row_bytes + 4 * first, row_bytes,
                     reinterpret_cast<uint32_t (*)[kTokens]>(&words[first][t]));
#endif
  for (int t = 0; t < kTokens; ++t) {
    const uint8_t *row = rows + t * row_bytes;
    for (int w = first; w < whole; ++w)
      std::memcpy(&words[w][t], row + 4 * w, 4);
    if (rest) {
      words[whole][t] = 0;
      for (int i = 0; i < rest; ++i)
        words[whole][t] |= static_cast<uint32_t>(row[4 * whole + i]) << (8 * i);
    }
  }
}

void load_key_scales(const KvLayout &layout, const uint8_t *block, KeyScales &out) {
  const auto *zero = reinterpret_cast<const int8_t *>(block + layout.k_zero);
  for (int c = 0; c < layout.k_dim; ++c) {
    out.scale[c] = kE4m3.value[block[layout.k_scale + c]];
    out.zero[c] = static_cast<float>(zero[c]);
  }
}

// folded[c] = q[c] * scale[c]; returns the sum of folded[c] * zero[c]: what the zero points add to every
// logit.
template <class S> float fold_query(const KeyScales &scales, int k_dim, const float *q, float *folded) {
  typename S::F acc = S::set1(0.0f);
  int c = 0;
  for (; c + S::kWidth <= k_dim; c += S::kWidth) {
    const typename S::F x = S::mul(S::load(q + c), S::load(scales.scale + c));
    S::store(folded + c, x);
    acc = S::fma(x, S::load(scales.zero + c), acc);
  }
  float sum = S::sum(acc);
  for (; c < k_dim; ++c) {
    folded[c] = q[c] * scales.scale[c];
    sum += folded[c] * scales.zero[c];
  }
  return sum;
}

// The packed K codes of a block, transposed: lanes are tokens.
struct KeyWords {
  alignas(64) uint32_t low[kMaxWords][kTokens], high[kMaxWords][kTokens];
};

void load_key_words(const KvLayout &layout, const uint8_t *block, KeyWords &out) {
  transpose_words(block + layout.k_lo, layout.k_dim / 4, out.low);
  transpose_words(block + layout.k_hi, layout.promoted / 4, out.high);
}

// Calls use(channel, code) for every channel in order; code holds the K codes of V vectors of tokens.
template <class S, int V, class Use>
void for_key_codes(const KvLayout &layout, const KeyWords &words, int token, const Use &use) {
  using F = typename S::F;
  for (int first = 0; first < layout.k_dim; first += kCodesPerWord) {
    const int w = first / kCodesPerWord;
    const int count = layout.k_dim - first < kCodesPerWord ? layout.k_dim - first : kCodesPerWord;
    const int promoted = layout.promoted - first < count ? layout.promoted - first : count;
    typename S::I low[V], high[V];
    F code[V];
    for (int v = 0; v < V; ++v)
      low[v] = S::load_words(words.low[w] + token + v * S::kWidth);
    int j = 0;
    if (promoted > 0) {
      for (int v = 0; v < V; ++v)
        high[v] = S::load_words(words.high[w] + token + v * S::kWidth);
      for (; j < promoted; ++j) {
        for (int v = 0; v < V; ++v) {
          code[v] = S::fma(S::low_code(high[v]), S::set1(4.0f), S::low_code(low[v]));
          low[v] = S::drop_code(low[v]);
          high[v] = S::drop_code(high[v]);
        }
        use(first + j, code);
      }
    }
    for (; j < count; ++j) {
      for (int v = 0; v < V; ++v) {
        code[v] = S::low_code(low[v]);
        low[v] = S::drop_code(low[v]);
      }
      use(first + j, code);
    }
  }
}

template <class S, int H>
void block_logits(const KvLayout &layout, const uint8_t *block, int64_t stride, const float *q, float *out) {
  constexpr int V = H >= 3 || S::kWidth > 8 ? 2 : 4;
  using F = typename S::F;
  KeyWords words;
  KeyScales scales;
  load_key_words(layout, block, words);
  load_key_scales(layout, block, scales);
  alignas(64) float folded[H][kMaxHeadDim];
  float bias[H];
  for (int h = 0; h < H; ++h)
    bias[h] = fold_query<S>(scales, layout.k_dim, q + h * layout.k_dim, folded[h]);
  for (int token = 0; token < kTokens; token += V * S::kWidth) {
    F acc[H][V];
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < V; ++v)
        acc[h][v] = S::set1(bias[h]);
    for_key_codes<S, V>(layout, words, token, [&](int c, const F(&code)[V]) {
      for (int h = 0; h < H; ++h) {
        const F weight = S::set1(folded[h][c]);
        for (int v = 0; v < V; ++v)
          acc[h][v] = S::fma(code[v], weight, acc[h][v]);
      }
    });
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < V; ++v)
        S::store(out + h * stride + token + v * S::kWidth, acc[h][v]);
  }
}

void load_value_scales(const KvLayout &layout, const uint8_t *block, int group, float ref, ValueScales &out) {
  const uint8_t *scales = block + layout.v_scale + group, *zeros = block + layout.v_zero + group;
  for (int t = 0; t < kTokens; ++t) {
    out.scale[t] = kE4m3.value[scales[t * layout.num_v_groups]] * ref;
    out.zero[t] = kE4m3.value[zeros[t * layout.num_v_groups]] * ref;
  }
}

// folded[t] = p[t] * scale[t]; returns the sum of p[t] * zero[t]: what the zeros add to every channel of the
// group.
template <class S> float fold_probability(const ValueScales &scales, const float *p, float *folded) {
  typename S::F acc = S::set1(0.0f);
  for (int t = 0; t < kTokens; t += S::kWidth) {
    const typename S::F x = S::load(p + t);
    S::store(folded + t, S::mul(x, S::load(scales.scale + t)));
    acc = S::fma(x, S::load(scales.zero + t), acc);
  }
  return S::sum(acc);
}

template <int H> struct FoldedProbability {
  alignas(64) float scaled[H][kTokens];
  float low[H];
};

// acc[h][0 .. C*width-1] += values of C vectors of channels; codes points at the first channel's byte of
// token 0.
template <class S, int H, int C>
void add_values(const uint8_t *codes, int row_bytes, const FoldedProbability<H> &p, float *acc, int v_dim) {
  typename S::F sum[H][C];
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c)
      sum[h][c] = S::add(S::load(acc + h * v_dim + c * S::kWidth), S::set1(p.low[h]));
  for (int t = 0; t < kTokens; ++t, codes += row_bytes) {
    typename S::F weight[H];
    for (int h = 0; h < H; ++h)
      weight[h] = S::set1(p.scaled[h][t]);
    for (int c = 0; c < C; ++c) {
      uint32_t word; // the section behind the codes makes reading past a narrow vector's bytes harmless
      std::memcpy(&word, codes + c * S::kWidth / 4, 4);
      const typename S::F code = S::low_code(S::spread(word));
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
void add_values_narrow(const uint8_t *codes, int row_bytes, int count, const FoldedProbability<H> &p,
                       float *acc, int v_dim) {
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < count; ++c) {
      float sum = acc[h * v_dim + c] + p.low[h];
      for (int t = 0; t < kTokens; ++t)
        sum += static_cast<float>(codes[t * row_bytes + c / 4] >> (2 * (c & 3)) & 3) * p.scaled[h][t];
      acc[h * v_dim + c] = sum;
    }
}

template <class S, int H>
void block_values(const KvLayout &layout, const uint8_t *block, const float *v_ref, int64_t stride,
                  const float *p, float *acc) {
  constexpr int C = S::kAccumulators / H < 4 ? 2 : 4;
  const int row_bytes = layout.v_dim / 4, width = layout.v_group;
  ValueScales scales;
  FoldedProbability<H> folded;
  for (int g = 0; g < layout.num_v_groups; ++g) {
    load_value_scales(layout, block, g, v_ref[g], scales);
    for (int h = 0; h < H; ++h)
      folded.low[h] = fold_probability<S>(scales, p + h * stride, folded.scaled[h]);
    const uint8_t *codes = block + layout.v_codes + g * width / 4;
    float *out = acc + g * width;
    int c = 0;
    for (; c + C * S::kWidth <= width; c += C * S::kWidth)
      add_values<S, H, C>(codes + c / 4, row_bytes, folded, out + c, layout.v_dim);
    for (; c + S::kWidth <= width; c += S::kWidth)
      add_values<S, H, 1>(codes + c / 4, row_bytes, folded, out + c, layout.v_dim);
    if (c < width)
      add_values_narrow<H>(codes + c / 4, row_bytes, width - c, folded, out + c, layout.v_dim);
  }
}

} // namespace
} // namespace moec
