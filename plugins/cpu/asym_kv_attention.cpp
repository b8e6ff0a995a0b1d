// moec::AsymKVAttention: causal attention over the quantized cache; appends, attends, flushes, in place.
#include "attend.h"
#include "kernels.h"
#include "op_base.h"
#include <algorithm>
#include <vector>

namespace moec {
namespace {

enum Input {
  kQ,
  kK,
  kV,
  kBlocks,
  kRing,
  kSlotIds,
  kLengths,
  kNumTokens,
  kKMean,
  kKRef,
  kKOrder,
  kVRef,
  kSinkLogits
};

// One row of the batch.
struct Row {
  int slot;
  int64_t length;
  int tokens;
};

class AsymKvAttention {
public:
  static constexpr const char *kName = "AsymKVAttention";
  static constexpr int kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kInt8,  ort::kUndefined,
                                    ort::kInt32, ort::kInt32, ort::kInt32, ort::kFloat, ort::kFloat,
                                    ort::kInt32, ort::kFloat, ort::kFloat};
  static constexpr int kOutputs[] = {ort::kFloat, ort::kInt8, ort::kUndefined};

  explicit AsymKvAttention(const Attributes &a)
      : layer_(a.integer("layer")), format_(a.text("format")), sinks_(a.integer("sink_tokens")),
        rollback_(a.integer("rollback_tokens")) {
    params_.scale = a.real("scale");
    params_.softcap = a.real("softcap");
    params_.has_sink_logits = a.integer("has_sink_logits") != 0;
    KvLayout &l = params_.layout;
    l.window = static_cast<int>(a.integer("window"));
    l.promoted = static_cast<int>(a.integer("promoted"));
    l.recent = static_cast<int>(a.integer("recent_tokens"));
    l.ring_fp32 = format_ == "fp32";
    l.int8 = format_ == "int8";
    l.quantized =
        l.window == 0 && (l.int8 || format_ == "mkv2" || format_ == "mkv2_lean" || format_ == "k4v2");
    require(l.quantized || l.window > 0 || l.ring_fp32 || format_ == "fp16",
            "unknown format '" + format_ + "'");
    require(a.text("layout") == "rows", "layout '" + a.text("layout") + "' is not a CPU layout");
    require(a.integer("version") == 1, "unknown version");
    require(a.integer("block_tokens") == KvLayout::kBlockTokens, "block_tokens must be 64");
    require(l.promoted >= 0 && l.promoted % 4 == 0, "promoted must be a multiple of 4");
    require(!l.int8 || l.promoted == 0, "int8 promotes no channels");
    require(l.recent >= 0 && sinks_ >= 0 && rollback_ >= 0 && l.window >= 0, "a size is negative");
  }

  void compute(const Call &call) {
    Tensor q = call.input(kQ), k = call.input(kK), v = call.input(kV);
    const Tensor blocks = call.input(kBlocks), ring = call.input(kRing);
    split_heads(k, ring.shape[1]);
    split_heads(v, ring.shape[1]);
    split_heads(q, k.shape[3] ? q.shape[2] / k.shape[3] : 0);
    AttentionParams params = params_;
    set_geometry(params, q, k, v, blocks, ring);
    const Tensor slots = call.input(kSlotIds), lengths = call.input(kLengths);
    std::vector<Row> rows = read_rows(params.layout, slots, lengths, call.data<int32_t>(kNumTokens), ring, q);
    check_numbers(rows, k, "k");
    check_numbers(rows, v, "v");

    const int64_t out_shape[] = {q.shape[0], q.shape[1], q.shape[2] * v.shape[3]};
    Memory memory{q.as<float>(), k.as<float>(), v.as<float>(), nullptr, nullptr, {}, nullptr, nullptr};
    memory.calibration = {call.data<float>(kKMean), call.data<float>(kKRef), call.data<int32_t>(kKOrder),
                          call.data<float>(kVRef)};
    memory.sink_logits = call.data<float>(kSinkLogits);
    memory.out = static_cast<float *>(call.output(0, out_shape, 3));
    memory.blocks = static_cast<uint8_t *>(call.state_output(1, blocks));
    memory.ring = static_cast<char *>(call.state_output(2, ring));
    run(call, params, rows, q.shape[1], memory);
  }

private:
  void require(bool ok, const std::string &what) const {
    if (!ok)
      throw Error("AsymKVAttention layer " + std::to_string(layer_) + ": " + what);
  }

  // [b,S,heads*dim] is read as [b,S,heads,dim].
  void split_heads(Tensor &x, int64_t heads) const {
    if (x.rank != 3)
      return;
    require(heads > 0 && x.shape[2] % heads == 0, "q, k and v must have whole heads");
    x.rank = 4;
    x.shape[3] = x.shape[2] / heads;
    x.shape[2] = heads;
  }

