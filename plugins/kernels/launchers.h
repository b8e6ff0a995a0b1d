// Host launchers of the moec CUDA kernels: plain C++ on raw device pointers, no CUDA header needed.
//
// Every launcher only enqueues kernels on the stream: no allocation, no synchronization, no host value read
// from the device, so a call may be captured into a CUDA graph. check() needs shapes and attributes only
// (pointers may be null) and works on a machine without a GPU: call it when the engine is built.
#pragma once
#include <cstddef>
#include <cstdint>

struct CUstream_st; // cudaStream_t is CUstream_st*

namespace moec::kernels {

enum class Dtype : int32_t { kFloat16 = 0, kBFloat16 = 1 };
enum class KvFormat : int32_t { kMkv2 = 0, kMkv2Lean = 1, kK4v2 = 2, kFp16 = 3, kInt8 = 4 };
enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSoftmaxAfterTopk = 2 };
enum class GroupScore : int32_t { kMax = 0, kTop2 = 1 };
enum class Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3, kSwigluOai = 4 };
enum class WeightFormat : int32_t { kBf16 = 0, kInt4 = 1 };

// Names of the attribute values as the ops spell them; return false for a value that no kernel implements
// (for example the KV format "fp32", which exists on the CPU only).
bool parse(const char *text, KvFormat *out);
bool parse(const char *text, Scoring *out);
bool parse(const char *text, GroupScore *out);
bool parse(const char *text, Activation *out);
bool parse(const char *text, WeightFormat *out);

// Bits of the sticky error word. A kernel only ever sets bits; the runtime reads and clears them.
enum ErrorBits : int32_t { kErrorNaN = 1, kErrorCapacity = 2, kErrorExpertId = 4 };

// The device address of the library's own error word (int32), used where params.error_flag is null. Null if
// there is no device. Works during capture; read it with cudaMemcpy.
int32_t *default_error_flag();

// moec::AsymKVAttention. Types: q, k, v, out are `dtype`; ring is fp16; blocks is int8; the rest as the op
// has it.
struct AttentionParams {
  // shapes
  int32_t rows = 0;         // b
  int32_t tokens = 0;       // S
  int32_t slots = 0;        // B
  int32_t num_heads = 0;    // Hq
  int32_t num_kv_heads = 0; // Hkv
  int32_t k_dim = 0;        // Dk
  int32_t v_dim = 0;        // Dv
  int32_t ring_rows = 0;    // dim 2 of ring
  int32_t num_blocks = 0;   // dim 2 of blocks (1 for the dummy)
  int64_t block_bytes = 0;  // dim 3 of blocks (1 for the dummy)
  // attributes
  Dtype dtype = Dtype::kFloat16;
  KvFormat format = KvFormat::kMkv2;
  float scale = 1.0f;
  float softcap = 0.0f;
  int32_t window = 0;
  int32_t has_sink_logits = 0;
  int32_t block_tokens = 64;
  int32_t promoted = 0;
  int32_t sink_tokens = 16;
  int32_t recent_tokens = 64;
  int32_t rollback_tokens = 0;
  // device pointers
  const void *q = nullptr;
  const void *k = nullptr;
  const void *v = nullptr;
  const int32_t *slot_ids = nullptr;   // [b]
  const int32_t *lengths = nullptr;    // [B]
  const int32_t *num_tokens = nullptr; // [b]
  const float *k_mean = nullptr;       // [Hkv, Dk]
  const float *k_ref = nullptr;        // [Hkv, Dk]
  const int32_t *k_order = nullptr;    // [Hkv, Dk]
  const float *v_ref = nullptr;        // [Hkv, Dv/g]
  const float *sink_logits = nullptr;  // [Hq]
  void *blocks = nullptr;              // [B, Hkv, num_blocks, block_bytes], updated in place
  void *ring = nullptr;                // [B, Hkv, ring_rows, Dk + Dv], updated in place
  void *out = nullptr;                 // [b, S, Hq * Dv]
  int32_t *error_flag = nullptr;       // sticky ErrorBits; null: the library's own
};

// moec::PipelinedMoE and moec::Experts, RESIDENT mode (num_slots = 0: blob e of `experts` is expert e). The
// states `residency` and `staging` pass through untouched: they are aliased, so there is nothing to launch
// for them.
struct MoeParams {
  // shapes
  int32_t tokens_total = 0; // T = b * S
  int32_t rows = 0;         // b, the length of num_tokens
  int32_t hidden_size = 0;  // H
  int64_t blob_bytes = 0;   // dim 1 of experts
  // attributes
  Dtype dtype = Dtype::kFloat16; // hidden and out
  int32_t num_experts = 0;
  int32_t top_k = 0;
  Scoring scoring = Scoring::kSoftmax;
  int32_t renormalize = 0;
  int32_t num_groups = 0; // 0 or 1: no groups
  int32_t topk_groups = 0;
  GroupScore group_score = GroupScore::kMax;
  float routed_scale = 1.0f;
  Activation activation = Activation::kSilu;
  int32_t gated = 1;
  float alpha = 1.0f;
  float limit = 0.0f;
  WeightFormat weight_format = WeightFormat::kInt4;
  int32_t group_size = 64;
  int32_t intermediate_size = 0;
  int32_t has_bias = 0;
  int32_t num_slots = 0;
  // device pointers
  const void *hidden = nullptr;          // [T, H]
  const int32_t *num_tokens = nullptr;   // [b]
  const float *router_weight = nullptr;  // [E, H]   (pipelined_moe)
  const float *router_bias = nullptr;    // [E]      (pipelined_moe)
  const float *selection_bias = nullptr; // [E]      (pipelined_moe)
  const int32_t *ids = nullptr;          // [T, K]   (experts)
  const float *weights = nullptr;        // [T, K]   (experts)
  const void *experts = nullptr;         // [E, blob_bytes]
  void *out = nullptr;                   // [T, H]
  int32_t *error_flag = nullptr;         // sticky ErrorBits; null: the library's own
};

// Null if the kernels can run this configuration, else a static message that names what is unsupported or
// wrong.
const char *check(const AttentionParams &params);
const char *check(const MoeParams &params, bool with_router);

// Bytes of device scratch, 256-byte aligned, contents irrelevant before and after the call. Shapes and
// attributes only; never 0.
size_t workspace_bytes(const AttentionParams &params);
size_t workspace_bytes(const MoeParams &params, bool with_router);

// Enqueue. Returns a cudaError_t value: 0, or cudaErrorInvalidValue (1) where check() fails.
int asym_kv_attention(const AttentionParams &params, void *workspace, CUstream_st *stream);
int pipelined_moe(const MoeParams &params, void *workspace, CUstream_st *stream);
int experts(const MoeParams &params, void *workspace, CUstream_st *stream);

} // namespace moec::kernels
