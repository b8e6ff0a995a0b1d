// Which configurations the kernels can run, told without a GPU.
#include <cstring>

#include "kv_plan.h"
#include "moe_plan.h"

namespace moec::kernels {
namespace {

constexpr size_t kStaticSharedLimit = 48 << 10; // what a launch may use without asking for more
constexpr int kMaxHeadDim = 512;
constexpr int kMaxGrid = 65535; // of the y and z dimensions

struct Rule {
  bool broken;
  const char *message;
};

template <size_t N> const char *first_broken(const Rule (&rules)[N]) {
  for (const Rule &rule : rules)
    if (rule.broken)
      return rule.message;
  return nullptr;
}

template <class E, size_t N> bool find(const char *text, const char *const (&names)[N], E *out) {
  for (size_t i = 0; text && i < N; i++) {
    if (strcmp(text, names[i]) != 0)
      continue;
    *out = static_cast<E>(i);
    return true;
  }
  return false;
}

template <class E> bool outside(E value, E last) {
  return static_cast<int32_t>(value) < 0 || static_cast<int32_t>(value) > static_cast<int32_t>(last);
}

const char *check_shape(const AttentionParams &p) {
  const int smallest = smaller(smaller(smaller(p.rows, p.tokens), smaller(p.slots, p.num_heads)),
                               smaller(smaller(p.num_kv_heads, p.ring_rows), smaller(p.k_dim, p.v_dim)));
  const Rule rules[] = {
      {smallest < 1, "AsymKVAttention: a dimension is not positive"},
      {p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads != 0,
       "AsymKVAttention: the number of query heads is no multiple of the number of KV heads"},
      {p.k_dim % 4 != 0 || p.v_dim % 4 != 0, "AsymKVAttention: head dimensions must be multiples of 4"},
      {p.k_dim > kMaxHeadDim || p.v_dim > kMaxHeadDim,
       "AsymKVAttention: head dimensions above 512 are not supported"},
      {p.rows > kMaxGrid || p.num_heads > kMaxGrid, "AsymKVAttention: too many rows or heads for one launch"},
      {outside(p.dtype, Dtype::kBFloat16), "AsymKVAttention: activations must be fp16 or bf16 on the GPU"},
      {outside(p.format, KvFormat::kInt8),
       "AsymKVAttention: the KV format must be mkv2, mkv2_lean, k4v2, int8 or fp16 on the GPU"},
      {p.block_tokens != kBlockTokens, "AsymKVAttention: block_tokens must be 64"},
      {p.window < 0 || p.sink_tokens < 0 || p.recent_tokens < 0 || p.rollback_tokens < 0,
       "AsymKVAttention: window, sink_tokens, recent_tokens and rollback_tokens must not be negative"},
  };
  return first_broken(rules);
}

const char *check_cache(const AttentionParams &p) {
  const KvPlan plan = make_plan(p);
  const int ring = p.sink_tokens + p.recent_tokens + kBlockTokens + p.rollback_tokens;
  const int block_bytes = ceil_div(plan.block_end, 128) * 128;
  const size_t flush_floats = static_cast<size_t>(flush_shared_floats(p, plan));
  const Rule rules[] = {
      {p.promoted < 0 || p.promoted > p.k_dim || p.promoted % 4 != 0,
       "AsymKVAttention: promoted must be a multiple of 4 and at most the head dimension"},
      {p.format == KvFormat::kInt8 && p.promoted != 0, "AsymKVAttention: int8 promotes no channels"},
      {plan.quantized && p.ring_rows != ring,
       "AsymKVAttention: the ring must have sink_tokens + recent_tokens + 64 + rollback_tokens rows"},
      {plan.quantized && (p.num_blocks < 1 || p.block_bytes != block_bytes),
       "AsymKVAttention: the size of a block does not fit head dimensions and promoted channels"},
      {p.window > 0 && p.ring_rows > p.window + p.rollback_tokens,
       "AsymKVAttention: the ring of a windowed layer has at most window + rollback_tokens rows"},
      {plan.quantized && flush_floats * sizeof(float) > kStaticSharedLimit,
       "AsymKVAttention: this V head dimension has too many groups (it should be a multiple of 16)"},
  };
  return first_broken(rules);
}

const char *check_experts(const MoeParams &p) {
  const int smallest =
      smaller(smaller(smaller(p.tokens_total, p.rows), smaller(p.hidden_size, p.num_experts)),
              smaller(p.top_k, p.intermediate_size));
  const Rule rules[] = {
      {smallest < 1, "MoE: a dimension is not positive"},
      {p.rows > 0 && p.tokens_total % p.rows != 0,
       "MoE: the tokens do not divide into the rows of num_tokens"},
      {p.tokens_total > kMaxGrid, "MoE: more than 65535 tokens in one call"},
      {p.top_k > p.num_experts, "MoE: top_k is larger than the number of experts"},
      {outside(p.dtype, Dtype::kBFloat16), "MoE: hidden states must be fp16 or bf16 on the GPU"},
      {outside(p.activation, Activation::kSwigluOai), "MoE: unknown activation"},
      {outside(p.weight_format, WeightFormat::kInt4), "MoE: weight_format must be bf16 or int4"},
      {p.group_size != kWeightGroup, "MoE: group_size must be 64"},
      {p.activation == Activation::kSwigluOai && !p.gated, "MoE: swiglu_oai needs gated experts"},
      {p.num_slots != 0,
       "MoE: a slot pool (num_slots > 0) is not supported on the GPU yet: keep all experts resident"},
  };
  return first_broken(rules);
}

const char *check_router(const MoeParams &p) {
  const bool grouped = p.num_groups > 1;
  const size_t shared =
      sizeof(float) * (2 * static_cast<size_t>(p.num_experts) + static_cast<size_t>(larger(1, p.num_groups)));
  const Rule rules[] = {
      {outside(p.scoring, Scoring::kSoftmaxAfterTopk), "PipelinedMoE: unknown scoring"},
      {outside(p.group_score, GroupScore::kTop2), "PipelinedMoE: unknown group_score"},
      {grouped && p.num_experts % p.num_groups != 0,
       "PipelinedMoE: the experts do not divide into the groups"},
      {grouped && (p.topk_groups < 1 || p.topk_groups > p.num_groups),
       "PipelinedMoE: topk_groups is out of range"},
      {grouped && p.topk_groups * (p.num_experts / larger(1, p.num_groups)) < p.top_k,
       "PipelinedMoE: the chosen groups hold fewer than top_k experts"},
      {shared > kStaticSharedLimit, "PipelinedMoE: too many experts for the router kernel"},
  };
  return first_broken(rules);
}

} // namespace

bool parse(const char *text, KvFormat *out) {
  static const char *const names[] = {"mkv2", "mkv2_lean", "k4v2", "fp16", "int8"};
  return find(text, names, out);
}
bool parse(const char *text, Scoring *out) {
  static const char *const names[] = {"softmax", "sigmoid", "softmax_after_topk"};
  return find(text, names, out);
}
bool parse(const char *text, GroupScore *out) {
  static const char *const names[] = {"max", "top2"};
  return find(text, names, out);
}
bool parse(const char *text, Activation *out) {
  static const char *const names[] = {"silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"};
  return find(text, names, out);
}
bool parse(const char *text, WeightFormat *out) {
  static const char *const names[] = {"bf16", "int4"};
  return find(text, names, out);
}

const char *check(const AttentionParams &params) {
  const char *message = check_shape(params);
  return message ? message : check_cache(params);
}

const char *check(const MoeParams &params, bool with_router) {
  const char *message = check_experts(params);
  if (!message && with_router)
    message = check_router(params);
  if (!message && params.blob_bytes != make_plan(params, with_router).blob_bytes)
    message = "MoE: the blobs have another size than these attributes give";
  return message;
}

size_t workspace_bytes(const AttentionParams &params) {
  return check(params) ? 256 : make_plan(params).bytes;
}

size_t workspace_bytes(const MoeParams &params, bool with_router) {
  return check(params, with_router) ? 256 : make_plan(params, with_router).bytes;
}

} // namespace moec::kernels
