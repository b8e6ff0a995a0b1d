#include "attend.h"
#include "kernels.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

namespace moec {
namespace {

constexpr int kTokens = KvLayout::kBlockTokens;
constexpr float kLowest = -3.0e38f;

// What the token at position n sees, in the order in which it is added up: blocks, sinks, recent tokens.
struct View {
  int64_t blocks, sinks, first_recent, recent;
  int64_t tokens() const { return blocks * kTokens + sinks + recent; }
};

View view_at(const KvLayout &layout, int64_t n) {
  View v{};
  v.blocks = layout.blocks_at(n);
  v.sinks = std::min<int64_t>(layout.sinks, n + 1);
  v.first_recent = layout.sinks + v.blocks * kTokens;
  if (layout.window)
    v.first_recent = std::max<int64_t>(0, n - layout.window + 1);
  v.recent = std::max<int64_t>(0, n + 1 - v.first_recent);
  return v;
}

// Where the rows of recent tokens are: the ring itself, or a copy of it that later tokens do not overwrite.
class RecentRows {
public:
  // Reads the ring.
  RecentRows(const KvLayout &layout, const char *ring) : layout_(layout), ring_(ring) {}
  // Copies tokens [first, end) out of the ring, leaving room for `more`.
  void copy(int64_t first, int64_t end, int64_t more) {
    first_ = first;
    rows_.resize(static_cast<size_t>(std::max<int64_t>(0, end - first) + more) * layout_.row_bytes());
    copied_ = true;
    for (int64_t token = first; token < end; ++token)
      add(token);
  }
  void read_ring() { copied_ = false; }
  // Copies one more token, where copies are read.
  void add(int64_t token) {
    if (copied_ && token >= first_)
      std::memcpy(rows_.data() + (token - first_) * layout_.row_bytes(),
                  ring_ + layout_.row(token) * layout_.row_bytes(), layout_.row_bytes());
  }
  // Calls use(rows, count) for runs of consecutive rows of tokens [first, first + count).
  template <class Use> void for_runs(int64_t first, int64_t count, const Use &use) const {
    if (copied_)
      return count ? use(rows_.data() + (first - first_) * layout_.row_bytes(), static_cast<int>(count))
                   : void();
    while (count > 0) {
      const int64_t row = layout_.row(first), run = std::min(count, layout_.ring_rows() - row);
      use(ring_ + row * layout_.row_bytes(), static_cast<int>(run));
      first += run;
      count -= run;
    }
  }

private:
  const KvLayout &layout_;
  const char *ring_;
  bool copied_ = false;
  int64_t first_ = 0;
  std::vector<char> rows_;
};

struct Scratch {
  std::vector<View> views;
  std::vector<float> q, logits, acc, sums;
};

Scratch &thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

// A few consecutive tokens and their query heads; head index = token * group + query head.
class Tile {
public:
  Tile(const AttentionParams &p, const HeadState &s, const RecentRows &recent)
      : p_(p), s_(s), k_(kernels()), recent_(recent), group_(p.query_heads / p.kv_heads) {}

  // Tokens [first, first + count) of `tokens`, whose rows have been appended.
  void attend(const HeadTokens &tokens, int first, int count) {
    views_.clear();
    for (int i = 0; i < count; ++i)
      views_.push_back(view_at(p_.layout, tokens.length + first + i));
    stride_ = 0;
    for (const View &v : views_)
      stride_ = std::max(stride_, (v.tokens() + 15) / 16 * 16);
    const size_t heads = static_cast<size_t>(count) * group_;
    q_.resize(heads * p_.layout.k_dim);
    logits_.resize(heads * stride_);
    acc_.assign(heads * p_.layout.v_dim, 0.0f);
    sums_.resize(heads);
    for (int i = 0; i < count; ++i)
      prepare_queries(tokens.q + (first + i) * tokens.q_stride, q_.data() + i * group_ * p_.layout.k_dim);
    compute_logits();
    for (int i = 0; i < count; ++i)
      for (int h = 0; h < group_; ++h)
        normalize(i, h, tokens.q + (first + i) * tokens.q_stride + h * p_.layout.k_dim);
    add_values();
    for (int i = 0; i < count; ++i)
      finish(i, tokens.out + (first + i) * tokens.out_stride);
  }

private:
  float *logits(int64_t token) { return logits_.data() + token * group_ * stride_; }
  float *acc(int64_t token) { return acc_.data() + token * group_ * p_.layout.v_dim; }
  const float *queries(int64_t token) const { return q_.data() + token * group_ * p_.layout.k_dim; }
  const uint8_t *block(int64_t index) const { return s_.blocks + index * p_.layout.block_bytes; }

