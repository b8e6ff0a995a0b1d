// Entry point that onnxruntime calls when the library is registered with a session.
#include "op_base.h"
#include <cstdlib>

namespace {

// The session's option "moec.threads": how many threads, the caller among them, work on an operator of ours.
moec::ort::Status *read_threads(const moec::ort::Api &api, const moec::ort::SessionOptions *options,
                                int *threads) {
  using namespace moec::ort;
  constexpr const char *kKey = "moec.threads";
  int given = 0;
  if (auto *s = api.call<Status *>(kHasSessionConfigEntry, options, kKey, &given))
    return s;
  char value[16] = "";
  size_t size = sizeof value;
  if (given)
    if (auto *s =
            api.call<Status *>(kGetSessionConfigEntry, options, kKey, static_cast<char *>(value), &size))
      return s;
  *threads = std::atoi(value);
  return nullptr;
}

} // namespace

extern "C" __attribute__((visibility("default"))) moec::ort::Status *
RegisterCustomOps(moec::ort::SessionOptions *options, const moec::ort::ApiBase *base) {
  using namespace moec::ort;
  Table table = base->GetApi(kApiVersion);
  if (!table) // no way to report it other than by the version that is there
    return nullptr;
  Api api(table);
  int threads = 0;
  if (auto *s = read_threads(api, options, &threads))
    return s;
  CustomOpDomain *domain = nullptr;
  if (auto *s = api.call<Status *>(kCreateCustomOpDomain, "moec", &domain))
    return s;
  for (const CustomOp *op :
       {moec::asym_kv_attention_op(threads), moec::pipelined_moe_op(threads), moec::experts_op(threads),
        moec::fused_linear_op(threads), moec::rotary_pair_op(threads)})
    if (auto *s = api.call<Status *>(kCustomOpDomainAdd, domain, op))
      return s;
  return api.call<Status *>(kAddCustomOpDomain, options, domain);
}
