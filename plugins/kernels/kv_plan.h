// Everything that follows from the shapes and attributes of an AsymKVAttention node: where sections, ring
// rows and scratch are, and how the context is split. Passed to kernels by value. See docs/kv-cache.md for
// the format.
#pragma once
#include "common.h"
#include "launchers.h"

namespace moec::kernels {

constexpr int kBlockTokens = 64;
constexpr int kMaxSplits = 32;
constexpr size_t kPartialBudget = 16u << 20; // scratch for partial results; longer chunks take several passes

struct KvPlan {
  int quantized; // has blocks
  int int8;      // of int8 codes: k_lo and v_codes are [64][dim] bytes, k_hi and the zeros are empty
  int promoted, v_group, v_groups, row_dim;
  float rotation_norm; // 1/sqrt(v_group)
  int sinks, period;   // of the ring: rows that stay, rows that are reused in turn
  int max_tokens;      // a slot cannot hold more
  int k_lo, k_hi, k_scale, k_zero, v_codes, v_scale, v_zero, block_end; // byte offsets in a block
  int max_tiles, tiles_per_split, num_splits;                           // a tile: 64 tokens
  int heads_per_cta, head_chunks;                                       // query heads of a KV head, in chunks
  int tokens_per_pass;
  size_t rows_at, query_at, sink_at, partial_at, summary_at, bytes; // scratch
};

KvPlan make_plan(const AttentionParams &p);

// Shared memory of the kernel that quantizes a block: a step (and, but for int8, a zero) of every group.
MOEC_HD int flush_shared_floats(const AttentionParams &p, const KvPlan &plan) {
  return (plan.int8 ? 1 : 2) * (p.k_dim + kBlockTokens * plan.v_groups);
}

// nq(n): blocks that are quantized when n tokens are cached.
MOEC_HD int quantized_blocks(const AttentionParams &p, const KvPlan &plan, int length) {
  if (!plan.quantized)
    return 0;
  return at_least_zero(length - p.sink_tokens - p.recent_tokens) / kBlockTokens;
}

// Row of the ring that holds the token at this position.
MOEC_HD int ring_row(const KvPlan &plan, int token) {
  return token < plan.sinks ? token : plan.sinks + (token - plan.sinks) % plan.period;
}

} // namespace moec::kernels
