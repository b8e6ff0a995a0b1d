#include "moe_layer.h"
#include "expert_store.h"
#include "vectors.h"
#include <algorithm>

namespace moec {
namespace {

constexpr int kPiece = 64; // rows of a matrix in one task; one group of the down product's input

// The (token, rank) pairs that go to one expert: pair = token * top_k + rank.
struct Segment {
  int expert;
  std::vector<int> pairs, tokens;
};

std::vector<Segment> group_by_expert(const std::vector<char> &valid, const int32_t *ids, int top_k,
                                     int num_experts) {
  std::vector<int> segment_of(static_cast<size_t>(num_experts), -1);
  std::vector<Segment> segments;
  for (size_t token = 0; token < valid.size(); ++token)
    for (int rank = 0; valid[token] && rank < top_k; ++rank) {
      const int pair = static_cast<int>(token) * top_k + rank;
      int &at = segment_of[ids[pair]];
      if (at < 0) {
        at = static_cast<int>(segments.size());
        segments.push_back({ids[pair], {}, {}});
      }
      segments[at].pairs.push_back(pair);
      segments[at].tokens.push_back(static_cast<int>(token));
    }
  return segments;
}

void add_bias(const float *bias, int count, int rows, float *y, int64_t stride) {
  for (int i = 0; i < count; ++i)
    for (int r = 0; r < rows; ++r)
      y[i * stride + r] += bias[r];
}

// One call of the op, shared by its tasks.
struct Work {
  const BlobLayout &layout;
  Arithmetic arithmetic;
  Activation activation;
  float alpha, limit;
  const uint8_t *experts;
  const std::vector<Segment> &segments;
  const Vectors &inputs; // of the tokens
  Vectors &inner;        // of the pairs

  const uint8_t *blob(const Segment &s) const {
    return experts + static_cast<size_t>(s.expert) * layout.blob_bytes;
  }
  Matrix gate_up(const Segment &s) const {
    return {arithmetic, blob(s) + layout.gate_up, blob(s) + layout.gate_up_scales, layout.hidden};
  }
  Matrix down(const Segment &s) const {
    return {arithmetic, blob(s) + layout.down, blob(s) + layout.down_scales, layout.intermediate};
  }
  const float *bias(const Segment &s, size_t offset, int row) const {
    return reinterpret_cast<const float *>(blob(s) + offset) + row;
  }

  // Rows [begin, begin + rows) of gate_up times the segment's tokens, bias added: y [pairs][kPiece].
  void project(const Segment &s, int begin, int rows, std::vector<float> &y) const {
    const int count = static_cast<int>(s.tokens.size());
    y.resize(static_cast<size_t>(count) * kPiece);
    inputs.multiply(gate_up(s), begin, begin + rows, s.tokens.data(), count, y.data(), kPiece);
    if (layout.has_bias)
      add_bias(bias(s, layout.gate_up_bias, begin), count, rows, y.data(), kPiece);
  }

  // Inner neurons [64*piece, ..) of a segment.
  void up_task(const Segment &s, int piece) const {
    thread_local std::vector<float> gate, up;
    const int begin = piece * kPiece, rows = std::min(kPiece, layout.intermediate - begin);
    project(s, begin, rows, gate);
    if (layout.gated)
      project(s, layout.intermediate + begin, rows, up);
    for (size_t i = 0; i < s.pairs.size(); ++i) {
      float *g = gate.data() + i * kPiece;
      activate(activation, g, layout.gated ? up.data() + i * kPiece : nullptr, rows, alpha, limit, g);
      inner.set_group(s.pairs[i], piece, g, rows);
    }
  }

