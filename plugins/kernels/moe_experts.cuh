// Experts of PipelinedMoE and Experts: two products a chosen expert, fp32 accumulation. Every sum runs in an
// order that depends on the matrix only, and the experts of a token are added in the order of their choice.
#pragma once
#include "moe_tokens.cuh"

namespace moec::kernels {

constexpr int kRowsPerWarp = 4;
constexpr int kRowsPerCta = kRowsPerWarp * kWarps;

// --- products of a matrix row with a vector, by one warp; x is zero from `columns` to the next multiple of
// 64 --------

MOEC_DEVICE float dot_int4(const uint8_t *blob, const MatrixPlan &m, int row, const float *x) {
  const int lane = threadIdx.x % 32;
  const size_t first = static_cast<size_t>(row) * m.groups;
  const __half *scales = reinterpret_cast<const __half *>(blob + m.scales) + first;
  const uint8_t *codes = blob + m.values + first * (kWeightGroup / 2);
  float sum = 0.0f;
  for (int g = lane / 8; g < m.groups; g += 4) { // 8 lanes a group, 8 columns each
    const uint32_t word = *reinterpret_cast<const uint32_t *>(codes + g * (kWeightGroup / 2) + lane % 8 * 4);
    const float *columns = x + g * kWeightGroup + lane % 8 * 8;
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++)
      part += static_cast<float>(static_cast<int>(word >> 4 * i & 15u) - 8) * columns[i];
    sum += part * __half2float(scales[g]);
  }
  return warp_sum(sum);
}

MOEC_DEVICE float dot_bf16(const uint8_t *blob, const MatrixPlan &m, int row, const float *x) {
  const __nv_bfloat16 *w =
      reinterpret_cast<const __nv_bfloat16 *>(blob + m.values) + static_cast<size_t>(row) * m.columns;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < m.columns; c += 32)
    sum += __bfloat162float(w[c]) * x[c];
  return warp_sum(sum);
}

template <WeightFormat FORMAT>
MOEC_DEVICE float dot(const uint8_t *blob, const MatrixPlan &m, int row, const float *x) {
  return FORMAT == WeightFormat::kInt4 ? dot_int4(blob, m, row, x) : dot_bf16(blob, m, row, x);
}

MOEC_DEVICE float bias(const MoeParams &p, const uint8_t *blob, int64_t offset, int row) {
  return p.has_bias ? reinterpret_cast<const float *>(blob + offset)[row] : 0.0f;
}

// --- activations
// ----------------------------------------------------------------------------------------------------

MOEC_DEVICE float sigmoid(float v) {
  return 1.0f / (1.0f + expf(-v));
}

MOEC_DEVICE float gelu_tanh(float v) {
  return 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
}

MOEC_DEVICE float activate(const MoeParams &p, float gate) {
  switch (p.activation) {
  case Activation::kSilu:
    return gate * sigmoid(gate);
  case Activation::kGelu:
    return 0.5f * gate * (1.0f + erff(gate * 0.7071067812f));
  case Activation::kGeluTanh:
    return gelu_tanh(gate);
  case Activation::kRelu2:
    return gate > 0.0f ? gate * gate : 0.0f;
  default:
    return gate * sigmoid(p.alpha * gate); // swiglu_oai, clamped by the caller
  }
}

MOEC_DEVICE float combine(const MoeParams &p, float gate, float up) {
  if (p.activation == Activation::kSwigluOai)
    return (fminf(fmaxf(up, -p.limit), p.limit) + 1.0f) * activate(p, fminf(gate, p.limit));
  return activate(p, gate) * up;
}

// --- kernels
// --------------------------------------------------------------------------------------------------------

// Grid T. hidden [T, H] to fp32 rows, padded with zeros.
template <class T> __global__ void MOEC_KERNEL widen_hidden(MoeParams p, MoePlan plan, float *hidden) {
  const size_t t = blockIdx.x;
  const T *from = static_cast<const T *>(p.hidden) + t * p.hidden_size;
  for (int c = threadIdx.x; c < plan.hidden_stride; c += kThreads)
    hidden[t * plan.hidden_stride + c] = c < p.hidden_size ? load(from + c) : 0.0f;
}

// The blob of an expert, or null (and the flag) for an id that does not exist.
MOEC_DEVICE const uint8_t *expert_blob(const MoeParams &p, int id) {
  if (id < 0 || id >= p.num_experts) {
    if (threadIdx.x == 0)
      atomicOr(p.error_flag, static_cast<int32_t>(kErrorExpertId));
    return nullptr;
  }
  return static_cast<const uint8_t *>(p.experts) + static_cast<size_t>(id) * p.blob_bytes;
}

// Grid (rows of I in chunks, K, T). inner [T, K, I] = act(gate x) * (up x), padded with zeros.
template <WeightFormat FORMAT>
__global__ void MOEC_KERNEL expert_up(MoeParams p, MoePlan plan, const int32_t *ids, const float *hidden,
                                      float *inner) {
  const int k = blockIdx.y, t = blockIdx.z, warp = threadIdx.x / 32;
  if (!is_valid_token(p, t))
    return;
  const uint8_t *blob = expert_blob(p, ids[t * p.top_k + k]);
  if (!blob)
    return;
  const float *x = hidden + static_cast<size_t>(t) * plan.hidden_stride;
  float *to = inner + (static_cast<size_t>(t) * p.top_k + k) * plan.inner_stride;
  for (int i = 0; i < kRowsPerWarp; i++) {
    const int row = blockIdx.x * kRowsPerCta + i * kWarps + warp;
    float value = 0.0f;
    if (row < p.intermediate_size) {
      const float gate = dot<FORMAT>(blob, plan.gate_up, row, x) + bias(p, blob, plan.gate_up_bias, row);
      const int up_row = row + p.intermediate_size;
      value =
          p.gated
              ? combine(p, gate,
                        dot<FORMAT>(blob, plan.gate_up, up_row, x) + bias(p, blob, plan.gate_up_bias, up_row))
              : activate(p, gate);
    }
    if (threadIdx.x % 32 == 0 && row < plan.inner_stride)
      to[row] = value;
  }
}

// Grid (rows of H in chunks, T). out [T, H]: the weighted experts in the order of choice; zero for padding.
template <class T, WeightFormat FORMAT>
__global__ void MOEC_KERNEL expert_down(MoeParams p, MoePlan plan, const int32_t *ids, const float *weights,
                                        const float *inner) {
  const int t = blockIdx.y, warp = threadIdx.x / 32;
  const bool valid = is_valid_token(p, t);
  for (int i = 0; i < kRowsPerWarp; i++) {
    const int row = blockIdx.x * kRowsPerCta + i * kWarps + warp;
    float sum = 0.0f;
    for (int k = 0; valid && row < p.hidden_size && k < p.top_k; k++) {
      const int chosen = t * p.top_k + k;
      const uint8_t *blob = expert_blob(p, ids[chosen]);
      if (!blob)
        continue;
      const float *x = inner + static_cast<size_t>(chosen) * plan.inner_stride;
      sum += weights[chosen] * (dot<FORMAT>(blob, plan.down, row, x) + bias(p, blob, plan.down_bias, row));
    }
    if (threadIdx.x % 32 == 0 && row < p.hidden_size)
      store(static_cast<T *>(p.out) + static_cast<size_t>(t) * p.hidden_size + row, sum);
  }
}

} // namespace moec::kernels
