#include "quantized_linear_plugin.h"

#include "../kernels/quantized_linear.h"

namespace moec::trt {
namespace {

kernels::LinearParams params_of(QuantizedLinearOp const &op, PluginTensorDesc const *in) {
  auto const &x = in[0].dims;
  kernels::LinearParams p;
  p.rows = 1;
  for (int32_t axis = 0; axis + 1 < x.nbDims; ++axis)
    p.rows *= x.d[axis];
  p.columns = static_cast<int32_t>(x.d[x.nbDims - 1]);
  p.outputs = static_cast<int32_t>(in[1].dims.d[0]);
  p.code_bytes = in[1].dims.d[1];
  p.bits = op.bits;
  p.group_size = op.group_size;
  p.dtype = in[0].type == DataType::kBF16 ? kernels::Dtype::kBFloat16 : kernels::Dtype::kFloat16;
  return p;
}

} // namespace

void QuantizedLinearOp::output_shape(DimsExprs const *in, DimsExprs &out, IExprBuilder &) const {
  out = in[0];
  out.d[out.nbDims - 1] = in[1].d[0];
}

char const *QuantizedLinearOp::check(PluginTensorDesc const *in) const {
  return kernels::check(params_of(*this, in));
}

int32_t QuantizedLinearOp::enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results,
                                   void *, CUstream_st *stream) const {
  auto p = params_of(*this, in);
  p.x = data[0];
  p.codes = data[1];
  p.scales = data[2];
  p.out = results[0];
  return kernels::quantized_linear(p, stream);
}

} // namespace moec::trt
