#include "moe_attributes.h"

namespace moec::trt {

char const *ExpertAttributes::validate_experts() const {
  kernels::Activation parsed_activation;
  kernels::WeightFormat parsed_format;
  if (version != 1)
    return "attribute 'version' must be 1";
  if (tile_layout != "rows")
    return "attribute 'tile_layout': this library knows the layout \"rows\" only";
  if (!kernels::parse(activation.c_str(), &parsed_activation))
    return "attribute 'activation': no CUDA kernel for it (silu, gelu, gelu_tanh, relu2, swiglu_oai)";
  if (!kernels::parse(weight_format.c_str(), &parsed_format))
    return "attribute 'weight_format': no CUDA kernel for it (bf16, int4)";
  return nullptr;
}

kernels::MoeParams ExpertAttributes::expert_params(PluginTensorDesc const *in, int experts) const {
  kernels::MoeParams p;
  p.tokens_total = static_cast<int32_t>(in[0].dims.d[0]);
  p.hidden_size = static_cast<int32_t>(in[0].dims.d[1]);
  p.rows = static_cast<int32_t>(in[1].dims.d[0]);
  Dims const &blobs = in[experts].dims; // [experts, 1, bytes], see moec/compile/lowering.py
  p.blob_bytes = blobs.d[blobs.nbDims - 1];
  p.dtype = in[0].type == DataType::kBF16 ? kernels::Dtype::kBFloat16 : kernels::Dtype::kFloat16;
  p.num_experts = num_experts;
  p.top_k = top_k;
  kernels::parse(activation.c_str(), &p.activation);
  p.gated = gated;
  p.alpha = alpha;
  p.limit = limit;
  kernels::parse(weight_format.c_str(), &p.weight_format);
  p.group_size = group_size;
  p.intermediate_size = intermediate_size;
  p.has_bias = has_bias;
  p.num_slots = num_slots;
  return p;
}

} // namespace moec::trt
