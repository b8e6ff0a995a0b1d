// moec::QuantizedLinear for TensorRT: x [..., K] times the transpose of a matrix stored as in
// weights.safetensors.
#pragma once

#include "plugin.h"

namespace moec::trt {

struct QuantizedLinearOp {
  static constexpr char const *kName = "QuantizedLinear";
  // x codes scales
  static constexpr TensorKind kInputs[] = {TensorKind::kActivation, TensorKind::kInt8, TensorKind::kHalf};

  int32_t bits = 0;
  int32_t group_size = 0;
  int32_t version = 0;

  template <class F> void visit(F &&field) {
    field("bits", bits);
    field("group_size", group_size);
    field("version", version);
  }

  char const *validate() const { return version == 1 ? nullptr : "attribute 'version' must be 1"; }
  int32_t outputs() const { return 1; }
  int32_t aliased_input(int32_t) const { return -1; }
  void output_shape(DimsExprs const *in, DimsExprs &out, IExprBuilder &builder) const;
  char const *check(PluginTensorDesc const *in) const;
  size_t workspace(PluginTensorDesc const *) const { return 0; }
  int32_t enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results, void *workspace,
                  CUstream_st *stream) const;
};

} // namespace moec::trt
