#include "pipelined_moe_plugin.h"

namespace moec::trt {
namespace {

kernels::MoeParams params_of(PipelinedMoEOp const &op, PluginTensorDesc const *in) {
  auto p = op.expert_params(in, 6);
  kernels::parse(op.scoring.c_str(), &p.scoring);
  p.renormalize = op.renormalize;
  p.num_groups = op.num_groups;
  p.topk_groups = op.topk_groups;
  kernels::parse(op.group_score.c_str(), &p.group_score);
  p.routed_scale = op.routed_scale;
  return p;
}

} // namespace

char const *PipelinedMoEOp::validate() const {
  kernels::Scoring parsed_scoring;
  kernels::GroupScore parsed_group_score;
  if (!kernels::parse(scoring.c_str(), &parsed_scoring))
    return "attribute 'scoring': no CUDA kernel for it (softmax, sigmoid, softmax_after_topk)";
  if (!kernels::parse(group_score.c_str(), &parsed_group_score))
    return "attribute 'group_score': no CUDA kernel for it (max, top2)";
  return validate_experts();
}

char const *PipelinedMoEOp::check(PluginTensorDesc const *in) const {
  return kernels::check(params_of(*this, in), /*with_router=*/true);
}

size_t PipelinedMoEOp::workspace(PluginTensorDesc const *in) const {
  return kernels::workspace_bytes(params_of(*this, in), /*with_router=*/true);
}

int32_t PipelinedMoEOp::enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results,
                                void *workspace, CUstream_st *stream) const {
  auto p = params_of(*this, in);
  p.hidden = data[0];
  p.num_tokens = static_cast<int32_t const *>(data[1]);
  p.router_weight = static_cast<float const *>(data[2]);
  p.router_bias = static_cast<float const *>(data[3]);
  p.selection_bias = static_cast<float const *>(data[4]);
  p.experts = data[6];
  p.out = results[0];
  return kernels::pipelined_moe(p, workspace, stream);
}

} // namespace moec::trt
