// Activations of experts.
#pragma once
#include <string>

namespace moec {

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu2, kSwigluOai };

Activation parse_activation(const std::string &name); // throws Error

// out[i] = act(gate[i]) * up[i]; up is null for experts that are not gated. alpha and limit: swiglu_oai only.
// out may be gate.
void activate(Activation kind, const float *gate, const float *up, int count, float alpha, float limit,
              float *out);

} // namespace moec
