// Fills a Kernels table from a wide SIMD type (attention) and one of eight lanes (matrices). Included only by
// kernels_*.cpp.
#pragma once
#include "attention_kernels.h"
#include "dense_kernels.h"
#include "gemv_kernels.h"
#include "int8_kernels.h"
#include "panel_kernels.h"
#include "ring_kernels.h"
#include "rotation_kernels.h"

namespace moec {
namespace {

// body(Size<heads>()) with a constant number of query heads.
template <class Body> void for_heads(int heads, const Body &body) {
  static_assert(kHeadsAtOnce == 4);
  switch (heads) {
  case 1:
    return body(Size<1>());
  case 2:
    return body(Size<2>());
  case 3:
    return body(Size<3>());
  default:
    return body(Size<4>());
  }
}

template <class Wide, class Narrow> Kernels make_kernels(const char *name) {
  Kernels k;
  k.name = name;
  k.to_half = [](const float *x, uint16_t *out, int count) {
    int i = 0;
    for (; i + Narrow::kWidth <= count; i += Narrow::kWidth)
      Narrow::store_half(out + i, Narrow::load(x + i));
    for (; i < count; ++i)
      out[i] = float_to_half(x[i]);
  };
  k.from_half = [](const uint16_t *x, float *out, int count) {
    int i = 0;
    for (; i + Narrow::kWidth <= count; i += Narrow::kWidth)
      Narrow::store(out + i, Narrow::load_half(x + i));
    for (; i < count; ++i)
      out[i] = half_to_float(x[i]);
  };
  k.rotate = rotate<Wide>;
  k.block_logits = [](const KvLayout &layout, const uint8_t *block, HeadSpan span, const float *q,
                      float *out) {
    for_heads(span.heads, [&](auto h) {
      (layout.int8 ? int8_block_logits<Wide, h.value> : block_logits<Wide, h.value>)(layout, block,
                                                                                     span.stride, q, out);
    });
  };
  k.block_values = [](const KvLayout &layout, const uint8_t *block, const float *v_ref, HeadSpan span,
                      const float *p, float *acc) {
    for_heads(span.heads, [&](auto h) {
      (layout.int8 ? int8_block_values<Wide, h.value> : block_values<Wide, h.value>)(layout, block, v_ref,
                                                                                     span.stride, p, acc);
    });
  };
  k.unpack_keys = [](const KvLayout &layout, const uint8_t *block, KeyPanel &panel) {
    (layout.int8 ? unpack_int8_keys<Wide> : unpack_keys<Wide>)(layout, block, panel);
  };
  k.panel_logits = panel_logits<Wide>;
  k.unpack_values = [](const KvLayout &layout, const uint8_t *block, const float *v_ref, ValuePanel &panel) {
    (layout.int8 ? unpack_int8_values<Wide> : unpack_values<Wide>)(layout, block, v_ref, panel);
  };
  k.panel_values = panel_values<Wide>;
  k.ring_logits = [](const KvLayout &layout, const void *rows, int count, HeadSpan span, const float *q,
                     float *out) {
    for_heads(span.heads, [&](auto h) {
      layout.ring_fp32 ? ring_logits<Wide, float, h.value>(layout, rows, count, span.stride, q, out)
                       : ring_logits<Wide, uint16_t, h.value>(layout, rows, count, span.stride, q, out);
    });
  };
  k.ring_values = [](const KvLayout &layout, const void *rows, int count, HeadSpan span, const float *p,
                     float *acc) {
    for_heads(span.heads, [&](auto h) {
      layout.ring_fp32 ? ring_values<Wide, float, h.value>(layout, rows, count, span.stride, p, acc)
                       : ring_values<Wide, uint16_t, h.value>(layout, rows, count, span.stride, p, acc);
    });
  };
  k.softmax = softmax<Wide>;
  k.quantize_vector = quantize_vector;
  k.int4_int8 = int4_int8<Narrow>;
  k.int4_fp32 = int4_fp32<Narrow>;
  k.bf16_fp32 = bf16_fp32<Narrow>;
  k.sigmoid = sigmoid<Wide>;
  k.dot = dot<Narrow>;
  k.quantize_int8 = quantize_int8;
  k.dense4 = dense<Narrow, 4>;
  k.dense8 = dense<Narrow, 8>;
  return k;
}

} // namespace
} // namespace moec
