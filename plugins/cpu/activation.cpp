#include "activation.h"
#include "kernels.h"
#include "op_base.h"
#include <algorithm>
#include <cmath>

namespace moec {
namespace {

constexpr int kPiece = 64;

// gpt-oss: gate and up are clamped, the sigmoid has a slope, and 1 is added to up.
void swiglu_oai(const float *gate, const float *up, int count, float alpha, float limit, float *out) {
  float g[kPiece], s[kPiece];
  for (int i = 0; i < count; ++i)
    g[i] = std::min(gate[i], limit);
  kernels().sigmoid(g, alpha, s, count);
  for (int i = 0; i < count; ++i)
    out[i] = (std::clamp(up[i], -limit, limit) + 1.0f) * g[i] * s[i];
}

float gelu(float x) {
  return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
}
float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}

// Without `up`: at most kPiece elements; out may be x.
void plain(Activation kind, const float *x, int count, float *out) {
  float s[kPiece];
  if (kind == Activation::kSilu)
    kernels().sigmoid(x, 1.0f, s, count);
  for (int i = 0; i < count; ++i)
    switch (kind) {
    case Activation::kSilu:
      out[i] = x[i] * s[i];
      break;
    case Activation::kGelu:
      out[i] = gelu(x[i]);
      break;
    case Activation::kGeluTanh:
      out[i] = gelu_tanh(x[i]);
      break;
    default:
      out[i] = x[i] > 0 ? x[i] * x[i] : 0.0f;
    }
}

} // namespace

Activation parse_activation(const std::string &name) {
  if (name == "silu")
    return Activation::kSilu;
  if (name == "gelu")
    return Activation::kGelu;
  if (name == "gelu_tanh")
    return Activation::kGeluTanh;
  if (name == "relu2")
    return Activation::kRelu2;
  if (name == "swiglu_oai")
    return Activation::kSwigluOai;
  throw Error("unknown activation '" + name + "'");
}

void activate(Activation kind, const float *gate, const float *up, int count, float alpha, float limit,
              float *out) {
  for (int first = 0; first < count; first += kPiece) {
    const int n = std::min(kPiece, count - first);
    if (kind == Activation::kSwigluOai) {
      swiglu_oai(gate + first, up + first, n, alpha, limit, out + first);
      continue;
    }
    plain(kind, gate + first, n, out + first);
    for (int i = first; up && i < first + n; ++i)
      out[i] *= up[i];
  }
}

} // namespace moec
