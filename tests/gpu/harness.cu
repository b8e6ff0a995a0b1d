// The kernels on a real GPU, for ctypes: the functions of ../plugins/kernels/binding.cpp with the same
// arguments (host pointers; `schedule` and `seed` have no meaning here), so that the emulator's tests run on
// both. Linked with libmoec_kernels.a as a product build compiles it.
#include "device_call.h"
#include "kernels/add_rms_norm.h"
#include "kernels/e4m3.cuh"
#include "kernels/kv_plan.h"
#include "kernels/launchers.h"
#include "kernels/moe_experts.cuh"
#include "kernels/quantized_linear.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace moec::kernels;

namespace {

int replays = 0; // of every call from now on; 0: launch without a graph

template <class... Sizes> size_t product(Sizes... sizes) {
  return (static_cast<size_t>(sizes) * ... * 1);
}

void place(harness::Arrays &arrays, AttentionParams &p) {
  const size_t half = 2, word = 4, steps = product(p.rows, p.tokens);
  const size_t cached = product(p.slots, p.num_kv_heads), channels = product(p.num_kv_heads, p.k_dim);
  arrays.input(p.q, product(steps, p.num_heads, p.k_dim, half), "q");
  arrays.input(p.k, product(steps, channels, half), "k");
  arrays.input(p.v, product(steps, p.num_kv_heads, p.v_dim, half), "v");
  arrays.input(p.slot_ids, product(p.rows, word), "slot_ids");
  arrays.input(p.lengths, product(p.slots, word), "lengths");
  arrays.input(p.num_tokens, product(p.rows, word), "num_tokens");
  arrays.input(p.k_mean, channels * word, "k_mean");
  arrays.input(p.k_ref, channels * word, "k_ref");
  arrays.input(p.k_order, channels * word, "k_order");
  arrays.input(p.v_ref, product(p.num_kv_heads, make_plan(p).v_groups, word), "v_ref");
  arrays.input(p.sink_logits, product(p.num_heads, word), "sink_logits");
  arrays.output(p.blocks, product(cached, p.num_blocks, p.block_bytes), "blocks");
  arrays.output(p.ring, product(cached, p.ring_rows, p.k_dim + p.v_dim, half), "ring");
  arrays.output(p.out, product(steps, p.num_heads, p.v_dim, half), "out");
  arrays.output(p.error_flag, word, "error_flag");
}

void place(harness::Arrays &arrays, MoeParams &p) {
  const size_t half = 2, word = 4, states = product(p.tokens_total, p.hidden_size, half);
  const size_t chosen = product(p.tokens_total, p.top_k, word);
  arrays.input(p.hidden, states, "hidden");
  arrays.input(p.num_tokens, product(p.rows, word), "num_tokens");
  arrays.input(p.router_weight, product(p.num_experts, p.hidden_size, word), "router_weight");
  arrays.input(p.router_bias, product(p.num_experts, word), "router_bias");
  arrays.input(p.selection_bias, product(p.num_experts, word), "selection_bias");
  arrays.input(p.ids, chosen, "ids");
  arrays.input(p.weights, chosen, "weights");
  arrays.input(p.experts, product(p.num_experts, p.blob_bytes), "experts");
  arrays.output(p.out, states, "out");
  arrays.output(p.error_flag, word, "error_flag");
}

void place(harness::Arrays &arrays, LinearParams &p) {
  const size_t half = 2, groups = static_cast<size_t>((p.columns + p.group_size - 1) / p.group_size);
  arrays.input(p.x, product(p.rows, p.columns, half), "x");
  arrays.input(p.codes, product(p.outputs, p.code_bytes), "codes");
  arrays.input(p.scales, product(p.outputs, groups, half), "scales");
  arrays.output(p.out, product(p.rows, p.outputs, half), "out");
}

void place(harness::Arrays &arrays, AddRmsNormParams &p) {
  const size_t half = 2, states = product(p.rows, p.columns, half);
  arrays.input(p.x, states, "x");
  arrays.input(p.residual, states, "residual");
  arrays.input(p.scale, product(p.columns, half), "scale");
  arrays.output(p.out, states, "out");
  arrays.output(p.sum, states, "sum");
}

// Copies the arrays, calls `launch(params, workspace, stream)`, copies back.
template <class Params, class F>
int call(const Params &host, size_t workspace_bytes, char *message, int size, F launch) {
  harness::Arrays arrays(16);
  Params params = host;
  try {
    place(arrays, params);
  } catch (const std::exception &error) {
    snprintf(message, static_cast<size_t>(size), "%s", error.what());
    return 1;
  }
  return harness::run(
      arrays, workspace_bytes, replays, message, size,
      [&](void *workspace, cudaStream_t stream) { return launch(params, workspace, stream); });
}

__global__ void e4m3_codes_kernel(const float *in, uint8_t *up, uint8_t *rne, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) {
    up[i] = e4m3_up(in[i]);
    rne[i] = e4m3_rne(in[i]);
  }
}
__global__ void e4m3_values_kernel(float *out) {
  out[threadIdx.x] = e4m3_decode(static_cast<uint8_t>(threadIdx.x));
}
__global__ void activation_kernel(MoeParams p, float gate, float up, float *out) {
  *out = p.gated ? combine(p, gate, up) : activate(p, gate);
}

