#include "kv_plan.h"
#include <climits>
#include <cmath>

namespace moec::kernels {
namespace {

constexpr int kSectionAlign = 16;

int value_group(int v_dim) {
  const int lowest_bit = v_dim & -v_dim;
  return lowest_bit < kBlockTokens ? lowest_bit : kBlockTokens;
}

int next_section(int offset, int bytes) {
  return ceil_div(offset + bytes, kSectionAlign) * kSectionAlign;
}

void place_sections(const AttentionParams &p, KvPlan *plan) {
  const int per_byte = plan->int8 ? 1 : 4, zeros = plan->int8 ? 0 : 1;
  plan->k_lo = 0;
  plan->k_hi = next_section(plan->k_lo, kBlockTokens * p.k_dim / per_byte);
  plan->k_scale = next_section(plan->k_hi, kBlockTokens * p.promoted / 4);
  plan->k_zero = next_section(plan->k_scale, p.k_dim);
  plan->v_codes = next_section(plan->k_zero, p.k_dim * zeros);
  plan->v_scale = next_section(plan->v_codes, kBlockTokens * p.v_dim / per_byte);
  plan->v_zero = next_section(plan->v_scale, kBlockTokens * plan->v_groups);
  plan->block_end = plan->v_zero + kBlockTokens * plan->v_groups * zeros;
}

// Tokens a slot can hold. Window rows are reused for ever unless the context is shorter than the window.
int max_tokens(const AttentionParams &p, const KvPlan &plan) {
  if (plan.quantized)
    return p.sink_tokens + p.recent_tokens + kBlockTokens * (p.num_blocks + 1) - 1;
  return p.window && p.ring_rows >= p.window ? INT_MAX : p.ring_rows;
}

void split_context(const AttentionParams &p, KvPlan *plan) {
  const int fp_rows = plan->quantized ? p.sink_tokens + p.recent_tokens + kBlockTokens : p.ring_rows;
  plan->max_tiles = (plan->quantized ? p.num_blocks : 0) + ceil_div(fp_rows, kBlockTokens);
  plan->tiles_per_split = larger(2, ceil_div(plan->max_tiles, kMaxSplits));
  plan->num_splits = ceil_div(plan->max_tiles, plan->tiles_per_split);
  const int group = p.num_heads / p.num_kv_heads;
  plan->heads_per_cta = group == 1 ? 1 : group <= 4 ? 4 : 8;
  plan->head_chunks = ceil_div(group, plan->heads_per_cta);
}

int tokens_per_pass(const AttentionParams &p, const KvPlan &plan) {
  const size_t splits = static_cast<size_t>(p.rows) * p.num_heads * plan.num_splits;
  const size_t fitting = kPartialBudget / (splits * (p.v_dim + 2) * sizeof(float));
  const size_t most = static_cast<size_t>(smaller(p.tokens, larger(1, 65535 / p.rows)));
  return static_cast<int>(fitting < 1 ? 1 : fitting < most ? fitting : most);
}

void place_scratch(const AttentionParams &p, KvPlan *plan) {
  const size_t tokens = static_cast<size_t>(p.rows) * p.tokens;
  size_t offset = 0;
  auto place = [&](size_t count, size_t size) {
    const size_t at = offset;
    offset = align_up(offset + count * size, 256);
    return at;
  };
  const size_t splits = static_cast<size_t>(p.rows) * plan->tokens_per_pass * p.num_heads * plan->num_splits;
  plan->rows_at = place(tokens * p.num_kv_heads * plan->row_dim, sizeof(uint16_t));
  plan->query_at = place(tokens * p.num_heads * p.k_dim, sizeof(float));
  plan->sink_at = place(tokens * p.num_heads, sizeof(float));
  plan->partial_at = place(splits * p.v_dim, sizeof(float));
  plan->summary_at = place(splits * 2, sizeof(float));
  plan->bytes = offset;
}

} // namespace

KvPlan make_plan(const AttentionParams &p) {
  KvPlan plan{};
  plan.quantized = p.format != KvFormat::kFp16 && p.window == 0;
  plan.int8 = plan.quantized && p.format == KvFormat::kInt8;
  plan.promoted = plan.quantized ? p.promoted : 0;
  plan.v_group = value_group(p.v_dim);
  plan.v_groups = p.v_dim / plan.v_group;
  plan.row_dim = p.k_dim + p.v_dim;
  plan.rotation_norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(plan.v_group)));
  plan.sinks = plan.quantized ? p.sink_tokens : 0;
  plan.period = p.ring_rows - plan.sinks;
  plan.max_tokens = max_tokens(p, plan);
  place_sections(p, &plan);
  split_context(p, &plan);
  plan.tokens_per_pass = tokens_per_pass(p, plan);
  place_scratch(p, &plan);
  return plan;
}

} // namespace moec::kernels
