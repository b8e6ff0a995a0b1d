// Small kernels for the emulator's own tests. `bug` plants one mistake in a kernel that is right with bug =
// 0.
#include "simt/simt.h"

namespace {

constexpr int kThreads = 64;

// out[block] = sum of 64 inputs, through shared memory. Bug 1: no barrier before the reads. Bug 2: tree stops
// early.
void block_sum(const float *in, float *out, int bug) {
  MOEC_DYN_SMEM(float, values);
  const int t = static_cast<int>(threadIdx.x);
  values[t] = in[blockIdx.x * kThreads + t];
  for (int step = kThreads / 2; step > (bug == 2 ? 1 : 0); step /= 2) {
    if (bug != 1)
      __syncthreads();
    if (t < step)
      values[t] += values[t + step];
  }
  if (t == 0)
    out[blockIdx.x] = values[0];
}

// Copies 4 tiles of 64 floats through two async stages. Bug 1: no wait. Bug 2: waits for too few groups.
// Bug 3: no barrier before a stage is overwritten.
void async_tiles(const float *in, float *out, int bug) {
  MOEC_DYN_SMEM(float, stages);
  const int t = static_cast<int>(threadIdx.x);
  auto issue = [&](int tile) {
    if (tile < 4)
      __pipeline_memcpy_async(&stages[tile % 2 * kThreads + t], &in[tile * kThreads + t], 4);
    __pipeline_commit();
  };
  issue(0);
  for (int tile = 0; tile < 4; tile++) {
    issue(tile + 1);
    if (bug != 1)
      __pipeline_wait_prior(bug == 2 ? 2 : 1);
    __syncthreads();
    out[tile * kThreads + t] = stages[tile % 2 * kThreads + (t + 1) % kThreads];
    if (bug != 3)
      __syncthreads();
  }
}

// Butterfly, rotations, votes and integer reductions of one warp: 7 outputs a lane.
void collectives(const float *in, float *out, int bug) {
  const int lane = static_cast<int>(threadIdx.x);
  if (bug == 2 && lane == 5)
    return; // named in the masks below
  float sum = in[lane];
  for (int offset = 16; offset; offset /= 2)
    sum += __shfl_xor_sync(~0u, sum, offset);
  if (bug == 1 && lane < 16)
    __syncwarp();
  float *row = out + lane * 7;
  row[0] = sum;
  row[1] = __shfl_sync(~0u, in[lane], lane + 3);
  row[2] = __shfl_up_sync(~0u, in[lane], 2, 8);
  row[3] = __shfl_down_sync(~0u, in[lane], 1);
  row[4] = static_cast<float>(__ballot_sync(~0u, in[lane] > 0) & 0xffffff);
  row[5] = static_cast<float>(__reduce_max_sync(~0u, lane * 7 % 32) + __reduce_add_sync(~0u, 1));
  row[6] = static_cast<float>(__any_sync(~0u, lane == 9) * 2 + __all_sync(~0u, lane >= 0));
  if (bug == 3)
    __syncwarp(0xfu); // lanes 4..31 are not in the mask
}

// The thread that waits alone: bug 1 at a named barrier, bug 2 in a collective that a lane never joins.
void lonely(const float *, float *out, int bug) {
  const unsigned t = threadIdx.x;
  if (bug == 1 && t < 32)
    simt::wait_barrier(1, 64, 0, "bar.sync 1");
  if (bug == 2) {
    if (t % 32 == 31)
      return;
    __shfl_sync(~0u, 1, 0);
  }
  __syncthreads();
  out[t] = static_cast<float>(__syncthreads_count(t % 2) + __syncthreads_or(t == 63) * 100 +
                              __syncthreads_and(t < 63) * 1000);
}

// Bug 0: reads shared memory that nobody wrote. Bug 1: writes one float past its end.
void shared_edges(const float *, float *out, int bug) {
  MOEC_DYN_SMEM(float, values);
  out[threadIdx.x] = values[threadIdx.x];
  if (bug == 1 && threadIdx.x == 0)
    values[kThreads] = 1.0f;
}

void atomics(const float *in, float *out, int) {
  const int t = static_cast<int>(threadIdx.x);
  int *words = reinterpret_cast<int *>(out);
  atomicAdd(&words[0], t);
  atomicMax(&words[1], t * 37 % 64);
  atomicMin(&words[2], -t);
  atomicOr(&words[3], 1 << t % 20);
  atomicCAS(&words[4], 0, 77);
  atomicExch(&words[5], 5);
  atomicAdd(&out[6], in[t]);
}

// in: A[16][16] row-major then B[16][8] row-major, rounded here; out: D[16][8]. Bug 1 means bf16.
void mma(const float *in, float *out, int bug) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  const float *b_matrix = in + 256;
  auto pack = [&](float lo, float hi) -> uint32_t {
    if (bug)
      return simt::float_to_bf16_bits(lo) | static_cast<uint32_t>(simt::float_to_bf16_bits(hi)) << 16;
    return simt::float_to_half_bits(lo) | static_cast<uint32_t>(simt::float_to_half_bits(hi)) << 16;
  };
  auto a_pair = [&](int row, int k) { return pack(in[row * 16 + k], in[row * 16 + k + 1]); };
  auto b_pair = [&](int k) { return pack(b_matrix[k * 8 + g], b_matrix[(k + 1) * 8 + g]); };
  const uint32_t a[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8),
                         a_pair(g + 8, 2 * t + 8)};
  const uint32_t b[2] = {b_pair(2 * t), b_pair(2 * t + 8)};
  float d[4] = {1, 1, 1, 1};
  bug ? mma_m16n8k16_bf16(d, a, b) : mma_m16n8k16_f16(d, a, b);
  for (int i = 0; i < 4; i++)
    out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

