// moec::PipelinedMoE: router, top-k and experts of a layer in one node. All experts are resident on the CPU,
// so the predictor (which only moves weights) has nothing to do.
#include "kernels.h"
#include "moe_layer.h"
#include "router.h"
#include <algorithm>

namespace moec {
namespace {

enum Input {
  kHidden,
  kNumTokens,
  kRouterWeight,
  kRouterBias,
  kSelectionBias,
  kPredictor,
  kExperts,
  kResidency,
  kStaging
};

class PipelinedMoe {
public:
  static constexpr const char *kName = "PipelinedMoE";
  static constexpr int kInputs[] = {ort::kFloat, ort::kInt32, ort::kFloat, ort::kFloat, ort::kFloat,
                                    ort::kFloat, ort::kInt8,  ort::kInt32, ort::kInt8};
  static constexpr int kOutputs[] = {ort::kFloat, ort::kInt32, ort::kInt8};

  explicit PipelinedMoe(const Attributes &a) : layer_(a), router_(a) {}

  void compute(const Call &call) {
    const Tensor hidden = call.input(kHidden), router_weight = call.input(kRouterWeight);
    const int64_t tokens = hidden.rows();
    if (router_weight.shape[0] != router_.num_experts || router_weight.shape[1] != hidden.last())
      layer_.fail("router_weight and hidden do not fit");
    const std::vector<char> valid = layer_.valid_tokens(tokens, call.input(kNumTokens));
    const size_t pairs = static_cast<size_t>(tokens) * static_cast<size_t>(layer_.top_k());
    std::vector<int32_t> ids(pairs);
    std::vector<float> weights(pairs);
    route(call, hidden, router_weight.as<float>(), valid, ids.data(), weights.data());

    auto *out = static_cast<float *>(call.output(0, hidden.shape, hidden.rank));
    call.state_output(1, call.input(kResidency));
    call.state_output(2, call.input(kStaging));
    layer_.run(call, hidden, valid, ids.data(), weights.data(), call.input(kExperts), out);
  }

private:
  void route(const Call &call, const Tensor &hidden, const float *router_weight,
             const std::vector<char> &valid, int32_t *ids, float *weights) const {
    constexpr int64_t kTokensPerTask = 16;
    const int64_t tokens = hidden.rows();
    const int H = static_cast<int>(hidden.last());
    const float *bias = call.data<float>(kRouterBias), *selection_bias = call.data<float>(kSelectionBias);
    call.parallel(static_cast<size_t>((tokens + kTokensPerTask - 1) / kTokensPerTask), [&](size_t task) {
      std::vector<float> logits(static_cast<size_t>(router_.num_experts));
      const int64_t first = static_cast<int64_t>(task) * kTokensPerTask;
      for (int64_t t = first; t < std::min(tokens, first + kTokensPerTask); ++t) {
        if (!valid[t])
          continue;
        for (int e = 0; e < router_.num_experts; ++e)
          logits[e] =
              kernels().dot(hidden.as<float>() + t * H, router_weight + static_cast<int64_t>(e) * H, H) +
              bias[e];
        router_.route(logits.data(), selection_bias, ids + t * router_.top_k, weights + t * router_.top_k);
      }
    });
  }

  MoeLayer layer_;
  Router router_;
};

} // namespace

const ort::CustomOp *pipelined_moe_op(int threads) {
  return Registration<PipelinedMoe>::table(threads);
}

} // namespace moec
