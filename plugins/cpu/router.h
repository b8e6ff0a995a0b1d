// Routers: which experts a token goes to, with which weights (the C++ side of moec/reference/routing.py).
#pragma once
#include "op_base.h"
#include <cstdint>
#include <vector>

namespace moec {

struct Router {
  enum class Scoring { kSoftmax, kSigmoid, kSoftmaxAfterTopk };
  Scoring scoring = Scoring::kSoftmax;
  int num_experts = 0, top_k = 0, num_groups = 1, topk_groups = 1;
  bool renormalize = false, group_by_top2 = false;
  float routed_scale = 1;

  explicit Router(const Attributes &attributes);
  // logits [num_experts] (overwritten) -> ids and weights [top_k], in descending order of the choice score.
  void route(float *logits, const float *selection_bias, int32_t *ids, float *weights) const;

private:
  void mask_groups(float *choice) const;
};

} // namespace moec
