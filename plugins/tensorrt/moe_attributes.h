// The attributes that moec::PipelinedMoE and moec::Experts share, and their state inputs.
#pragma once

#include "../kernels/launchers.h"
#include "plugin.h"

namespace moec::trt {

struct ExpertAttributes {
  int32_t num_experts = 0;
  int32_t top_k = 0;
  std::string activation;
  int32_t gated = 0;
  float alpha = 1.0f;
  float limit = 0.0f;
  std::string weight_format;
  int32_t group_size = 0;
  int32_t intermediate_size = 0;
  int32_t has_bias = 0;
  std::string tile_layout;
  int32_t num_slots = 0;
  std::string compute;
  int32_t layer = 0;
  int32_t version = 0;

  template <class F> void visit_experts(F &&field) {
    field("num_experts", num_experts);
    field("top_k", top_k);
    field("activation", activation);
    field("gated", gated);
    field("alpha", alpha);
    field("limit", limit);
    field("weight_format", weight_format);
    field("group_size", group_size);
    field("intermediate_size", intermediate_size);
    field("has_bias", has_bias);
    field("tile_layout", tile_layout);
    field("num_slots", num_slots);
    field("compute", compute);
    field("layer", layer);
    field("version", version);
  }

  // Null, or what is wrong with the attributes.
  char const *validate_experts() const;

  // RESIDENT (num_slots = 0) has no state, so only `out`; SPILL updates residency and staging in place.
  int32_t outputs() const { return num_slots > 0 ? 3 : 1; }

  // Shapes and attributes; `experts` is the index of that input (hidden and num_tokens are 0 and 1).
  kernels::MoeParams expert_params(PluginTensorDesc const *in, int experts) const;
};

inline void same_shape_as_hidden(DimsExprs const *in, DimsExprs &out) {
  out = in[0];
}

} // namespace moec::trt
