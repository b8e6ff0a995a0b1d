// MKV2 arithmetic on one KV head: ring rows of new tokens, and blocks from ring rows.
//
// Bit-exact to moec/reference/kv_block.py: fp32, true division, nearest even, compiled without contraction.
#pragma once
#include "kv_layout.h"

namespace moec {

// Calibration of one KV head; the pointers go into the op's inputs.
struct HeadCalibration {
  const float *k_mean;    // [k_dim], permuted order
  const float *k_ref;     // [k_dim], powers of two, permuted order
  const int32_t *k_order; // [k_dim]
  const float *v_ref;     // [num_v_groups], powers of two
};

// Orthonormal Walsh-Hadamard transform of each group of x[0, count), in place; its own inverse.
void hadamard(float *x, int count, int group);

// Writes the ring row (`layout.row_bytes()` bytes) of a token's k[k_dim] and v[v_dim].
void append_row(const KvLayout &layout, const HeadCalibration &calibration, const float *k, const float *v,
                void *row);

// Quantizes tokens sinks+64*index .. +63 of the head's fp16 ring into `block` (layout.block_bytes).
void flush_block(const KvLayout &layout, const float *v_ref, const uint16_t *ring, int64_t index,
                 uint8_t *block);

} // namespace moec
