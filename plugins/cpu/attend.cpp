#include "attend.h"
#include "kernels.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace moec {
namespace {

constexpr int kTokens = KvLayout::kBlockTokens;
constexpr float kLowest = -3.0e38f;

// Consecutive ring rows.
struct Rows {
  int64_t first;
  int count;
};

// What the token at position n sees, in the order in which it is added up: blocks, then runs of ring rows.
struct View {
  int64_t blocks = 0;
  Rows runs[3];
  int num_runs = 0;
  int64_t tokens = 0;

  View(const KvLayout &layout, int64_t n) {
    blocks = layout.blocks_at(n);
    tokens = blocks * kTokens;
    if (layout.quantized)
      add(layout, 0, std::min<int64_t>(layout.sinks, n + 1));
    const int64_t oldest = layout.quantized ? layout.sinks + blocks * kTokens
                           : layout.window  ? n - layout.window + 1
                                            : 0;
    add(layout, std::max<int64_t>(oldest, 0), n + 1);
  }
  // Tokens [begin, end), which wrap at most once.
  void add(const KvLayout &layout, int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = layout.row(begin);
      const int64_t room = (begin < layout.sinks ? layout.sinks : layout.ring_rows()) - row;
      const int64_t count = std::min(end - begin, room);
      runs[num_runs++] = {row, static_cast<int>(count)};
      tokens += count;
      begin += count;
    }
  }
};

struct Scratch {
  std::vector<float> q, logits, acc;
};

// q' = q[order] * ref * scale; for layers without blocks q * scale.
void prepare_queries(const AttentionParams &p, const HeadCalibration &c, const float *q, int heads,
                     float *out) {
  const int dk = p.layout.k_dim;
  for (int h = 0; h < heads; ++h, q += dk, out += dk)
    for (int i = 0; i < dk; ++i)
      out[i] = p.layout.quantized ? q[c.k_order[i]] * c.k_ref[i] * p.scale : q[i] * p.scale;
}

// The sink logit of a head, with the centring of the keys undone; kLowest where there is none.
float sink_logit(const AttentionParams &p, const HeadState &s, const float *q, int head) {
  if (!p.has_sink_logits)
    return kLowest;
  if (!p.layout.quantized)
    return s.sink_logits[head];
  float shift = 0;
  for (int i = 0; i < p.layout.k_dim; ++i)
    shift += q[s.calibration.k_order[i]] * s.calibration.k_mean[i];
  return s.sink_logits[head] - p.scale * shift;
}

void compute_logits(const AttentionParams &p, const HeadState &s, const View &view, HeadSpan span,
                    const float *q, float *logits) {
  const Kernels &k = kernels();
  for (int64_t b = 0; b < view.blocks; ++b, logits += kTokens)
    k.block_logits(p.layout, s.blocks + b * p.layout.block_bytes, span, q, logits);
  for (int i = 0; i < view.num_runs; logits += view.runs[i++].count)
    k.ring_logits(p.layout, s.ring + view.runs[i].first * p.layout.row_bytes(), view.runs[i].count, span, q,
                  logits);
}

void add_values(const AttentionParams &p, const HeadState &s, const View &view, HeadSpan span,
                const float *weights, float *acc) {
  const Kernels &k = kernels();
  for (int64_t b = 0; b < view.blocks; ++b, weights += kTokens)
    k.block_values(p.layout, s.blocks + b * p.layout.block_bytes, s.calibration.v_ref, span, weights, acc);
  for (int i = 0; i < view.num_runs; weights += view.runs[i++].count)
    k.ring_values(p.layout, s.ring + view.runs[i].first * p.layout.row_bytes(), view.runs[i].count, span,
                  weights, acc);
}

void apply_softcap(float cap, float *logits, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    logits[i] = cap * std::tanh(logits[i] / cap);
}

// Query heads [first, first + count) of this KV head; q and out start at the first.
void attend(const AttentionParams &p, const HeadState &s, const View &view, int first, int count,
            const float *q, float *out) {
  thread_local Scratch scratch;
  const int dk = p.layout.k_dim, dv = p.layout.v_dim;
  const HeadSpan span{count, (view.tokens + 15) / 16 * 16};
  scratch.q.resize(static_cast<size_t>(count) * dk);
  scratch.logits.resize(static_cast<size_t>(count) * span.stride);
  scratch.acc.assign(static_cast<size_t>(count) * dv, 0.0f);
  prepare_queries(p, s.calibration, q, count, scratch.q.data());
  compute_logits(p, s, view, span, scratch.q.data(), scratch.logits.data());
  float sums[kHeadsAtOnce];
  for (int h = 0; h < count; ++h) {
    float *logits = scratch.logits.data() + h * span.stride;
    if (p.softcap > 0)
      apply_softcap(p.softcap, logits, view.tokens);
    const float sink = sink_logit(p, s, q + h * dk, first + h);
    const float top = kernels().softmax(logits, view.tokens, sink, &sums[h]);
    if (p.has_sink_logits)
      sums[h] += std::exp(sink - top);
  }
  add_values(p, s, view, span, scratch.logits.data(), scratch.acc.data());
  for (int h = 0; h < count; ++h) {
    float *y = scratch.acc.data() + h * dv;
    for (int c = 0; c < dv; ++c)
      y[c] /= sums[h];
    if (p.layout.quantized)
      hadamard(y, dv, p.layout.v_group);
    std::copy(y, y + dv, out + h * dv);
  }
}

} // namespace

void step(const AttentionParams &p, const HeadState &s, int64_t length, const float *q, const float *k,
          const float *v, float *out) {
  const KvLayout &layout = p.layout;
  append_row(layout, s.calibration, k, v, s.ring + layout.row(length) * layout.row_bytes());
  const View view(layout, length);
  const int group = p.query_heads / p.kv_heads, passes = (group + kHeadsAtOnce - 1) / kHeadsAtOnce;
  for (int i = 0; i < passes; ++i) {
    const int first = group * i / passes, end = group * (i + 1) / passes;
    attend(p, s, view, first, end - first, q + first * layout.k_dim, out + first * layout.v_dim);
  }
  const int64_t block = layout.blocks_at(length);
  if (layout.blocks_at(length + 1) > block)
    flush_block(layout, s.calibration.v_ref, reinterpret_cast<const uint16_t *>(s.ring), block,
                s.blocks + block * layout.block_bytes);
}

} // namespace moec
