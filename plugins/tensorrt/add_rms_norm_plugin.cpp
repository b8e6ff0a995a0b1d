#include "add_rms_norm_plugin.h"

#include "../kernels/add_rms_norm.h"

namespace moec::trt {
namespace {

kernels::AddRmsNormParams params_of(AddRMSNormOp const &op, PluginTensorDesc const *in) {
  auto const &x = in[0].dims;
  kernels::AddRmsNormParams p;
  p.rows = 1;
  for (int32_t axis = 0; axis + 1 < x.nbDims; ++axis)
    p.rows *= x.d[axis];
  p.columns = static_cast<int32_t>(x.d[x.nbDims - 1]);
  p.epsilon = op.epsilon;
  p.scale_offset = op.scale_offset;
  p.dtype = in[0].type == DataType::kBF16 ? kernels::Dtype::kBFloat16 : kernels::Dtype::kFloat16;
  return p;
}

bool same(Dims const &a, Dims const &b) {
  bool equal = a.nbDims == b.nbDims;
  for (int32_t axis = 0; equal && axis < a.nbDims; ++axis)
    equal = a.d[axis] == b.d[axis];
  return equal;
}

} // namespace

char const *AddRMSNormOp::check(PluginTensorDesc const *in) const {
  Dims const &x = in[0].dims, &scale = in[2].dims;
  if (!same(x, in[1].dims))
    return "AddRMSNorm: x and residual have different shapes";
  if (scale.nbDims != 1 || scale.d[0] != x.d[x.nbDims - 1])
    return "AddRMSNorm: scale must have one value for each column of x";
  return kernels::check(params_of(*this, in));
}

int32_t AddRMSNormOp::enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results,
                              void *, CUstream_st *stream) const {
  auto p = params_of(*this, in);
  p.x = data[0];
  p.residual = data[1];
  p.scale = data[2];
  p.out = results[0];
  p.sum = results[1];
  return kernels::add_rms_norm(p, stream);
}

} // namespace moec::trt
