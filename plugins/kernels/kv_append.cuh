// Packing side of AsymKVAttention: new rows into scratch, finished blocks quantized, scratch into the ring.
//
// The arithmetic is the format (docs/kv-cache.md): fp32, true division, round to nearest even, and no
// contraction, so this file must be compiled with -fmad=false (nvcc) or -ffp-contract=off (host).
#pragma once
#include "e4m3.cuh"
#include "kv_rows.cuh"

namespace moec::kernels {

constexpr float kHalfMax = 65504.0f;
constexpr float kClip2Bit = 0.8f;
constexpr float kValueStretch = 1.0625f, kValueShift = 0.09375f; // as in the reference

MOEC_DEVICE float clamp(float v, float low, float high) {
  return fminf(fmaxf(v, low), high);
}

MOEC_DEVICE __half to_ring(float v) { // a NaN has raised its flag already; the ring stays finite
  return __float2half_rn(v != v ? 0.0f : clamp(v, -kHalfMax, kHalfMax));
}

// In place, by the whole CTA: orthonormal Sylvester-Hadamard transform of each group of values[0:size].
MOEC_DEVICE void rotate(float *values, int size, int group, float norm) {
  for (int stride = 1; stride < group; stride *= 2) {
    if (!MOEC_BUG(4) || stride == 1)
      __syncthreads();
    for (int i = threadIdx.x; i < size / 2; i += kThreads) {
      const int first = i / stride * 2 * stride + i % stride;
      const float a = values[first], b = values[first + stride];
      values[first] = a + b;
      values[first + stride] = a - b;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += kThreads)
    values[i] = values[i] * norm;
  __syncthreads();
}

// Writes the K part of a new row; returns whether this thread saw a NaN.
template <class T>
MOEC_DEVICE bool prepare_key(const AttentionParams &p, const KvPlan &plan, const T *k, int head,
                             __half *row) {
  bool nan = false;
  for (int c = threadIdx.x; c < p.k_dim; c += kThreads) {
    const int at = head * p.k_dim + c;
    float x = load(k + source_channel(p, plan, at));
    nan |= x != x;
    if (plan.quantized)
      x = (x - p.k_mean[at]) / p.k_ref[at];
    row[c] = to_ring(x);
  }
  return nan;
}

template <class T>
MOEC_DEVICE bool prepare_value(const AttentionParams &p, const KvPlan &plan, const T *v, float *values,
                               __half *row) {
  bool nan = false;
  for (int d = threadIdx.x; d < p.v_dim; d += kThreads) {
    const float y = load(v + d);
    nan |= y != y;
    values[d] = clamp(y, -kHalfMax, kHalfMax); // before the rotation too, where inf - inf would be NaN
  }
  if (plan.quantized)
    rotate(values, p.v_dim, plan.v_group, plan.rotation_norm);
  for (int d = threadIdx.x; d < p.v_dim; d += kThreads)
    row[d] = to_ring(values[d]);
  return nan;
}

// Grid (S, Hkv, b). Scratch rows of the new tokens. Shared memory: Dv floats.
template <class T> __global__ void MOEC_KERNEL prepare_rows(AttentionParams p, KvPlan plan, __half *rows) {
  MOEC_DYN_SMEM(float, values);
  const int i = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const RowState state = load_row(p, plan, row);
  if (i + 1 == p.tokens && p.num_tokens[row] != state.added && threadIdx.x == 0)
    atomicOr(p.error_flag,
             static_cast<int32_t>(kErrorCapacity)); // more than fit, than there are, or negative
  if (i >= state.added)
    return;
  const size_t source = static_cast<size_t>(row * p.tokens + i) * p.num_kv_heads + head;
  __half *to = new_row(p, plan, rows, row, i, head);
  const bool k_nan = prepare_key(p, plan, static_cast<const T *>(p.k) + source * p.k_dim, head, to);
  const bool v_nan =
      prepare_value(p, plan, static_cast<const T *>(p.v) + source * p.v_dim, values, to + p.k_dim);
  if (k_nan || v_nan)
    atomicOr(p.error_flag, static_cast<int32_t>(kErrorNaN));
}

// --- quantization of one block
// ------------------------------------------------------------------------------------

// The 64 rows of a block and where its results go.
struct BlockJob {
  const AttentionParams &p;
  const KvPlan &plan;
  __half *rows;
  RowState state;
  int row, head, first;
  uint8_t *out;
  float *k_scale, *k_zero, *v_scale, *v_low; // shared: [Dk], [Dk], [64 * groups], [64 * groups]

  MOEC_DEVICE const __half *source(int t) const {
    return token_row(p, plan, rows, row, state, first + t, head);
  }
  MOEC_DEVICE float levels(int c) const { return c < plan.promoted && !MOEC_BUG(3) ? 15.0f : 3.0f; }
};

MOEC_DEVICE void fit_key_channel(const BlockJob &job, int c) {
  float top = __half2float(job.source(0)[c]), bottom = top;
  for (int t = 1; t < kBlockTokens; t++) {
    const float x = __half2float(job.source(t)[c]);
    top = fmaxf(top, x);
    bottom = fminf(bottom, x);
  }
  const float levels = job.levels(c), clip = c < job.plan.promoted ? 1.0f : kClip2Bit;
  const float half = clip * ((top - bottom) / 2.0f), middle = (top + bottom) / 2.0f;
  const uint8_t code = e4m3_up(half * 2.0f / levels);
  const float scale = e4m3_decode(code), zero = clamp(rintf((middle - half) / scale), -128.0f, 127.0f);
  job.out[job.plan.k_scale + c] = code;
  job.out[job.plan.k_zero + c] = static_cast<uint8_t>(static_cast<int8_t>(zero));
  job.k_scale[c] = scale;
  job.k_zero[c] = zero;
}

MOEC_DEVICE void pack_keys(const BlockJob &job) {
  const int quads = job.p.k_dim / 4, high_quads = job.plan.promoted / 4;
  for (int i = threadIdx.x; i < kBlockTokens * quads; i += kThreads) {
    const int t = i / quads, quad = i % quads;
    const __half *x = job.source(t) + quad * 4;
    unsigned low = 0, high = 0;
    for (int j = 0; j < 4; j++) {
      const int c = quad * 4 + j;
      const float wanted = rintf(__half2float(x[j]) / job.k_scale[c]) - job.k_zero[c];
      const unsigned code = static_cast<unsigned>(clamp(wanted, 0.0f, job.levels(c)));
      low |= (code & 3) << 2 * j;
      high |= (code >> 2) << 2 * j;
    }
    job.out[job.plan.k_lo + i] = static_cast<uint8_t>(low);
    if (quad < high_quads)
      job.out[job.plan.k_hi + t * high_quads + quad] = static_cast<uint8_t>(high);
  }
}

MOEC_DEVICE void fit_value_group(const BlockJob &job, int i) { // i = token * groups + group
  const int group = i % job.plan.v_groups, size = job.plan.v_group, t = i / job.plan.v_groups;
  const __half *y = job.source(t) + job.p.k_dim + group * size;
  const float ref = job.p.v_ref[job.head * job.plan.v_groups + group];
  float top = __half2float(y[0]) / ref, bottom = top;
  for (int d = 1; d < size; d++) {
    const float relative = __half2float(y[d]) / ref;
    top = fmaxf(top, relative);
    bottom = fminf(bottom, relative);
  }
  const float half = kClip2Bit * ((top - bottom) / 2.0f);
  const uint8_t code = e4m3_up(half * 2.0f / 3.0f);
  const float scale = e4m3_decode(code), offset = t % 2 ? 1.75f : 1.25f;
  const uint8_t low = e4m3_rne(clamp((top + bottom) / 2.0f - offset * scale, -kE4m3Max, kE4m3Max));
  job.out[job.plan.v_scale + i] = code;
  job.out[job.plan.v_zero + i] = low;
  job.v_scale[i] = scale;
  job.v_low[i] = e4m3_decode(low);
}

MOEC_DEVICE void pack_values(const BlockJob &job) {
  const int quads = job.p.v_dim / 4, groups = job.plan.v_groups;
  for (int i = threadIdx.x; i < kBlockTokens * quads; i += kThreads) {
    const int t = i / quads, quad = i % quads, group = quad * 4 / job.plan.v_group;
    const __half *y = job.source(t) + job.p.k_dim + quad * 4;
    const float ref = job.p.v_ref[job.head * groups + group];
    const float scale = job.v_scale[t * groups + group], low = job.v_low[t * groups + group];
    unsigned byte = 0;
    for (int j = 0; j < 4; j++) {
      const float wanted = rintf((__half2float(y[j]) / ref - low) / scale * kValueStretch - kValueShift);
      byte |= static_cast<unsigned>(clamp(wanted, 0.0f, 3.0f)) << 2 * j;
    }
    job.out[job.plan.v_codes + i] = static_cast<uint8_t>(byte);
  }
}

// Padding between sections is zero, so that equal caches are equal bytes.
MOEC_DEVICE void zero_gap(const BlockJob &job, int from, int to) {
  for (int i = from + static_cast<int>(threadIdx.x); i < to; i += kThreads)
    job.out[i] = 0;
}

MOEC_DEVICE void zero_gaps(const BlockJob &job) {
  const AttentionParams &p = job.p;
  const KvPlan &plan = job.plan;
  zero_gap(job, plan.k_lo + 16 * p.k_dim, plan.k_hi);
  zero_gap(job, plan.k_hi + 16 * plan.promoted, plan.k_scale);
  zero_gap(job, plan.k_scale + p.k_dim, plan.k_zero);
  zero_gap(job, plan.k_zero + p.k_dim, plan.v_codes);
  zero_gap(job, plan.v_codes + 16 * p.v_dim, plan.v_scale);
  zero_gap(job, plan.v_scale + kBlockTokens * plan.v_groups, plan.v_zero);
  zero_gap(job, plan.v_zero + kBlockTokens * plan.v_groups, static_cast<int>(p.block_bytes));
}

// Grid (blocks that S tokens can finish, Hkv, b). Writes every block that the new tokens push out of the
// ring; no query of an earlier token looks at it. Shared memory: 2 * (Dk + 64 * groups) floats.
__global__ void MOEC_KERNEL flush_blocks(AttentionParams p, KvPlan plan, __half *rows) {
  MOEC_DYN_SMEM(float, shared);
  const int head = blockIdx.y, row = blockIdx.z;
  const RowState state = load_row(p, plan, row);
  const int block = quantized_blocks(p, plan, state.cached) + static_cast<int>(blockIdx.x);
  if (block >= quantized_blocks(p, plan, state.cached + state.added) || block >= p.num_blocks)
    return;
  const int groups = kBlockTokens * plan.v_groups;
  float *v_scale = shared + 2 * p.k_dim;
  const BlockJob job{p,
                     plan,
                     rows,
                     state,
                     row,
                     head,
                     plan.sinks + kBlockTokens * block,
                     block_at(p, state.slot, head, block),
                     shared,
                     shared + p.k_dim,
                     v_scale,
                     v_scale + groups};
  for (int c = threadIdx.x; c < p.k_dim; c += kThreads)
    fit_key_channel(job, c);
  for (int i = threadIdx.x; i < groups; i += kThreads)
    fit_value_group(job, i);
  zero_gaps(job);
  if (!MOEC_BUG(5))
    __syncthreads();
  pack_keys(job);
  pack_values(job);
}

// Grid (S, Hkv, b). Scratch rows to the ring; of tokens that share a ring row only the last one is written.
__global__ void MOEC_KERNEL append_rows(AttentionParams p, KvPlan plan, __half *rows) {
  const int i = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const RowState state = load_row(p, plan, row);
  const int token = state.cached + i, end = state.cached + state.added;
  if (i >= state.added || (token >= plan.sinks && end - token > plan.period))
    return;
  const __half *from = new_row(p, plan, rows, row, i, head);
  __half *to = cached_row(p, plan, state.slot, token, head);
  for (int c = threadIdx.x; c < plan.row_dim; c += kThreads)
    to[c] = from[c];
}

} // namespace moec::kernels
