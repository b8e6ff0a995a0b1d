// Router of PipelinedMoE: logits, scores and the top-k choice of one token a CTA. Ties go to the lower expert
// id.
#pragma once
#include "moe_tokens.cuh"

namespace moec::kernels {

constexpr float kNever = -INFINITY;

struct Best {
  float value;
  int index;
};

MOEC_DEVICE Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

// The largest of values[0:n], on every lane of the warp.
MOEC_DEVICE Best warp_argmax(const float *values, int n) {
  Best best{kNever, n};
  for (int i = threadIdx.x % 32; i < n; i += 32)
    best = better(best, {values[i], i});
  for (int offset = 16; offset; offset >>= 1) {
    const float value = __shfl_xor_sync(kAllLanes, best.value, offset);
    const int index = __shfl_xor_sync(kAllLanes, best.index, offset);
    best = better(best, {value, index});
  }
  return best;
}

// Takes the largest out and lets the warp see that it is gone.
MOEC_DEVICE Best take_best(float *values, int n) {
  Best best = warp_argmax(values, n);
  best.index = smaller(best.index, n - 1); // only where all values are NaN
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    values[best.index] = kNever;
  __syncwarp();
  return best;
}

// The whole CTA: logits of all experts into shared memory.
MOEC_DEVICE void router_logits(const MoeParams &p, const float *x, float *logits) {
  const int lane = threadIdx.x % 32;
  for (int e = threadIdx.x / 32; e < p.num_experts; e += kWarps) {
    const float *w = p.router_weight + static_cast<size_t>(e) * p.hidden_size;
    float sum = 0.0f;
    for (int c = lane; c < p.hidden_size; c += 32)
      sum += w[c] * x[c];
    sum = warp_sum(sum);
    if (lane == 0)
      logits[e] = sum + p.router_bias[e];
  }
}

// One warp, in place: softmax over values[0:n].
MOEC_DEVICE void warp_softmax(float *values, int n) {
  const int lane = threadIdx.x % 32;
  float top = kNever, sum = 0.0f;
  for (int i = lane; i < n; i += 32)
    top = fmaxf(top, values[i]);
  top = warp_max(top);
  for (int i = lane; i < n; i += 32) {
    values[i] = expf(values[i] - top);
    sum += values[i];
  }
  sum = warp_sum(sum);
  for (int i = lane; i < n; i += 32)
    values[i] /= sum;
  __syncwarp();
}

MOEC_DEVICE void warp_scores(const MoeParams &p, float *scores) {
  if (p.scoring == Scoring::kSoftmax)
    warp_softmax(scores, p.num_experts);
  if (p.scoring != Scoring::kSigmoid)
    return;
  for (int e = threadIdx.x % 32; e < p.num_experts; e += 32)
    scores[e] = 1.0f / (1.0f + expf(-scores[e]));
  __syncwarp();
}

MOEC_DEVICE float group_score(const MoeParams &p, const float *choice, int size) {
  float first = kNever, second = kNever;
  for (int e = 0; e < size; e++) {
    const float value = choice[e];
    second = fmaxf(second, fminf(first, value));
    first = fmaxf(first, value);
  }
  return p.group_score == GroupScore::kMax || size == 1 ? first : first + second;
}

// One warp: experts outside of the best groups can no longer be chosen.
MOEC_DEVICE void mask_groups(const MoeParams &p, float *choice, float *groups) {
  const int lane = threadIdx.x % 32, size = p.num_experts / p.num_groups;
  for (int g = lane; g < p.num_groups; g += 32)
    groups[g] = group_score(p, choice + g * size, size);
  __syncwarp();
  for (int i = 0; i < p.topk_groups; i++)
    take_best(groups, p.num_groups);
  for (int e = lane; e < p.num_experts; e += 32)
    if (groups[e / size] != kNever) // not taken
      choice[e] = kNever;
  __syncwarp();
}

// Weights of the chosen experts from their scores, in place; K is small, so one thread does it in order.
MOEC_DEVICE void finish_weights(const MoeParams &p, float *weights) {
  float top = kNever, sum = 0.0f;
  for (int k = 0; k < p.top_k; k++)
    top = fmaxf(top, weights[k]);
  for (int k = 0; k < p.top_k; k++) {
    if (p.scoring == Scoring::kSoftmaxAfterTopk)
      weights[k] = expf(weights[k] - top);
    sum += weights[k];
  }
  const bool divide = p.scoring == Scoring::kSoftmaxAfterTopk || p.renormalize;
  const float factor = p.routed_scale / (divide ? sum + 1e-20f : 1.0f);
  for (int k = 0; k < p.top_k; k++)
    weights[k] *= factor;
}

// Grid T. ids and weights [T, K]; untouched where the token is padding. Shared memory: 2 E + groups floats.
__global__ void MOEC_KERNEL route_tokens(MoeParams p, MoePlan plan, const float *hidden, int32_t *ids,
                                         float *weights) {
  MOEC_DYN_SMEM(float, scores);
  float *choice = scores + p.num_experts, *groups = choice + p.num_experts;
  const int t = blockIdx.x, lane = threadIdx.x % 32;
  if (!is_valid_token(p, t))
    return;
  router_logits(p, hidden + static_cast<size_t>(t) * plan.hidden_stride, scores);
  if (!MOEC_BUG(8))
    __syncthreads();
  if (threadIdx.x >= 32)
    return;
  warp_scores(p, scores);
  for (int e = lane; e < p.num_experts; e += 32)
    choice[e] = scores[e] + p.selection_bias[e];
  __syncwarp();
  if (p.num_groups > 1)
    mask_groups(p, choice, groups);
  for (int k = 0; k < p.top_k; k++) {
    const Best best = take_best(choice, p.num_experts);
    if (lane == 0) {
      ids[t * p.top_k + k] = best.index;
      weights[t * p.top_k + k] = scores[best.index];
    }
  }
  if (lane == 0)
    finish_weights(p, weights + t * p.top_k);
}

} // namespace moec::kernels
