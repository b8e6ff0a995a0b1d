#include "asym_kv_attention_plugin.h"

#include "../kernels/launchers.h"

namespace moec::trt {
namespace {

kernels::AttentionParams params_of(AsymKVAttentionOp const &op, PluginTensorDesc const *in) {
  auto const dim = [in](int input, int axis) { return static_cast<int32_t>(in[input].dims.d[axis]); };
  kernels::AttentionParams p;
  p.rows = dim(0, 0);
  p.tokens = dim(0, 1);
  p.num_heads = dim(0, 2);
  p.k_dim = dim(0, 3);
  p.num_kv_heads = dim(2, 2);
  p.v_dim = dim(2, 3);
  p.num_blocks = dim(3, 2);
  p.block_bytes = in[3].dims.d[3];
  p.slots = dim(4, 0);
  p.ring_rows = dim(4, 2);
  p.dtype = in[0].type == DataType::kBF16 ? kernels::Dtype::kBFloat16 : kernels::Dtype::kFloat16;
  kernels::parse(op.format.c_str(), &p.format);
  p.scale = op.scale;
  p.softcap = op.softcap;
  p.window = op.window;
  p.has_sink_logits = op.has_sink_logits;
  p.block_tokens = op.block_tokens;
  p.promoted = op.promoted;
  p.sink_tokens = op.sink_tokens;
  p.recent_tokens = op.recent_tokens;
  p.rollback_tokens = op.rollback_tokens;
  return p;
}

} // namespace

char const *AsymKVAttentionOp::validate() const {
  kernels::KvFormat parsed;
  if (version != 1)
    return "attribute 'version' must be 1";
  if (layout != "rows")
    return "attribute 'layout': this library knows the layout \"rows\" only";
  if (!kernels::parse(format.c_str(), &parsed))
    return "attribute 'format': no CUDA kernel for this KV format (use mkv2, mkv2_lean, k4v2, int8 or fp16)";
  return nullptr;
}

void AsymKVAttentionOp::output_shape(DimsExprs const *in, DimsExprs &out, IExprBuilder &builder) const {
  out.nbDims = 3;
  out.d[0] = in[0].d[0];
  out.d[1] = in[0].d[1];
  out.d[2] = builder.operation(DimensionOperation::kPROD, *in[0].d[2], *in[2].d[3]);
}

char const *AsymKVAttentionOp::check(PluginTensorDesc const *in) const {
  return kernels::check(params_of(*this, in));
}

size_t AsymKVAttentionOp::workspace(PluginTensorDesc const *in) const {
  return kernels::workspace_bytes(params_of(*this, in));
}

int32_t AsymKVAttentionOp::enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results,
                                   void *workspace, CUstream_st *stream) const {
  auto p = params_of(*this, in);
  p.q = data[0];
  p.k = data[1];
  p.v = data[2];
  p.slot_ids = static_cast<int32_t const *>(data[5]);
  p.lengths = static_cast<int32_t const *>(data[6]);
  p.num_tokens = static_cast<int32_t const *>(data[7]);
  p.k_mean = static_cast<float const *>(data[8]);
  p.k_ref = static_cast<float const *>(data[9]);
  p.k_order = static_cast<int32_t const *>(data[10]);
  p.v_ref = static_cast<float const *>(data[11]);
  p.sink_logits = static_cast<float const *>(data[12]);
  p.out = results[0];
  p.blocks = results[1];
  p.ring = results[2];
  return kernels::asym_kv_attention(p, workspace, stream);
}

} // namespace moec::trt
