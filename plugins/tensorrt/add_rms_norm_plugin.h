// moec::AddRMSNorm for TensorRT: x + residual (output 1) and its RMS norm (output 0).
#pragma once

#include "plugin.h"

namespace moec::trt {

struct AddRMSNormOp {
  static constexpr char const *kName = "AddRMSNorm";
  // x residual scale
  static constexpr TensorKind kInputs[] = {TensorKind::kActivation, TensorKind::kActivation,
                                           TensorKind::kActivation};

  float epsilon = 0.0f;
  float scale_offset = 0.0f;
  int32_t version = 0;

  template <class F> void visit(F &&field) {
    field("epsilon", epsilon);
    field("scale_offset", scale_offset);
    field("version", version);
  }

  char const *validate() const { return version == 1 ? nullptr : "attribute 'version' must be 1"; }
  int32_t outputs() const { return 2; }
  int32_t aliased_input(int32_t) const { return -1; }
  void output_shape(DimsExprs const *in, DimsExprs &out, IExprBuilder &) const { out = in[0]; }
  char const *check(PluginTensorDesc const *in) const;
  size_t workspace(PluginTensorDesc const *) const { return 0; }
  int32_t enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results, void *workspace,
                  CUstream_st *stream) const;
};

} // namespace moec::trt
