// moec::AsymKVAttention for TensorRT: `blocks` and `ring` are updated in place (outputs 1 and 2 are their
// memory).
#pragma once

#include "plugin.h"

namespace moec::trt {

struct AsymKVAttentionOp {
  static constexpr char const *kName = "AsymKVAttention";
  // q k v blocks ring slot_ids lengths num_tokens k_mean k_ref k_order v_ref sink_logits
  static constexpr TensorKind kInputs[] = {
      TensorKind::kActivation, TensorKind::kActivation, TensorKind::kActivation, TensorKind::kInt8,
      TensorKind::kHalf,       TensorKind::kInt32,      TensorKind::kInt32,      TensorKind::kInt32,
      TensorKind::kFloat,      TensorKind::kFloat,      TensorKind::kInt32,      TensorKind::kFloat,
      TensorKind::kFloat};

  float scale = 1.0f;
  int32_t window = 0;
  float softcap = 0.0f;
  int32_t has_sink_logits = 0;
  std::string format;
  int32_t block_tokens = 0;
  int32_t promoted = 0;
  int32_t sink_tokens = 0;
  int32_t recent_tokens = 0;
  int32_t rollback_tokens = 0;
  std::string layout;
  int32_t version = 0;
  int32_t layer = 0;

  template <class F> void visit(F &&field) {
    field("scale", scale);
    field("window", window);
    field("softcap", softcap);
    field("has_sink_logits", has_sink_logits);
    field("format", format);
    field("block_tokens", block_tokens);
    field("promoted", promoted);
    field("sink_tokens", sink_tokens);
    field("recent_tokens", recent_tokens);
    field("rollback_tokens", rollback_tokens);
    field("layout", layout);
    field("version", version);
    field("layer", layer);
  }

  char const *validate() const;
  int32_t outputs() const { return 3; }
  int32_t aliased_input(int32_t output) const { return output == 1 ? 3 : output == 2 ? 4 : -1; }
  void output_shape(DimsExprs const *in, DimsExprs &out, IExprBuilder &builder) const;
  char const *check(PluginTensorDesc const *in) const;
  size_t workspace(PluginTensorDesc const *in) const;
  int32_t enqueue(PluginTensorDesc const *in, void const *const *data, void *const *results, void *workspace,
                  CUstream_st *stream) const;
};

} // namespace moec::trt
