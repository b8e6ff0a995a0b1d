// Where device code finds the rows of a batch, their tokens and their blocks.
#pragma once
#include "device.h"
#include "kv_plan.h"

namespace moec::kernels {

// A row of the batch: its slot, the tokens cached before this call, and the new ones.
struct RowState {
  int slot, cached, added;
};

MOEC_DEVICE RowState load_row(const AttentionParams &p, const KvPlan &plan, int row) {
  const int slot = p.slot_ids[row], wanted = smaller(p.num_tokens[row], p.tokens);
  if (wanted <= 0)
    return {0, 0, 0};
  const bool valid = slot >= 0 && slot < p.slots && p.lengths[slot] >= 0;
  const int cached = valid ? p.lengths[slot] : 0;
  const int added = valid ? smaller(wanted, at_least_zero(plan.max_tokens - cached)) : 0;
  return {valid ? slot : 0, cached, added};
}

// The channel of q or k that is channel `at % Dk` of the ring of head `at / Dk`. Bounded, as a builder may
// time a kernel on memory that nobody has filled.
MOEC_DEVICE int source_channel(const AttentionParams &p, const KvPlan &plan, int at) {
  if (!plan.quantized)
    return at % p.k_dim;
  return smaller(at_least_zero(p.k_order[at]), p.k_dim - 1);
}

// The scratch row [Dk + Dv] of new token i of a batch row, as append will write it to the ring.
MOEC_DEVICE __half *new_row(const AttentionParams &p, const KvPlan &plan, __half *rows, int row, int i,
                            int head) {
  return rows + (static_cast<size_t>(row * p.tokens + i) * p.num_kv_heads + head) * plan.row_dim;
}

MOEC_DEVICE __half *cached_row(const AttentionParams &p, const KvPlan &plan, int slot, int token, int head) {
  const size_t row =
      (static_cast<size_t>(slot) * p.num_kv_heads + head) * p.ring_rows + ring_row(plan, token);
  return static_cast<__half *>(p.ring) + row * plan.row_dim;
}

// The ring is written last, so a token of this call is read from scratch and an older one from the ring.
MOEC_DEVICE const __half *token_row(const AttentionParams &p, const KvPlan &plan, __half *rows, int row,
                                    const RowState &state, int token, int head) {
  if (token >= state.cached)
    return new_row(p, plan, rows, row, token - state.cached, head);
  return cached_row(p, plan, state.slot, token, head);
}

MOEC_DEVICE uint8_t *block_at(const AttentionParams &p, int slot, int head, int block) {
  const size_t index = (static_cast<size_t>(slot) * p.num_kv_heads + head) * p.num_blocks + block;
  return static_cast<uint8_t *>(p.blocks) + index * p.block_bytes;
}

} // namespace moec::kernels
