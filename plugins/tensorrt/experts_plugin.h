// moec::Experts for TensorRT: the experts of a layer whose router stayed in the graph.
#pragma once

#include "moe_attributes.h"

namespace moec::trt {

struct ExpertsOp : ExpertAttributes {
  static constexpr char const *kName = "Experts";
  // hidden num_tokens ids weights experts residency staging
  static constexpr TensorKind kInputs[] = {TensorKind::kActivation, TensorKind::kInt32, TensorKind::kInt32,
                                           TensorKind::kFloat,      TensorKind::kInt8,  TensorKind::kInt32,
                                           TensorKind::kInt8};

  template <class F> void visit(F &&field) { visit_experts(field); }

  char const *validate() const { return validate_experts(); }
  int32_t aliased_input(int32_t output) const { return output == 1 ? 5 : output == 2 ? 6 : -1; }
  void output_shape(DimsExprs const *in, DimsExprs &out, IExprBuilder &) const {
    same_shape_as_hidden(in, out);
  }
  char const *check(PluginTensorDesc const *in) const;
  size_t workspace(PluginTensorDesc const *in) const;
  int32_t enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results, void *workspace,
                  CUstream_st *stream) const;
};

} // namespace moec::trt