  // Output columns [64*piece, ..) of all tokens: every pair's product, then the weighted sum in rank order.
  void down_task(int piece, const std::vector<char> &valid, int top_k, const float *weights,
                 float *out) const {
    thread_local std::vector<float> each, y;
    const int begin = piece * kPiece, rows = std::min(kPiece, layout.hidden - begin);
    each.resize(valid.size() * static_cast<size_t>(top_k) * kPiece);
    for (const Segment &s : segments) {
      const int count = static_cast<int>(s.pairs.size());
      y.resize(static_cast<size_t>(count) * kPiece);
      inner.multiply(down(s), begin, begin + rows, s.pairs.data(), count, y.data(), kPiece);
      if (layout.has_bias)
        add_bias(bias(s, layout.down_bias, begin), count, rows, y.data(), kPiece);
      for (int i = 0; i < count; ++i)
        std::copy_n(y.data() + i * kPiece, rows, each.data() + static_cast<size_t>(s.pairs[i]) * kPiece);
    }
    for (size_t token = 0; token < valid.size(); ++token) {
      float *row = out + token * layout.hidden + begin;
      std::fill(row, row + rows, 0.0f);
      for (int rank = 0; valid[token] && rank < top_k; ++rank) {
        const size_t pair = token * top_k + rank;
        for (int r = 0; r < rows; ++r)
          row[r] += weights[pair] * each[pair * kPiece + r];
      }
    }
  }
};

// Asks for what the products of one token start with: each expert lies elsewhere.
void prefetch_expert(const BlobLayout &layout, const uint8_t *blob) {
  const auto ask = [blob](size_t begin, size_t end) {
    for (size_t at = begin; at < std::min(end, begin + 4096); at += 64)
      __builtin_prefetch(blob + at);
  };
  ask(layout.gate_up, layout.gate_up_scales);
  ask(layout.gate_up_scales, layout.down);
  ask(layout.down, layout.down_scales);
  ask(layout.down_scales, layout.blob_bytes);
}

} // namespace

MoeLayer::MoeLayer(const Attributes &a)
    : op_(a.op()), layer_(a.integer("layer")), num_experts_(static_cast<int>(a.integer("num_experts"))),
      top_k_(static_cast<int>(a.integer("top_k"))), activation_(parse_activation(a.text("activation"))),
      alpha_(a.real("alpha")), limit_(a.real("limit")), int8_(a.text("compute") == "int8") {
  const std::string format = a.text("weight_format");
  if (format != "int4" && format != "bf16")
    fail("weight_format '" + format + "' is not supported on the CPU");
  if (a.integer("group_size") != Vectors::kGroup)
    fail("group_size must be 64");
  if (a.text("tile_layout") != "rows" || a.integer("num_slots") != 0 || a.integer("version") != 1)
    fail("only tile_layout 'rows', num_slots 0, version 1 are supported on the CPU");
  if (top_k_ < 1 || top_k_ > num_experts_)
    fail("top_k is out of range");
  layout_.bf16 = format == "bf16";
  layout_.gated = a.integer("gated") != 0;
  layout_.has_bias = a.integer("has_bias") != 0;
  layout_.intermediate = static_cast<int>(a.integer("intermediate_size"));
  if (activation_ == Activation::kSwigluOai && !layout_.gated)
    fail("swiglu_oai needs gated experts");
}

void MoeLayer::fail(const std::string &what) const {
  throw Error(op_ + " layer " + std::to_string(layer_) + ": " + what);
}

std::vector<char> MoeLayer::valid_tokens(int64_t tokens, const Tensor &num_tokens) const {
  const int64_t rows = num_tokens.count();
  if (rows < 1 || tokens % rows != 0)
    fail("hidden and num_tokens do not fit");
  const int64_t per_row = tokens / rows;
  std::vector<char> valid(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t)
    valid[t] = t % per_row < num_tokens.as<int32_t>()[t / per_row];
  return valid;
}

void MoeLayer::run(const Call &call, const Tensor &hidden, const std::vector<char> &valid, const int32_t *ids,
                   const float *weights, const Tensor &experts, float *out) const {
  BlobLayout layout = layout_;
  layout.hidden = static_cast<int>(hidden.last());
  layout.place_sections();
  if (experts.shape[0] != num_experts_ || experts.shape[1] != static_cast<int64_t>(layout.blob_bytes))
    fail("experts has shape [" + std::to_string(experts.shape[0]) + ", " + std::to_string(experts.shape[1]) +
         "], expected [" + std::to_string(num_experts_) + ", " + std::to_string(layout.blob_bytes) + "]");
  for (size_t pair = 0; pair < valid.size() * top_k_; ++pair)
    if (valid[pair / top_k_] && (ids[pair] < 0 || ids[pair] >= num_experts_))
      fail("expert id " + std::to_string(ids[pair]) + " is out of range");
  const std::vector<Segment> segments = group_by_expert(valid, ids, top_k_, num_experts_);
  for (const Segment &s : segments)
    verify_expert(experts.data, s.expert);

  const Arithmetic arithmetic = layout.bf16 ? Arithmetic::kBf16
                                : int8_     ? Arithmetic::kInt4Int8
                                            : Arithmetic::kInt4Fp32;
  const int tokens = static_cast<int>(valid.size());
  Vectors inputs(arithmetic, tokens, layout.hidden), inner(arithmetic, tokens * top_k_, layout.intermediate);
  for (int t = 0; t < tokens; ++t)
    if (valid[t])
      inputs.set(t, hidden.as<float>() + static_cast<int64_t>(t) * layout.hidden);
  const Work work{layout,   arithmetic, activation_, alpha_, limit_, experts.as<uint8_t>(),
                  segments, inputs,     inner};
  for (const Segment &s : segments)
    if (tokens == 1)
      prefetch_expert(layout, work.blob(s));
  const size_t pieces = static_cast<size_t>((layout.intermediate + kPiece - 1) / kPiece);
  call.parallel(segments.size() * pieces,
                [&](size_t task) { work.up_task(segments[task / pieces], static_cast<int>(task % pieces)); });
  call.parallel(static_cast<size_t>((layout.hidden + kPiece - 1) / kPiece),
                [&](size_t piece) { work.down_task(static_cast<int>(piece), valid, top_k_, weights, out); });
}

} // namespace moec
