// moec::PipelinedMoE for TensorRT: router, top-k and experts in one layer.
#pragma once

#include "moe_attributes.h"

namespace moec::trt {

struct PipelinedMoEOp : ExpertAttributes {
  static constexpr char const *kName = "PipelinedMoE";
  // hidden num_tokens router_weight router_bias selection_bias predictor_weight experts residency staging
  static constexpr TensorKind kInputs[] = {TensorKind::kActivation, TensorKind::kInt32, TensorKind::kFloat,
                                           TensorKind::kFloat,      TensorKind::kFloat, TensorKind::kFloat,
                                           TensorKind::kInt8,       TensorKind::kInt32, TensorKind::kInt8};

  std::string scoring;
  int32_t renormalize = 0;
  int32_t num_groups = 0;
  int32_t topk_groups = 0;
  std::string group_score;
  float routed_scale = 1.0f;
  int32_t predictor_rows = 0;
  int32_t horizon = 0;

  template <class F> void visit(F &&field) {
    visit_experts(field);
    field("scoring", scoring);
    field("renormalize", renormalize);
    field("num_groups", num_groups);
    field("topk_groups", topk_groups);
    field("group_score", group_score);
    field("routed_scale", routed_scale);
    field("predictor_rows", predictor_rows);
    field("horizon", horizon);
  }

  char const *validate() const;
  int32_t aliased_input(int32_t output) const { return output == 1 ? 7 : output == 2 ? 8 : -1; }
  void output_shape(DimsExprs const *in, DimsExprs &out, IExprBuilder &) const {
    same_shape_as_hidden(in, out);
  }
  char const *check(PluginTensorDesc const *in) const;
  size_t workspace(PluginTensorDesc const *in) const;
  int32_t enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results, void *workspace,
                  CUstream_st *stream) const;
};

} // namespace moec::trt