using Kernel = void (*)(const float *, float *, int);
struct Case {
  const char *name;
  Kernel kernel;
  unsigned grid, block;
  size_t shared;
};
const Case kCases[] = {
    {"block_sum", block_sum, 3, kThreads, kThreads * 4},
    {"async_tiles", async_tiles, 1, kThreads, 2 * kThreads * 4},
    {"collectives", collectives, 1, 32, 0},
    {"lonely", lonely, 1, kThreads, 0},
    {"shared_edges", shared_edges, 1, kThreads, kThreads * 4},
    {"atomics", atomics, 1, kThreads, 0},
    {"mma", mma, 1, 32, 0},
    {"too_many_threads", atomics, 1, 1056, 0},
    {"too_much_shared", atomics, 1, 32, 228 * 1024},
};

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Returns 0, 1 with the emulator's message, or 2 for an unknown name.
EXPORT int run_case(const char *name, int bug, int schedule, const float *in, float *out, char *message,
                    int size) {
  for (const Case &c : kCases) {
    if (strcmp(c.name, name) != 0)
      continue;
    simt::set_schedule(static_cast<simt::Schedule>(schedule), 11);
    try {
      MOEC_LAUNCH(c.kernel, dim3(c.grid), dim3(c.block), c.shared, nullptr, in, out, bug);
    } catch (const std::exception &error) {
      snprintf(message, static_cast<size_t>(size), "%s", error.what());
      return 1;
    }
    return 0;
  }
  return 2;
}

EXPORT void halves_to_floats(const uint16_t *in, float *half, float *bf16, int n) {
  for (int i = 0; i < n; i++) {
    half[i] = simt::half_bits_to_float(in[i]);
    bf16[i] = simt::bf16_bits_to_float(in[i]);
  }
}

EXPORT void floats_to_halves(const float *in, uint16_t *half, uint16_t *bf16, int n) {
  for (int i = 0; i < n; i++) {
    half[i] = simt::float_to_half_bits(in[i]);
    bf16[i] = simt::float_to_bf16_bits(in[i]);
  }
}
