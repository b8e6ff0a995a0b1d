// What follows from the shapes and attributes of a PipelinedMoE or Experts node: the parts of an expert's
// blob and of the scratch memory. Passed to kernels by value.
#pragma once
#include "common.h"
#include "launchers.h"

namespace moec::kernels {

constexpr int kWeightGroup = 64; // columns that share an int4 scale
constexpr int kBlobSectionAlign = 128;
constexpr int kBlobAlign = 4096;

// One weight matrix [rows][columns] in a blob.
struct MatrixPlan {
  int64_t values; // byte offset of int4 codes or bf16 values
  int64_t scales; // byte offset of the fp16 scales (int4)
  int rows, columns, groups;
};

struct MoePlan {
  MatrixPlan gate_up, down;
  int64_t gate_up_bias, down_bias, blob_bytes;
  int hidden_stride, inner_stride; // floats: rows of scratch, padded with zeros to whole groups
  size_t hidden_at, inner_at, ids_at, weights_at, bytes;
};

MoePlan make_plan(const MoeParams &p, bool with_router);

} // namespace moec::kernels