  void set_geometry(AttentionParams &p, const Tensor &q, const Tensor &k, const Tensor &v,
                    const Tensor &blocks, const Tensor &ring) const {
    KvLayout &l = p.layout;
    p.query_heads = static_cast<int>(q.shape[2]);
    p.kv_heads = static_cast<int>(k.shape[2]);
    l.k_dim = static_cast<int>(k.shape[3]);
    l.v_dim = static_cast<int>(v.shape[3]);
    require(q.rank == 4 && k.rank == 4 && v.rank == 4 && ring.rank == 4 && blocks.rank == 4,
            "q, k, v, blocks and ring must have four dimensions");
    require(q.shape[3] == k.shape[3] && v.shape[2] == k.shape[2] && q.shape[2] % k.shape[2] == 0,
            "heads or head dimensions of q, k and v do not fit");
    require(l.k_dim <= kMaxHeadDim && l.v_dim <= kMaxHeadDim && l.k_dim % 4 == 0 && l.v_dim % 4 == 0,
            "head dimensions must be multiples of 4 up to " + std::to_string(kMaxHeadDim));
    require(l.promoted <= l.k_dim, "more promoted channels than k_dim");
    l.place_sections();
    const int64_t ring_type = l.ring_fp32 ? ort::kFloat : ort::kFloat16;
    require(ring.type == ring_type, "ring has the wrong element type for format " + format_);
    l.sinks = l.quantized ? static_cast<int>(sinks_) : 0;
    l.period = static_cast<int>(ring.shape[2]) - l.sinks;
    const int64_t period = l.recent + KvLayout::kBlockTokens + rollback_;
    require(!l.quantized || l.period == period, "ring has the wrong number of rows");
    require(ring.shape[1] == k.shape[2] && ring.shape[3] == l.row_dim() && l.period > 0,
            "ring has the wrong shape");
    l.num_blocks = static_cast<int>(blocks.shape[2]);
    require(!l.quantized || (blocks.shape[0] == ring.shape[0] && blocks.shape[1] == k.shape[2] &&
                             blocks.shape[3] == static_cast<int64_t>(l.block_bytes)),
            "blocks has the wrong shape");
  }

  std::vector<Row> read_rows(const KvLayout &l, const Tensor &slots, const Tensor &lengths,
                             const int32_t *num_tokens, const Tensor &ring, const Tensor &q) const {
    require(slots.count() == q.shape[0] && lengths.count() == ring.shape[0],
            "slot_ids or lengths has the wrong size");
    std::vector<Row> rows(static_cast<size_t>(q.shape[0]));
    for (size_t r = 0; r < rows.size(); ++r) {
      const int slot = slots.as<int32_t>()[r], tokens = num_tokens[r];
      require(tokens >= 0 && tokens <= q.shape[1], "num_tokens out of range in row " + std::to_string(r));
      if (tokens > 0) {
        require(slot >= 0 && slot < ring.shape[0], "slot " + std::to_string(slot) + " does not exist");
        rows[r] = {slot, lengths.as<int32_t>()[slot], tokens};
        check_capacity(l, rows[r]);
      }
    }
    return rows;
  }

  void check_capacity(const KvLayout &l, const Row &row) const {
    const int64_t end = row.length + row.tokens;
    const bool fits = l.quantized ? l.blocks_at(end) <= l.num_blocks
                                  : (l.window > 0 && l.period >= l.window) || end <= l.period;
    require(row.length >= 0 && fits, "slot " + std::to_string(row.slot) + " is full: length " +
                                         std::to_string(row.length) + " + " + std::to_string(row.tokens) +
                                         " new tokens exceeds the cache");
  }

  // Throws at the first NaN in the valid tokens of x [b,S,heads,dim], before anything is written.
  void check_numbers(const std::vector<Row> &rows, const Tensor &x, const char *name) const {
    const int64_t each = x.shape[2] * x.shape[3];
    for (size_t r = 0; r < rows.size(); ++r)
      for (int i = 0; i < rows[r].tokens; ++i) {
        const float *p = x.as<float>() + (static_cast<int64_t>(r) * x.shape[1] + i) * each;
        int nan = 0;
        for (int64_t c = 0; c < each; ++c)
          nan |= p[c] != p[c];
        require(!nan, std::string("NaN in ") + name + " at slot " + std::to_string(rows[r].slot) +
                          ", position " + std::to_string(rows[r].length + i));
      }
  }

  // The op's tensors as one call sees them.
  struct Memory {
    const float *q, *k, *v;
    uint8_t *blocks;
    char *ring;
    HeadCalibration calibration;
    const float *sink_logits;
    float *out;
  };

