// Blocks of the cache format int8 on one KV head. Bit-exact to moec/reference/kv_int8.py: fp32, true
// division, nearest even.
#pragma once
#include "kernels.h"
#include "kv_layout.h"

namespace moec {

// rows: [64][layout.row_dim()], V rotated and not yet relative to v_ref (it is divided in place); `block` has
// been zeroed.
void quantize_int8_block(const KvLayout &layout, const float *v_ref, float *rows, uint8_t *block);

// One block as panels: codes as floats, the step as the scale, no zeros.
void unpack_int8_keys(const KvLayout &layout, const uint8_t *block, KeyPanel &panel);
void unpack_int8_values(const KvLayout &layout, const uint8_t *block, const float *v_ref, ValuePanel &panel);

} // namespace moec
