// moec::Experts: the experts of a layer for given ids and weights; the router stays in the graph.
#include "moe_layer.h"

namespace moec {
namespace {

enum Input { kHidden, kNumTokens, kIds, kWeights, kExperts, kResidency, kStaging };

class Experts {
public:
  static constexpr const char *kName = "Experts";
  static constexpr int kInputs[] = {ort::kFloat, ort::kInt32, ort::kInt32, ort::kFloat,
                                    ort::kInt8,  ort::kInt32, ort::kInt8};
  static constexpr int kOutputs[] = {ort::kFloat, ort::kInt32, ort::kInt8};

  explicit Experts(const Attributes &a) : layer_(a) {}

  void compute(const Call &call) {
    const Tensor hidden = call.input(kHidden), ids = call.input(kIds), weights = call.input(kWeights);
    const int64_t pairs = hidden.shape[0] * layer_.top_k();
    if (ids.count() != pairs || weights.count() != pairs)
      layer_.fail("ids and weights must be [T, top_k]");
    const std::vector<char> valid = layer_.valid_tokens(hidden.shape[0], call.input(kNumTokens));
    auto *out = static_cast<float *>(call.output(0, hidden.shape, 2));
    call.state_output(1, call.input(kResidency));
    call.state_output(2, call.input(kStaging));
    layer_.run(call, hidden, valid, ids.as<int32_t>(), weights.as<float>(), call.input(kExperts), out);
  }

private:
  MoeLayer layer_;
};

} // namespace

const ort::CustomOp *experts_op(int threads) {
  return Registration<Experts>::table(threads);
}

} // namespace moec
