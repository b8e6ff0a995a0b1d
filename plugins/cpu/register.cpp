// Entry point that onnxruntime calls when the library is registered with a session.
#include "op_base.h"

extern "C" __attribute__((visibility("default"))) moec::ort::Status *
RegisterCustomOps(moec::ort::SessionOptions *options, const moec::ort::ApiBase *base) {
  using namespace moec::ort;
  Table table = base->GetApi(kApiVersion);
  if (!table) // no way to report it other than by the version that is there
    return nullptr;
  Api api(table);
  CustomOpDomain *domain = nullptr;
  if (auto *s = api.call<Status *>(kCreateCustomOpDomain, "moec", &domain))
    return s;
  for (const CustomOp *op : {moec::asym_kv_attention_op(), moec::pipelined_moe_op(), moec::experts_op(),
                             moec::fused_linear_op(), moec::rotary_pair_op()})
    if (auto *s = api.call<Status *>(kCustomOpDomainAdd, domain, op))
      return s;
  return api.call<Status *>(kAddCustomOpDomain, options, domain);
}