  // Calls use(first head, heads) for parts of the group that one pass of a kernel takes.
  template <class Use> void for_passes(const Use &use) const {
    const int passes = (group_ + kHeadsAtOnce - 1) / kHeadsAtOnce;
    for (int i = 0; i < passes; ++i) {
      const int first = group_ * i / passes;
      use(first, group_ * (i + 1) / passes - first);
    }
  }

  // q[order] * ref * scale; for layers without blocks q * scale.
  void prepare_queries(const float *q, float *out) const {
    const HeadCalibration &c = s_.calibration;
    const int dk = p_.layout.k_dim;
    for (int h = 0; h < group_; ++h, q += dk, out += dk)
      for (int i = 0; i < dk; ++i)
        out[i] = p_.layout.quantized ? q[c.k_order[i]] * c.k_ref[i] * p_.scale : q[i] * p_.scale;
  }

  void compute_logits() {
    const int dk = p_.layout.k_dim;
    const int64_t count = static_cast<int64_t>(views_.size());
    for_blocks([&](int64_t b, int64_t first) {
      if (count > 1) {
        k_.unpack_keys(p_.layout, block(b), keys());
        k_.panel_logits(p_.layout, keys(), {static_cast<int>(count - first) * group_, stride_},
                        queries(first), logits(first) + b * kTokens);
        return;
      }
      for_passes([&](int h, int n) {
        k_.block_logits(p_.layout, block(b), {n, stride_}, queries(0) + h * dk,
                        logits(0) + h * stride_ + b * kTokens);
      });
    });
    for_ring([&](int64_t token, const char *rows, int n, int64_t at, int h, int heads) {
      k_.ring_logits(p_.layout, rows, n, {heads, stride_}, queries(token) + h * dk,
                     logits(token) + h * stride_ + at);
    });
  }

  void add_values() {
    const int dv = p_.layout.v_dim;
    const int64_t count = static_cast<int64_t>(views_.size());
    const float *v_ref = s_.calibration.v_ref;
    for_blocks([&](int64_t b, int64_t first) {
      if (count > 1) {
        k_.unpack_values(p_.layout, block(b), v_ref, values());
        k_.panel_values(p_.layout, values(), {static_cast<int>(count - first) * group_, stride_},
                        logits(first) + b * kTokens, acc(first));
        return;
      }
      for_passes([&](int h, int n) {
        k_.block_values(p_.layout, block(b), v_ref, {n, stride_}, logits(0) + h * stride_ + b * kTokens,
                        acc(0) + h * dv);
      });
    });
    for_ring([&](int64_t token, const char *rows, int n, int64_t at, int h, int heads) {
      k_.ring_values(p_.layout, rows, n, {heads, stride_}, logits(token) + h * stride_ + at,
                     acc(token) + h * dv);
    });
  }

  // Calls use(block, first token that sees it).
  template <class Use> void for_blocks(const Use &use) const {
    int64_t first = 0;
    for (int64_t b = 0; b < views_.back().blocks; ++b) {
      while (views_[first].blocks <= b)
        ++first;
      use(b, first);
    }
  }

  // Calls use(token, rows, row count, index of its first logit, first head, heads) for all a token sees in
  // the ring.
  template <class Use> void for_ring(const Use &use) const {
    for (int64_t token = 0; token < static_cast<int64_t>(views_.size()); ++token) {
      const View &v = views_[token];
      int64_t at = v.blocks * kTokens;
      const auto each = [&](const char *rows, int n) {
        for_passes([&](int h, int heads) { use(token, rows, n, at, h, heads); });
        at += n;
      };
      if (v.sinks)
        each(s_.ring, static_cast<int>(v.sinks));
      recent_.for_runs(v.first_recent, v.recent, each);
    }
  }

