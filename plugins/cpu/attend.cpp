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
constexpr int kPartBlocks = 4; // blocks in one part
constexpr float kLowest = -3.0e38f;

// What the token at position n sees: parts of four blocks, then one part of sinks and recent tokens. Each
// part has its own softmax; they are joined in this order, whoever computed them.
struct View {
  int64_t blocks, sinks, first_recent, recent;
  int64_t block_parts() const { return (blocks + kPartBlocks - 1) / kPartBlocks; }
  // Tokens of a part.
  int64_t tokens(int64_t part) const {
    if (part < 0)
      return sinks + recent;
    return std::clamp<int64_t>(blocks - part * kPartBlocks, 0, kPartBlocks) * kTokens;
  }
};
constexpr int64_t kRingPart = -1;

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

// What some heads see of a part, or of all parts so far: the sum of V weighted with exp(logit - top), the sum
// of the weights, which is 0 where nothing was seen, and top.
struct Seen {
  float *top, *sum, *acc; // [heads], [heads], [heads][v_dim]
  Seen(float *memory, int64_t heads) : top(memory), sum(memory + heads), acc(memory + 2 * heads) {}
  static size_t floats(int64_t heads, int v_dim) { return static_cast<size_t>(heads) * (2 + v_dim); }
};

void clear(const Seen &s, int64_t heads, int v_dim) {
  std::fill_n(s.top, heads, kLowest);
  std::fill_n(s.sum, heads, 0.0f);
  std::fill_n(s.acc, heads * v_dim, 0.0f);
}

void join(const Seen &all, const Seen &part, int64_t heads, int v_dim) {
  for (int64_t h = 0; h < heads; ++h) {
    if (part.sum[h] == 0)
      continue;
    float *to = all.acc + h * v_dim;
    const float *from = part.acc + h * v_dim;
    if (all.sum[h] == 0) {
      all.top[h] = part.top[h];
      all.sum[h] = part.sum[h];
      std::copy_n(from, v_dim, to);
      continue;
    }
    const float top = std::max(all.top[h], part.top[h]);
    const float a = std::exp(all.top[h] - top), b = std::exp(part.top[h] - top);
    all.top[h] = top;
    all.sum[h] = all.sum[h] * a + part.sum[h] * b;
    for (int c = 0; c < v_dim; ++c)
      to[c] = to[c] * a + from[c] * b;
  }
}

struct Scratch {
  std::vector<View> views;
  std::vector<float> q, logits, all, part;
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
    prepare(tokens, first, count);
    const int dv = p_.layout.v_dim;
    all_.resize(Seen::floats(heads(), dv));
    part_.resize(Seen::floats(heads(), dv));
    const Seen all(all_.data(), heads()), part(part_.data(), heads());
    clear(all, heads(), dv);
    for (int64_t i = 0; i <= views_.back().block_parts(); ++i) {
      see(i < views_.back().block_parts() ? i : kRingPart, part);
      join(all, part, heads(), dv);
    }
    finish(tokens, first, all);
  }

  // The same in steps, for one token: parts may be seen in any order, by any thread.
  void see_part(const HeadTokens &token, int64_t index, float *out) {
    prepare(token, 0, 1);
    see(index < views_[0].block_parts() ? index : kRingPart, Seen(out, heads()));
  }
  void join_parts(const HeadTokens &token, float *parts) {
    prepare(token, 0, 1);
    const size_t each = Seen::floats(heads(), p_.layout.v_dim);
    const Seen all(parts, heads());
    for (int64_t i = 1; i <= views_[0].block_parts(); ++i)
      join(all, Seen(parts + i * each, heads()), heads(), p_.layout.v_dim);
    finish(token, 0, all);
  }

