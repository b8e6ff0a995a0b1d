// Host functions that pass between the translation units of this library; not for users of launchers.h.
#pragma once
#include "kv_plan.h"
#include "launchers.h"

namespace moec::kernels {

// The packing kernels (kv_append.cu, compiled without contraction).
void launch_prepare_rows(const AttentionParams &p, const KvPlan &plan, void *rows, CUstream_st *stream);
void launch_flush_blocks(const AttentionParams &p, const KvPlan &plan, void *rows, CUstream_st *stream);
void launch_append_rows(const AttentionParams &p, const KvPlan &plan, void *rows, CUstream_st *stream);

} // namespace moec::kernels
