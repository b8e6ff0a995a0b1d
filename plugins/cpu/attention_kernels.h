// Attention over one KV head, written once over a SIMD type S (simd_*.h). Included only by kernels_*.cpp.
//
// K: lanes are tokens. The packed words of eight or sixteen tokens sit side by side, the low two bits of a
// lane become a float by a table look-up, one shift brings up the next channel. Promoted channels' upper bits
// are extra channels whose query is multiplied by four. Scale is folded into the query, zero point into a
// constant. V: lanes are channels; the scale of a token is folded into its probability. No sum's order
// depends on how many queries, rows or tokens are worked on together.
#pragma once
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

// Rows of row_bytes bytes, one per token -> words[w][token]; a partial last word is padded with zero codes.
void transpose_words(const uint8_t *rows, int row_bytes, uint32_t (*words)[kTokens]) {
  const int whole = row_bytes / 4, rest = row_bytes % 4;
  for (int t = 0; t < kTokens; ++t) {
    const uint8_t *row = rows + t * row_bytes;
    for (int w = 0; w < whole; ++w)
      std::memcpy(&words[w][t], row + 4 * w, 4);
    if (rest) {
      words[whole][t] = 0;
      for (int i = 0; i < rest; ++i)
        words[whole][t] |= static_cast<uint32_t>(row[4 * whole + i]) << (8 * i);
    }
  }
}

// The query of a block: q[channel][head] for the low plane, then for the high one, and the constant of each
// head.
template <int H> struct FoldedQuery {
  float low[kMaxHeadDim * H], high[kMaxHeadDim * H];
  float bias[H];
};

template <int H>
void fold_query(const KvLayout &layout, const uint8_t *block, const float *q, FoldedQuery<H> &out) {
  const auto *zero = reinterpret_cast<const int8_t *>(block + layout.k_zero);
  float partial[4][H] = {};
  for (int c = 0; c < layout.k_dim; ++c) {
    const float scale = kE4m3.value[block[layout.k_scale + c]], z = static_cast<float>(zero[c]);
    for (int h = 0; h < H; ++h) {
      const float x = q[h * layout.k_dim + c] * scale;
      out.low[c * H + h] = x;
      partial[c & 3][h] += x * z;
    }
  }
  for (int i = 0; i < layout.promoted * H; ++i)
    out.high[i] = 4.0f * out.low[i];
  for (int h = 0; h < H; ++h)
    out.bias[h] = (partial[0][h] + partial[1][h]) + (partial[2][h] + partial[3][h]);
}

// acc[h][v] += code * q over the channels of one plane, for V vectors of tokens from `token` on.
template <class S, int H, int V>
void add_plane(const uint32_t (*words)[kTokens], int channels, int token, const float *q,
               typename S::F (&acc)[H][V]) {
  for (int first = 0; first < channels; first += kCodesPerWord, q += kCodesPerWord * H) {
    typename S::I word[V];
    for (int v = 0; v < V; ++v)
      word[v] = S::load_words(words[first / kCodesPerWord] + token + v * S::kWidth);
    const int count = channels - first < kCodesPerWord ? channels - first : kCodesPerWord;
    for (int j = 0; j < count; ++j) {
      typename S::F code[V];
      for (int v = 0; v < V; ++v) {
        code[v] = S::low_code(word[v]);
        word[v] = S::drop_code(word[v]);
      }
      for (int h = 0; h < H; ++h) {
        const typename S::F weight = S::set1(q[j * H + h]);
        for (int v = 0; v < V; ++v)
          acc[h][v] = S::fma(code[v], weight, acc[h][v]);
      }
    }
  }
}

template <class S, int H>
void block_logits(const KvLayout &layout, const uint8_t *block, int64_t stride, const float *q, float *out) {
  constexpr int V = H >= 3 || S::kWidth > 8 ? 2 : 4;
  alignas(64) uint32_t low[kMaxWords][kTokens], high[kMaxWords][kTokens];
  FoldedQuery<H> folded;
  transpose_words(block + layout.k_lo, layout.k_dim / 4, low);
  transpose_words(block + layout.k_hi, layout.promoted / 4, high);
  fold_query<H>(layout, block, q, folded);
  for (int token = 0; token < kTokens; token += V * S::kWidth) {
    typename S::F acc[H][V];
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < V; ++v)
        acc[h][v] = S::set1(folded.bias[h]);
    add_plane<S, H, V>(low, layout.k_dim, token, folded.low, acc);
    add_plane<S, H, V>(high, layout.promoted, token, folded.high, acc);
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < V; ++v)
        S::store(out + h * stride + token + v * S::kWidth, acc[h][v]);
  }
}

// Probabilities of a block for one group of V's channels: p * scale per token, and the sum of p * zero.
template <int H> struct FoldedProbability {
  alignas(64) float scaled[kTokens][H];
  float low[H];
};

template <int H>
void fold_probability(const KvLayout &layout, const uint8_t *block, int group, float ref, int64_t stride,
                      const float *p, FoldedProbability<H> &out) {
  const uint8_t *scales = block + layout.v_scale + group, *zeros = block + layout.v_zero + group;
  const int ng = layout.num_v_groups;
  float partial[4][H] = {};
  for (int t = 0; t < kTokens; ++t) {
    const float scale = kE4m3.value[scales[t * ng]] * ref, zero = kE4m3.value[zeros[t * ng]] * ref;
    for (int h = 0; h < H; ++h) {
      out.scaled[t][h] = p[h * stride + t] * scale;
      partial[t & 3][h] += p[h * stride + t] * zero;
    }
  }
  for (int h = 0; h < H; ++h)
    out.low[h] = (partial[0][h] + partial[1][h]) + (partial[2][h] + partial[3][h]);
}

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
      weight[h] = S::set1(p.scaled[t][h]);
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

// Groups narrower than a vector (v_dim not a multiple of it).
template <int H>
void add_values_narrow(const uint8_t *codes, int row_bytes, int count, const FoldedProbability<H> &p,
                       float *acc, int v_dim) {
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < count; ++c) {
      float sum = acc[h * v_dim + c] + p.low[h];
      for (int t = 0; t < kTokens; ++t)
        sum += static_cast<float>(codes[t * row_bytes + c / 4] >> (2 * (c & 3)) & 3) * p.scaled[t][h];
      acc[h * v_dim + c] = sum;
    }
}

template <class S, int H>
void block_values(const KvLayout &layout, const uint8_t *block, const float *v_ref, int64_t stride,
                  const float *p, float *acc) {
  constexpr int C = S::kAccumulators / H < 4 ? 2 : 4;
  const int row_bytes = layout.v_dim / 4, width = layout.v_group;
  FoldedProbability<H> folded;
  for (int g = 0; g < layout.num_v_groups; ++g) {
    fold_probability<H>(layout, block, g, v_ref[g], stride, p, folded);
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
