// All kernels and launchers in one library that runs them under the SIMT emulator, for ctypes.
#include "kernels/add_rms_norm.cu"
#include "kernels/checks.cpp"
#include "kernels/error_flag.cu"
#include "kernels/kv_append.cu"
#include "kernels/kv_attend.cu"
#include "kernels/kv_plan.cpp"
#include "kernels/moe.cu"
#include "kernels/moe_plan.cpp"
#include "kernels/quantized_linear.cu"

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace moec::kernels;

namespace {

// Scratch of exactly the promised size, poisoned, and watched at its end.
class Workspace {
public:
  explicit Workspace(size_t bytes) : bytes_(bytes), storage_(bytes + kGuard + 256, 0xFF) {}
  void *data() {
    const uintptr_t base = reinterpret_cast<uintptr_t>(storage_.data());
    return reinterpret_cast<void *>((base + 255) & ~uintptr_t{255});
  }
  void check() {
    const unsigned char *end = static_cast<unsigned char *>(data()) + bytes_;
    for (size_t i = 0; i < kGuard; i++)
      if (end[i] != 0xFF)
        throw std::runtime_error("write past the end of the workspace");
  }

private:
  static constexpr size_t kGuard = 4096;
  size_t bytes_;
  std::vector<unsigned char> storage_;
};

template <class F> int guarded(int schedule, uint64_t seed, size_t bytes, char *message, int size, F call) {
  simt::set_schedule(static_cast<simt::Schedule>(schedule), seed);
  Workspace workspace(bytes);
  try {
    const int rc = call(workspace.data());
    workspace.check();
    return rc ? 100 + rc : 0;
  } catch (const std::exception &error) {
    snprintf(message, static_cast<size_t>(size), "%s", error.what());
    return 1;
  }
}

} // namespace

EXPORT int run_attention(const AttentionParams *p, int schedule, uint64_t seed, char *message, int size) {
  return guarded(schedule, seed, workspace_bytes(*p), message, size,
                 [&](void *workspace) { return asym_kv_attention(*p, workspace, nullptr); });
}

EXPORT int run_moe(const MoeParams *p, int with_router, int schedule, uint64_t seed, char *message,
                   int size) {
  return guarded(schedule, seed, workspace_bytes(*p, with_router != 0), message, size, [&](void *workspace) {
    return with_router ? pipelined_moe(*p, workspace, nullptr) : experts(*p, workspace, nullptr);
  });
}

EXPORT int run_linear(const LinearParams *p, int schedule, uint64_t seed, char *message, int size) {
  return guarded(schedule, seed, 0, message, size, [&](void *) { return quantized_linear(*p, nullptr); });
}

EXPORT int run_norm(const AddRmsNormParams *p, int schedule, uint64_t seed, char *message, int size) {
  return guarded(schedule, seed, 0, message, size, [&](void *) { return add_rms_norm(*p, nullptr); });
}

EXPORT const char *check_norm(const AddRmsNormParams *p) {
  return check(*p);
}
EXPORT const char *check_linear(const LinearParams *p) {
  return check(*p);
}
EXPORT const char *check_attention(const AttentionParams *p) {
  return check(*p);
}
EXPORT const char *check_moe(const MoeParams *p, int with_router) {
  return check(*p, with_router != 0);
}
EXPORT size_t attention_workspace(const AttentionParams *p) {
  return workspace_bytes(*p);
}
EXPORT int parse_format(const char *text) {
  KvFormat format = KvFormat::kMkv2;
  return parse(text, &format) ? static_cast<int>(format) : -1;
}
EXPORT size_t params_bytes(int which) {
  const size_t bytes[] = {sizeof(AttentionParams), sizeof(MoeParams), sizeof(LinearParams),
                          sizeof(AddRmsNormParams)};
  return bytes[which];
}
EXPORT int32_t read_error_flag() {
  const int32_t value = *default_error_flag();
  *default_error_flag() = 0;
  return value;
}

EXPORT void e4m3_codes(const float *in, uint8_t *up, uint8_t *rne, int n) {
  for (int i = 0; i < n; i++) {
    up[i] = e4m3_up(in[i]);
    rne[i] = e4m3_rne(in[i]);
  }
}
EXPORT void e4m3_values(float *out) {
  for (int i = 0; i < 256; i++)
    out[i] = e4m3_decode(static_cast<uint8_t>(i));
}
EXPORT float run_activation(const MoeParams *p, float gate, float up) {
  return p->gated ? combine(*p, gate, up) : activate(*p, gate);
}
