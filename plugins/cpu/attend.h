// Attention of one KV head of one slot: append a token, attend, flush a block that became complete.
#pragma once
#include "kv_layout.h"
#include "mkv2_pack.h"

namespace moec {

struct AttentionParams {
  KvLayout layout;
  int query_heads = 0, kv_heads = 0;
  float scale = 1, softcap = 0;
  bool has_sink_logits = false;
};

// The state of one KV head of one slot and its calibration.
struct HeadState {
  uint8_t *blocks; // [num_blocks][block_bytes]
  char *ring;      // [ring_rows][row_bytes]
  HeadCalibration calibration;
  const float *sink_logits; // of the head's query heads
};

// One token at position `length`: q [query_heads/kv_heads][k_dim], k [k_dim], v [v_dim] -> out [..][v_dim].
void step(const AttentionParams &params, const HeadState &state, int64_t length, const float *q,
          const float *k, const float *v, float *out);

} // namespace moec
