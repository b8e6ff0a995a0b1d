// Launcher of moec::QuantizedLinear: x times the transpose of a quantized matrix. Rules as in launchers.h.
//
// A weight that is an engine input is otherwise dequantized by TensorRT into a buffer in every step. Each
// output is one sum in an order that depends on the matrix only, so a row's result does not depend on its
// neighbours.
#pragma once
#include "launchers.h"

namespace moec::kernels {

struct LinearParams {
  int64_t rows = 0;              // M, product of x's leading dimensions
  int32_t columns = 0;           // K, x's last dimension
  int32_t outputs = 0;           // N
  int64_t code_bytes = 0;        // bytes of a row of codes: 32 (int4) or 64 (int8) a group
  int32_t bits = 4;              // 4 (zero point 8, low nibble = even column) or 8 (zero point 128)
  int32_t group_size = 64;       // columns that share a scale
  Dtype dtype = Dtype::kFloat16; // x and out
  const void *x = nullptr;       // [M, K]
  const void *codes = nullptr;   // [N, code_bytes]
  const void *scales = nullptr;  // fp16 [N, ceil(K / 64)]
  void *out = nullptr;           // [M, N]
};

// Null, or what is unsupported or wrong (shapes and attributes only).
const char *check(const LinearParams &params);

// Enqueue; needs no workspace.
int quantized_linear(const LinearParams &params, CUstream_st *stream);

} // namespace moec::kernels
