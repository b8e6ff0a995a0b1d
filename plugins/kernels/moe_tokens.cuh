// Which tokens of a MoE node count.
#pragma once
#include "device.h"
#include "moe_plan.h"

namespace moec::kernels {

// Whether token t (of T = b * S) is one of its row's num_tokens.
MOEC_DEVICE bool is_valid_token(const MoeParams &p, int t) {
  const int per_row = p.tokens_total / p.rows;
  return t % per_row < p.num_tokens[t / per_row];
}

} // namespace moec::kernels
