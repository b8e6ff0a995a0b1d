// Attention of one KV head of one slot: append tokens, attend, flush blocks that became complete.
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

// Consecutive tokens of one KV head; each pointer is the first token's, each stride leads to the next one's.
struct HeadTokens {
  int64_t length; // tokens cached before
  int count;
  const float *q; // [query_heads/kv_heads][k_dim]
  const float *k; // [k_dim]
  const float *v; // [v_dim]
  float *out;     // [query_heads/kv_heads][v_dim]
  int64_t q_stride, k_stride, v_stride, out_stride;
};

// Appends, attends and flushes as if token by token: the results' bits do not depend on how tokens are
// divided.
void run_tokens(const AttentionParams &params, const HeadState &state, const HeadTokens &tokens);

// The same for one token in steps, so that threads can share a long context: after append_token every part
// [0, count_parts) is seen into its own part_floats() floats, in any order; join_parts makes the output of
// them.
void append_token(const AttentionParams &params, const HeadState &state, const HeadTokens &token);
int64_t count_parts(const AttentionParams &params, const HeadTokens &token);
size_t part_floats(const AttentionParams &params);
void see_part(const AttentionParams &params, const HeadState &state, const HeadTokens &token, int64_t index,
              float *out);
void join_parts(const AttentionParams &params, const HeadState &state, const HeadTokens &token, float *parts);

} // namespace moec
