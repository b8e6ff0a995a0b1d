// Quantization of a block in the cache format int8. The arithmetic is the format, as in kv_append.cuh: no
// contraction.
#pragma once
#include "kv_int8.cuh"

namespace moec::kernels {

// The 64 ring rows of a block, where its bytes go, and the steps of its groups.
struct Int8Job {
  const AttentionParams &p;
  const KvPlan &plan;
  __half *rows;
  RowState state;
  int row, head, first;
  uint8_t *out;
  float *k_step, *v_step; // shared: [Dk], [64 * groups]

  MOEC_DEVICE const __half *source(int t) const {
    return token_row(p, plan, rows, row, state, first + t, head);
  }
};

MOEC_DEVICE void fit_int8_key_channel(const Int8Job &job, int c) {
  float largest = 0.0f;
  for (int t = 0; t < kBlockTokens; t++)
    largest = fmaxf(largest, fabsf(__half2float(job.source(t)[c])));
  const uint8_t amplitude = e4m3_up(largest);
  job.out[job.plan.k_scale + c] = amplitude;
  job.k_step[c] = int8_step(amplitude);
}

MOEC_DEVICE void fit_int8_value_group(const Int8Job &job, int i) { // i = token * groups + group
  const int groups = job.plan.v_groups, group = i % groups, size = job.plan.v_group;
  const __half *y = job.source(i / groups) + job.p.k_dim + group * size;
  const float ref = job.p.v_ref[job.head * groups + group];
  float largest = 0.0f;
  for (int d = 0; d < size; d++)
    largest = fmaxf(largest, fabsf(__half2float(y[d]) / ref));
  const uint8_t amplitude = e4m3_up(largest);
  job.out[job.plan.v_scale + i] = amplitude;
  job.v_step[i] = int8_step(amplitude);
}

// The code of x as a byte. A step is at least 2^-9 / 127, so only a reference can make x infinite: clamped.
MOEC_DEVICE unsigned int8_code_of(float x, float step) {
  const float code = fminf(fmaxf(rintf(x / step), -kTopCode), kTopCode);
  return static_cast<unsigned>(static_cast<int>(code)) & 0xffu;
}

MOEC_DEVICE void pack_int8_keys(const Int8Job &job) {
  const int quads = job.p.k_dim / 4;
  unsigned *out = reinterpret_cast<unsigned *>(job.out + job.plan.k_lo);
  for (int i = threadIdx.x; i < kBlockTokens * quads; i += kThreads) {
    const int c = i % quads * 4;
    const __half *x = job.source(i / quads) + c;
    unsigned word = 0;
    for (int j = 0; j < 4; j++)
      word |= int8_code_of(__half2float(x[j]), job.k_step[c + j]) << 8 * j;
    out[i] = word;
  }
}

MOEC_DEVICE void pack_int8_values(const Int8Job &job) {
  const int quads = job.p.v_dim / 4, groups = job.plan.v_groups;
  unsigned *out = reinterpret_cast<unsigned *>(job.out + job.plan.v_codes);
  for (int i = threadIdx.x; i < kBlockTokens * quads; i += kThreads) {
    const int t = i / quads, c = i % quads * 4, group = c / job.plan.v_group;
    const __half *y = job.source(t) + job.p.k_dim + c;
    const float ref = job.p.v_ref[job.head * groups + group], step = job.v_step[t * groups + group];
    unsigned word = 0;
    for (int j = 0; j < 4; j++)
      word |= int8_code_of(__half2float(y[j]) / ref, step) << 8 * j;
    out[i] = word;
  }
}

// Padding between sections is zero, so that equal caches are equal bytes. (Codes end where a section may
// start.)
MOEC_DEVICE void zero_int8_gaps(const Int8Job &job) {
  const int gaps[2][2] = {
      {job.plan.k_scale + job.p.k_dim, job.plan.v_codes},
      {job.plan.v_scale + kBlockTokens * job.plan.v_groups, static_cast<int>(job.p.block_bytes)}};
  for (const auto &gap : gaps)
    for (int i = gap[0] + static_cast<int>(threadIdx.x); i < gap[1]; i += kThreads)
      job.out[i] = 0;
}

// As flush_blocks, for the format int8. Shared memory: Dk + 64 * groups floats.
__global__ void MOEC_KERNEL flush_int8_blocks(AttentionParams p, KvPlan plan, __half *rows) {
  MOEC_DYN_SMEM(float, shared);
  const int head = blockIdx.y, row = blockIdx.z;
  const RowState state = load_row(p, plan, row);
  const int block = quantized_blocks(p, plan, state.cached) + static_cast<int>(blockIdx.x);
  if (block >= quantized_blocks(p, plan, state.cached + state.added) || block >= p.num_blocks)
    return;
  const int first = plan.sinks + kBlockTokens * block;
  uint8_t *out = block_at(p, state.slot, head, block);
  const Int8Job job{p, plan, rows, state, row, head, first, out, shared, shared + p.k_dim};
  for (int c = threadIdx.x; c < p.k_dim; c += kThreads)
    fit_int8_key_channel(job, c);
  for (int i = threadIdx.x; i < kBlockTokens * plan.v_groups; i += kThreads)
    fit_int8_value_group(job, i);
  zero_int8_gaps(job);
  if (!MOEC_BUG(11))
    __syncthreads();
  pack_int8_keys(job);
  pack_int8_values(job);
}

} // namespace moec::kernels
