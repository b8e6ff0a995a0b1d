// Packing of the cache format int8 on one KV head. Bit-exact to moec/reference/kv_int8.py: fp32, true
// division, nearest even.
#pragma once
#include "kv_layout.h"

namespace moec {

// rows: [64][layout.row_dim()], V rotated and not yet relative to v_ref (it is divided in place); `block` has
// been zeroed.
void quantize_int8_block(const KvLayout &layout, const float *v_ref, float *rows, uint8_t *block);

} // namespace moec