  // The sink logit of a head, with the centring of the keys undone; kLowest where there is none.
  float sink_logit(const float *q, int head) const {
    if (!p_.has_sink_logits)
      return kLowest;
    float shift = 0;
    for (int i = 0; p_.layout.quantized && i < p_.layout.k_dim; ++i)
      shift += q[s_.calibration.k_order[i]] * s_.calibration.k_mean[i];
    return s_.sink_logits[head] - p_.scale * shift;
  }

  // Logits -> probabilities that have yet to be divided by their sum.
  void normalize(int64_t token, int head, const float *q) {
    float *x = logits(token) + head * stride_;
    const int64_t count = views_[token].tokens();
    for (int64_t i = 0; p_.softcap > 0 && i < count; ++i)
      x[i] = p_.softcap * std::tanh(x[i] / p_.softcap);
    const float sink = sink_logit(q, head);
    float &sum = sums_[token * group_ + head];
    const float top = k_.softmax(x, count, sink, &sum);
    if (p_.has_sink_logits)
      sum += std::exp(sink - top);
  }

  void finish(int64_t token, float *out) {
    const int dv = p_.layout.v_dim;
    for (int h = 0; h < group_; ++h) {
      float *y = acc(token) + h * dv;
      for (int c = 0; c < dv; ++c)
        y[c] /= sums_[token * group_ + h];
      if (p_.layout.quantized)
        hadamard(y, dv, p_.layout.v_group);
      std::copy(y, y + dv, out + h * dv);
    }
  }

  static KeyPanel &keys() {
    thread_local const std::unique_ptr<KeyPanel> panel(new KeyPanel);
    return *panel;
  }
  static ValuePanel &values() {
    thread_local const std::unique_ptr<ValuePanel> panel(new ValuePanel);
    return *panel;
  }

  const AttentionParams &p_;
  const HeadState &s_;
  const Kernels &k_;
  const RecentRows &recent_;
  const int group_;
  int64_t stride_ = 0;
  // Kept by each thread: a decode step makes many tiles.
  Scratch &scratch_ = thread_scratch();
  std::vector<View> &views_ = scratch_.views;
  std::vector<float> &q_ = scratch_.q, &logits_ = scratch_.logits, &acc_ = scratch_.acc,
                     &sums_ = scratch_.sums;
};

// Writes a token's row and, where that completes one, its block.
void append(const AttentionParams &p, const HeadState &s, const HeadTokens &t, int i) {
  const KvLayout &layout = p.layout;
  const int64_t n = t.length + i, block = layout.blocks_at(n);
  append_row(layout, s.calibration, t.k + i * t.k_stride, t.v + i * t.v_stride,
             s.ring + layout.row(n) * layout.row_bytes());
  if (layout.blocks_at(n + 1) > block)
    flush_block(layout, s.calibration.v_ref, reinterpret_cast<const uint16_t *>(s.ring), block,
                s.blocks + block * layout.block_bytes);
}

// Tokens at a time: enough heads for the panels to pay, few enough for their logits to stay in the cache.
int tile_tokens(const AttentionParams &p, int64_t length) {
  const int heads = length > 8192 ? 24 : 48;
  return std::clamp(heads * p.kv_heads / p.query_heads, 4, 32);
}

} // namespace

void run_tokens(const AttentionParams &p, const HeadState &s, const HeadTokens &t) {
  RecentRows recent(p.layout, s.ring);
  Tile tile(p, s, recent);
  const int most = tile_tokens(p, t.length + t.count);
  for (int first = 0; first < t.count; first += most) {
    const int count = std::min(most, t.count - first);
    const int64_t n = t.length + first;
    if (count > 1 && (p.layout.quantized || p.layout.window))
      recent.copy(view_at(p.layout, n).first_recent, n, count);
    else
      recent.read_ring();
    for (int i = first; i < first + count; ++i) {
      append(p, s, t, i);
      recent.add(t.length + i);
    }
    tile.attend(t, first, count);
  }
}

} // namespace moec
