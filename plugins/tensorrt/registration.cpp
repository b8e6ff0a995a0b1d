// What TensorRT and the build child look for in the library.
#include "add_rms_norm_plugin.h"
#include "asym_kv_attention_plugin.h"
#include "experts_plugin.h"
#include "pipelined_moe_plugin.h"
#include "quantized_linear_plugin.h"

#define MOEC_EXPORT extern "C" __attribute__((visibility("default")))

MOEC_EXPORT int32_t const volatile moec_trt_build_version;
int32_t const volatile moec_trt_build_version = 2;

namespace moec::trt {
std::atomic<int64_t> alias_queries{0};
}

MOEC_EXPORT int64_t moec_trt_alias_queries() {
  return moec::trt::alias_queries.load();
}

MOEC_EXPORT moec::trt::IPluginCreatorInterface *const *getCreators(int32_t &count) {
  static moec::trt::Creator<moec::trt::AsymKVAttentionOp> attention;
  static moec::trt::Creator<moec::trt::PipelinedMoEOp> moe;
  static moec::trt::Creator<moec::trt::ExpertsOp> experts;
  static moec::trt::Creator<moec::trt::QuantizedLinearOp> linear;
  static moec::trt::Creator<moec::trt::AddRMSNormOp> norm;
  static moec::trt::IPluginCreatorInterface *creators[] = {&attention, &moe, &experts, &linear, &norm};
  count = 5;
  return creators;
}

// TensorRT requires the export. Messages go to stderr instead, which the build child captures: the finder's
// own interface differs between TensorRT versions.
MOEC_EXPORT void setLoggerFinder(void *) {}