private:
  int64_t heads() const { return static_cast<int64_t>(views_.size()) * group_; }
  float *logits(int64_t token) { return logits_.data() + token * group_ * stride_; }
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

  void prepare(const HeadTokens &tokens, int first, int count) {
    views_.clear();
    for (int i = 0; i < count; ++i)
      views_.push_back(view_at(p_.layout, tokens.length + first + i));
    q_.resize(static_cast<size_t>(heads()) * p_.layout.k_dim);
    for (int i = 0; i < count; ++i)
      prepare_queries(tokens.q + (first + i) * tokens.q_stride, q_.data() + i * group_ * p_.layout.k_dim);
  }

  // Softmax and values over one part.
  void see(int64_t part, const Seen &out) {
    clear(out, heads(), p_.layout.v_dim);
    stride_ = 0;
    for (const View &v : views_)
      stride_ = std::max(stride_, (v.tokens(part) + 15) / 16 * 16);
    logits_.resize(static_cast<size_t>(heads()) * stride_);
    part == kRingPart ? ring_logits() : block_logits(part);
    for (int64_t h = 0; h < heads(); ++h)
      if (const int64_t count = views_[h / group_].tokens(part))
        normalize(logits_.data() + h * stride_, count, out.top + h, out.sum + h);
    part == kRingPart ? ring_values(out.acc) : block_values(part, out.acc);
  }

  void block_logits(int64_t part) {
    const int dk = p_.layout.k_dim;
    const int64_t count = static_cast<int64_t>(views_.size());
    for_blocks(part, [&](int64_t b, int64_t first, int64_t at) {
      if (count > 1) {
        k_.unpack_keys(p_.layout, block(b), keys());
        k_.panel_logits(p_.layout, keys(), {static_cast<int>(count - first) * group_, stride_},
                        queries(first), logits(first) + at);
        return;
      }
      for_passes([&](int h, int n) {
        k_.block_logits(p_.layout, block(b), {n, stride_}, queries(0) + h * dk, logits(0) + h * stride_ + at);
      });
    });
  }

  void block_values(int64_t part, float *acc) {
    const int dv = p_.layout.v_dim;
    const int64_t count = static_cast<int64_t>(views_.size());
    const float *v_ref = s_.calibration.v_ref;
    for_blocks(part, [&](int64_t b, int64_t first, int64_t at) {
      if (count > 1) {
        k_.unpack_values(p_.layout, block(b), v_ref, values());
        k_.panel_values(p_.layout, values(), {static_cast<int>(count - first) * group_, stride_},
                        logits(first) + at, acc + first * group_ * dv);
        return;
      }
      for_passes([&](int h, int n) {
        k_.block_values(p_.layout, block(b), v_ref, {n, stride_}, logits(0) + h * stride_ + at, acc + h * dv);
      });
    });
  }

  void ring_logits() {
    for_ring([&](int64_t token, const char *rows, int n, int64_t at, int h, int heads) {
      k_.ring_logits(p_.layout, rows, n, {heads, stride_}, queries(token) + h * p_.layout.k_dim,
                     logits(token) + h * stride_ + at);
    });
  }

  void ring_values(float *acc) {
    for_ring([&](int64_t token, const char *rows, int n, int64_t at, int h, int heads) {
      k_.ring_values(p_.layout, rows, n, {heads, stride_}, logits(token) + h * stride_ + at,
                     acc + (token * group_ + h) * p_.layout.v_dim);
    });
  }

  // Calls use(block, first token that sees it, index of its first logit) for the blocks of a part.
  template <class Use> void for_blocks(int64_t part, const Use &use) const {
    const int64_t begin = part * kPartBlocks, end = std::min(begin + kPartBlocks, views_.back().blocks);
    int64_t first = 0;
    for (int64_t b = begin; b < end; ++b) {
      while (views_[first].blocks <= b)
        ++first;
      use(b, first, (b - begin) * kTokens);
    }
  }

  // Calls use(token, rows, row count, index of its first logit, first head, heads) for all a token sees in
  // the ring.
  template <class Use> void for_ring(const Use &use) const {
    for (int64_t token = 0; token < static_cast<int64_t>(views_.size()); ++token) {
      const View &v = views_[token];
      int64_t at = 0;
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

  // Logits -> weights of the values.
  void normalize(float *x, int64_t count, float *top, float *sum) const {
    for (int64_t i = 0; p_.softcap > 0 && i < count; ++i)
      x[i] = p_.softcap * std::tanh(x[i] / p_.softcap);
    *top = k_.softmax(x, count, kLowest, sum);
  }

  // Outputs of tokens [first, ..) from all that their heads see.
  void finish(const HeadTokens &tokens, int first, const Seen &all) {
    const int dk = p_.layout.k_dim, dv = p_.layout.v_dim;
    for (int64_t h = 0; h < heads(); ++h) {
      const int64_t token = first + h / group_, head = h % group_;
      const float sink = sink_logit(tokens.q + token * tokens.q_stride + head * dk, static_cast<int>(head));
      const float top = std::max(all.top[h], sink), scale = std::exp(all.top[h] - top);
      const float sum = p_.has_sink_logits ? all.sum[h] * scale + std::exp(sink - top) : all.sum[h];
      float *y = all.acc + h * dv;
      for (int c = 0; c < dv; ++c)
        y[c] = y[c] * scale / sum;
      if (p_.layout.quantized)
        hadamard(y, dv, p_.layout.v_group);
      std::copy_n(y, dv, tokens.out + token * tokens.out_stride + head * dv);
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
  std::vector<float> &q_ = scratch_.q, &logits_ = scratch_.logits, &all_ = scratch_.all,
                     &part_ = scratch_.part;
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

void append_token(const AttentionParams &p, const HeadState &s, const HeadTokens &token) {
  append(p, s, token, 0);
}

int64_t count_parts(const AttentionParams &p, const HeadTokens &token) {
  return view_at(p.layout, token.length).block_parts() + 1;
}

size_t part_floats(const AttentionParams &p) {
  return Seen::floats(p.query_heads / p.kv_heads, p.layout.v_dim);
}

void see_part(const AttentionParams &p, const HeadState &s, const HeadTokens &token, int64_t index,
              float *out) {
  const RecentRows ring(p.layout, s.ring);
  Tile(p, s, ring).see_part(token, index, out);
}

void join_parts(const AttentionParams &p, const HeadState &s, const HeadTokens &token, float *parts) {
  const RecentRows ring(p.layout, s.ring);
  Tile(p, s, ring).join_parts(token, parts);
}

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
