// The inner loops that exist once per instruction set, and which of them this process uses.
#pragma once
#include "kv_layout.h"

namespace moec {

constexpr int kMaxHeadDim = 512;
constexpr int kHeadsAtOnce = 4; // query heads that share one pass over a KV head; more would spill registers

// A number known to the compiler.
template <int N> struct Size {
  static constexpr int value = N;
};

// Query heads in one pass: q is [heads][k_dim] (permuted, scaled), out and p are [heads][stride].
struct HeadSpan {
  int heads;
  int64_t stride;
};

// Scales and zero points of a block's K channels.
struct KeyScales {
  alignas(64) float scale[kMaxHeadDim], zero[kMaxHeadDim];
};

// Scales and zeros of one group of a block's V, per token, in the units of rotated V.
struct ValueScales {
  alignas(64) float scale[KvLayout::kBlockTokens], zero[KvLayout::kBlockTokens];
};

// One unpacked block: codes as floats.
struct KeyPanel {
  alignas(64) float codes[kMaxHeadDim][KvLayout::kBlockTokens];
  KeyScales scales;
};
struct ValuePanel {
  alignas(64) float codes[KvLayout::kBlockTokens][kMaxHeadDim];
  ValueScales scales[kMaxHeadDim / 4];
};

// Activations of one token as 15-bit integers in groups of 64, each split into two int8: x = (128*high + low)
// * scale. One int8 alone would cost 1.4 % of an expert's output. Even columns come first, then odd ones.
struct QuantizedVector {
  static constexpr int kPlanes = 2; // high, low
  int8_t *codes;                    // [groups][2][64]
  float *scales;                    // [groups]
  int32_t *offsets; // [groups][2][8]: what undoes the offset 8 of the weight codes, spread over the lanes
};

// Activations of one token as int8 in groups of 64, for dense layers: x = code * scale. Twice, because codes
// of four bits meet even columns first, then odd ones, and codes of eight bits the columns as they are.
struct Int8Vector {
  int8_t *split, *plain;        // [groups][64]
  float *scales;                // [groups]; NaN where a value is not finite
  int32_t *offsets4, *offsets8; // [groups][8]: what undoes the offsets 8 and 128 of the weight codes
};

// Rows of a quantized matrix.
struct DenseRows {
  const uint8_t *codes; // [rows][groups*32] with four bits, [rows][groups*64] with eight
  const float *scales;  // [rows][groups]
  int groups;
};

struct Int4Matrix {
  const uint8_t *codes;   // [rows][groups*32]
  const uint16_t *scales; // fp16 [rows][groups]
  int columns;
};

struct Kernels {
  const char *name;
  void (*to_half)(const float *x, uint16_t *out, int count);
  void (*from_half)(const uint16_t *x, float *out, int count);

  // Orthonormal Walsh-Hadamard transform of each group (a power of two up to 64) of x[0, count), in place.
  void (*rotate)(float *x, int count, int group);

  // out[h][0..63] = q[h] . dequantized K of a block
  void (*block_logits)(const KvLayout &layout, const uint8_t *block, HeadSpan span, const float *q,
                       float *out);
  // acc[h][0..v_dim-1] += sum over 64 tokens of p[h][t] * dequantized rotated V
  void (*block_values)(const KvLayout &layout, const uint8_t *block, const float *v_ref, HeadSpan span,
                       const float *p, float *acc);
  // The same in two steps, for any number of heads; the panels are the caller's scratch.
  void (*unpack_keys)(const KvLayout &layout, const uint8_t *block, KeyPanel &panel);
  void (*panel_logits)(const KvLayout &layout, const KeyPanel &panel, HeadSpan span, const float *q,
                       float *out);
  void (*unpack_values)(const KvLayout &layout, const uint8_t *block, const float *v_ref, ValuePanel &panel);
  void (*panel_values)(const KvLayout &layout, const ValuePanel &panel, HeadSpan span, const float *p,
                       float *acc);
  // The same on `count` consecutive ring rows.
  void (*ring_logits)(const KvLayout &layout, const void *rows, int count, HeadSpan span, const float *q,
                      float *out);
  void (*ring_values)(const KvLayout &layout, const void *rows, int count, HeadSpan span, const float *p,
                      float *acc);
  // x[i] = exp(x[i] - m) with m = max(x, floor), returned; *sum gets their sum. x has room for `count`
  // rounded up to 16.
  float (*softmax)(float *x, int64_t count, float floor, float *sum);

  void (*quantize_vector)(const float *x, int count, const QuantizedVector &out);
  // out[i] = 1 / (1 + exp(-slope * x[i]))
  void (*sigmoid)(const float *x, float slope, float *out, int count);
  // The fp32 vectors of int4_fp32 are in the order of QuantizedVector: even columns, then odd ones, per
  // group. y[vector][row - begin] for rows [begin, end) of one matrix and `count` vectors; y has `stride`
  // floats a vector.
  void (*int4_int8)(const Int4Matrix &w, int begin, int end, const QuantizedVector *x, int count, float *y,
                    int64_t stride);
  void (*int4_fp32)(const Int4Matrix &w, int begin, int end, const float *const *x, int count, float *y,
                    int64_t stride);
  void (*bf16_fp32)(const uint16_t *w, int columns, int begin, int end, const float *const *x, int count,
                    float *y, int64_t stride);
  float (*dot)(const float *a, const float *b, int count);

  void (*quantize_int8)(const float *x, int count, const Int8Vector &out);
  // y[vector][row] for `rows` rows and `count` vectors; y has `stride` floats a vector.
  void (*dense4)(const DenseRows &w, int rows, const Int8Vector *x, int count, float *y, int64_t stride);
  void (*dense8)(const DenseRows &w, int rows, const Int8Vector *x, int count, float *y, int64_t stride);
};

const Kernels &kernels(); // the best for this CPU, or what MOEC_CPU_ISA names (portable | avx2 | avx512)

const Kernels &portable_kernels();
const Kernels &avx2_kernels();
const Kernels &avx512_kernels();

} // namespace moec