// For the small kernels above, whose callers take no message: 0, or 1 with the reason on stderr.
template <class P, class F> int call_small(P place_arrays, F launch) {
  char message[600] = "";
  int status = 1;
  try {
    harness::Arrays arrays(3);
    place_arrays(arrays);
    status = harness::run(arrays, 0, 0, message, sizeof message, [&](void *, cudaStream_t stream) {
      launch(stream);
      return static_cast<int>(cudaGetLastError());
    });
  } catch (const std::exception &error) {
    snprintf(message, sizeof message, "%s", error.what());
  }
  if (status)
    fprintf(stderr, "harness: status %d %s\n", status, message);
  return status ? 1 : 0;
}

} // namespace

EXPORT void set_replays(int count) {
  replays = count;
}

EXPORT int run_attention(const AttentionParams *p, int, uint64_t, char *message, int size) {
  return call(*p, workspace_bytes(*p), message, size,
              [](const AttentionParams &on_device, void *workspace, cudaStream_t stream) {
                return asym_kv_attention(on_device, workspace, stream);
              });
}

EXPORT int run_moe(const MoeParams *p, int with_router, int, uint64_t, char *message, int size) {
  return call(*p, workspace_bytes(*p, with_router != 0), message, size,
              [with_router](const MoeParams &on_device, void *workspace, cudaStream_t stream) {
                return with_router ? pipelined_moe(on_device, workspace, stream)
                                   : experts(on_device, workspace, stream);
              });
}

EXPORT int run_linear(const LinearParams *p, int, uint64_t, char *message, int size) {
  return call(*p, 0, message, size, [](const LinearParams &on_device, void *, cudaStream_t stream) {
    return quantized_linear(on_device, stream);
  });
}

EXPORT int run_norm(const AddRmsNormParams *p, int, uint64_t, char *message, int size) {
  return call(*p, 0, message, size, [](const AddRmsNormParams &on_device, void *, cudaStream_t stream) {
    return add_rms_norm(on_device, stream);
  });
}

EXPORT size_t params_bytes(int which) {
  const size_t bytes[] = {sizeof(AttentionParams), sizeof(MoeParams), sizeof(LinearParams),
                          sizeof(AddRmsNormParams)};
  return bytes[which];
}

// The library's own error word, which is cleared; -1 if it cannot be read.
EXPORT int32_t read_error_flag() {
  int32_t value = -1;
  const int32_t zero = 0;
  int32_t *flag = default_error_flag();
  if (!flag || cudaMemcpy(&value, flag, sizeof value, cudaMemcpyDeviceToHost) != cudaSuccess ||
      cudaMemcpy(flag, &zero, sizeof zero, cudaMemcpyHostToDevice) != cudaSuccess)
    return -1;
  return value;
}

EXPORT int e4m3_codes(const float *in, uint8_t *up, uint8_t *rne, int n) {
  const size_t count = static_cast<size_t>(n);
  return call_small(
      [&](harness::Arrays &arrays) {
        arrays.input(in, count * sizeof(float), "in");
        arrays.output(up, count, "up");
        arrays.output(rne, count, "rne");
      },
      [&](cudaStream_t stream) {
        e4m3_codes_kernel<<<static_cast<unsigned>(n + 255) / 256, 256, 0, stream>>>(in, up, rne, n);
      });
}

EXPORT int e4m3_values(float *out) {
  return call_small([&](harness::Arrays &arrays) { arrays.output(out, 256 * sizeof(float), "out"); },
                    [&](cudaStream_t stream) { e4m3_values_kernel<<<1, 256, 0, stream>>>(out); });
}

// NaN if it cannot run.
EXPORT float run_activation(const MoeParams *p, float gate, float up) {
  float value = 0.0f, *out = &value;
  const int status =
      call_small([&](harness::Arrays &arrays) { arrays.output(out, sizeof value, "out"); },
                 [&](cudaStream_t stream) { activation_kernel<<<1, 1, 0, stream>>>(*p, gate, up, out); });
  return status ? __builtin_nanf("") : value;
}
