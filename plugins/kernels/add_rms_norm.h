// Launcher of moec::AddRMSNorm: a residual sum and its RMS norm in one kernel. Rules as in launchers.h.
//
// TensorRT-RTX stores 140 KB of source for each such kernel that it generates itself, in every layer and
// profile: half of the plan of a 30B model. Each row's result depends on that row only.
#pragma once
#include "launchers.h"

namespace moec::kernels {

struct AddRmsNormParams {
  int64_t rows = 0;               // product of x's leading dimensions
  int32_t columns = 0;            // x's last dimension
  float epsilon = 0.0f;           // added to the mean square
  float scale_offset = 0.0f;      // added to scale: 1 where a model stores its norms' weights less one
  Dtype dtype = Dtype::kFloat16;  // of every tensor
  const void *x = nullptr;        // [rows, columns]
  const void *residual = nullptr; // [rows, columns]
  const void *scale = nullptr;    // [columns]
  void *out = nullptr;            // [rows, columns]: norm of sum, times scale
  void *sum = nullptr;            // [rows, columns]: x + residual
};

// Null, or what is unsupported or wrong (shapes and attributes only).
const char *check(const AddRmsNormParams &params);

// Enqueue; needs no workspace.
int add_rms_norm(const AddRmsNormParams &params, CUstream_st *stream);

} // namespace moec::kernels