  static HeadState head_state(const AttentionParams &p, const Memory &m, int slot, int64_t head) {
    const KvLayout &l = p.layout;
    const int64_t at = slot * static_cast<int64_t>(p.kv_heads) + head;
    HeadState s{};
    s.blocks = l.quantized ? m.blocks + at * l.num_blocks * l.block_bytes : nullptr;
    s.ring = m.ring + at * l.ring_rows() * l.row_bytes();
    s.calibration = {m.calibration.k_mean + head * l.k_dim, m.calibration.k_ref + head * l.k_dim,
                     m.calibration.k_order + head * l.k_dim, m.calibration.v_ref + head * l.num_v_groups};
    s.sink_logits = m.sink_logits + head * (p.query_heads / p.kv_heads);
    return s;
  }

  // Tokens of one row and KV head; `row_start` is the index of the row's first token in [b*S].
  static HeadTokens head_tokens(const AttentionParams &p, const Memory &m, const Row &row, int64_t row_start,
                                int64_t head) {
    const int64_t Hq = p.query_heads, Hkv = p.kv_heads, dk = p.layout.k_dim, dv = p.layout.v_dim;
    const int64_t first_q = row_start * Hq + head * (Hq / Hkv), first_kv = row_start * Hkv + head;
    return {row.length,
            row.tokens,
            m.q + first_q * dk,
            m.k + first_kv * dk,
            m.v + first_kv * dv,
            m.out + first_q * dv,
            Hq * dk,
            Hkv * dk,
            Hkv * dv,
            Hq * dv};
  }

  static void run(const Call &call, const AttentionParams &p, const std::vector<Row> &rows, int64_t width,
                  const Memory &m) {
    if (width == 1)
      return decode(call, p, rows, m);
    const int64_t heads = p.kv_heads, values = p.query_heads / heads * p.layout.v_dim;
    call.parallel(rows.size() * static_cast<size_t>(heads), [&](size_t task) {
      const int64_t r = static_cast<int64_t>(task) / heads, head = static_cast<int64_t>(task) % heads;
      const HeadTokens tokens = head_tokens(p, m, rows[r], r * width, head);
      run_tokens(p, head_state(p, m, rows[r].slot, head), tokens);
      for (int64_t i = rows[r].tokens; i < width; ++i)
        std::fill_n(tokens.out + i * tokens.out_stride, values, 0.0f);
    });
  }

  // One head of a row with one token, and where its parts are in the list of all parts.
  struct Head {
    HeadState state;
    HeadTokens token;
    int64_t first_part;
  };

  // Every row has one token or none: threads share heads and, in long contexts, parts of them.
  static void decode(const Call &call, const AttentionParams &p, const std::vector<Row> &rows,
                     const Memory &m) {
    std::vector<Head> heads;
    std::vector<size_t> head_of; // of each part
    bool flushes = false;
    for (size_t r = 0; r < rows.size(); ++r)
      for (int64_t head = 0; head < p.kv_heads; ++head) {
        const HeadTokens token = head_tokens(p, m, rows[r], static_cast<int64_t>(r), head);
        if (rows[r].tokens == 0) {
          std::fill_n(token.out, p.query_heads / p.kv_heads * p.layout.v_dim, 0.0f);
          continue;
        }
        flushes |= p.layout.blocks_at(token.length + 1) > p.layout.blocks_at(token.length);
        heads.push_back({head_state(p, m, rows[r].slot, head), token, static_cast<int64_t>(head_of.size())});
        head_of.resize(head_of.size() + static_cast<size_t>(count_parts(p, token)), heads.size() - 1);
      }
    const auto append = [&](size_t i) { append_token(p, heads[i].state, heads[i].token); };
    if (flushes || heads.size() > 8)
      call.parallel(heads.size(), append);
    else
      for (size_t i = 0; i < heads.size(); ++i)
        append(i);
    const size_t each = part_floats(p);
    thread_local std::vector<float> parts;
    parts.resize(head_of.size() * each);
    float *memory = parts.data(); // a lambda would find the other thread's own
    call.parallel(head_of.size(), [&](size_t task) {
      const size_t i = head_of.size() - 1 - task; // the last part of a head is the largest: it goes first
      const Head &h = heads[head_of[i]];
      see_part(p, h.state, h.token, static_cast<int64_t>(i) - h.first_part, memory + i * each);
    });
    for (const Head &h : heads)
      join_parts(p, h.state, h.token, memory + h.first_part * each);
  }

  int64_t layer_;
  std::string format_;
  int64_t sinks_, rollback_;
  AttentionParams params_;
};

} // namespace

const ort::CustomOp *asym_kv_attention_op(int threads) {
  return Registration<AsymKvAttention>::table(threads);
}

} // namespace moec
