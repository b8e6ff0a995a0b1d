// moec::RotaryPair: ONNX's RotaryEmbedding of queries and keys in one node.
//
//   inputs   q [b,S,Hq*D], k [b,S,Hkv*D], cos and sin [b,S,D/2]
//   outputs  both, rotated: halves (x1, x2) of a head become (cos x1 - sin x2, sin x1 + cos x2)
#include "op_base.h"

namespace moec {
namespace {

enum Input { kQ, kK, kCos, kSin };

class RotaryPair {
public:
  static constexpr const char *kName = "RotaryPair";
  static constexpr int kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr int kOutputs[] = {ort::kFloat, ort::kFloat};

  explicit RotaryPair(const Attributes &) {}

  void compute(const Call &call) {
    const Tensor q = call.input(kQ), k = call.input(kK), cos = call.input(kCos);
    const int64_t tokens = q.rows(), half = cos.last();
    require(half > 0 && q.last() % (2 * half) == 0 && k.last() % (2 * half) == 0,
            "q and k must have whole heads");
    require(k.rows() == tokens && cos.rows() == tokens, "q, k and cos must have the same tokens");
    const auto *c = cos.as<float>(), *s = call.data<float>(kSin);
    auto *rotated_q = static_cast<float *>(call.output(0, q.shape, q.rank));
    auto *rotated_k = static_cast<float *>(call.output(1, k.shape, k.rank));
    const auto token = [&](int64_t t) {
      rotate(q.as<float>() + t * q.last(), c + t * half, s + t * half, q.last(), half,
             rotated_q + t * q.last());
      rotate(k.as<float>() + t * k.last(), c + t * half, s + t * half, k.last(), half,
             rotated_k + t * k.last());
    };
    if (tokens <= 8)
      for (int64_t t = 0; t < tokens; ++t)
        token(t);
    else
      call.parallel(static_cast<size_t>(tokens), [&](size_t t) { token(static_cast<int64_t>(t)); });
  }

private:
  static void require(bool ok, const char *what) {
    if (!ok)
      throw Error(std::string("RotaryPair: ") + what);
  }

  static void rotate(const float *x, const float *cos, const float *sin, int64_t size, int64_t half,
                     float *out) {
    for (int64_t head = 0; head < size; head += 2 * half, x += 2 * half, out += 2 * half)
      for (int64_t i = 0; i < half; ++i) {
        out[i] = cos[i] * x[i] - sin[i] * x[half + i];
        out[half + i] = sin[i] * x[i] + cos[i] * x[half + i];
      }
  }
};

} // namespace

const ort::CustomOp *rotary_pair_op(int threads) {
  return Registration<RotaryPair>::table(threads);
}

} // namespace moec
