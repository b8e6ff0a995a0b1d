#include "experts_plugin.h"

namespace moec::trt {

char const *ExpertsOp::check(PluginTensorDesc const *in) const {
  return kernels::check(expert_params(in, 4), /*with_router=*/false);
}

size_t ExpertsOp::workspace(PluginTensorDesc const *in) const {
  return kernels::workspace_bytes(expert_params(in, 4), /*with_router=*/false);
}

int32_t ExpertsOp::enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results,
                           void *workspace, CUstream_st *stream) const {
  auto p = expert_params(in, 4);
  p.hidden = data[0];
  p.num_tokens = static_cast<int32_t const *>(data[1]);
  p.ids = static_cast<int32_t const *>(data[2]);
  p.weights = static_cast<float const *>(data[3]);
  p.experts = data[4];
  p.out = results[0];
  return kernels::experts(p, workspace, stream);
}

} // namespace moec::trt
