#include "internal.h"
#include "kv_append.cuh"
#include "kv_int8_flush.cuh"

namespace moec::kernels {

void launch_prepare_rows(const AttentionParams &p, const KvPlan &plan, void *rows, CUstream_st *stream) {
  const dim3 grid = grid_of(p.tokens, p.num_kv_heads, p.rows);
  const size_t shared = sizeof(float) * static_cast<size_t>(p.v_dim);
  __half *to = static_cast<__half *>(rows);
  if (p.dtype == Dtype::kFloat16)
    MOEC_LAUNCH((prepare_rows<__half>), grid, dim3(kThreads), shared, stream, p, plan, to);
  else
    MOEC_LAUNCH((prepare_rows<__nv_bfloat16>), grid, dim3(kThreads), shared, stream, p, plan, to);
}

void launch_flush_blocks(const AttentionParams &p, const KvPlan &plan, void *rows, CUstream_st *stream) {
  const dim3 grid = grid_of(ceil_div(p.tokens, kBlockTokens), p.num_kv_heads, p.rows);
  const size_t shared = sizeof(float) * static_cast<size_t>(flush_shared_floats(p, plan));
  __half *from = static_cast<__half *>(rows);
  if (plan.int8)
    MOEC_LAUNCH(flush_int8_blocks, grid, dim3(kThreads), shared, stream, p, plan, from);
  else
    MOEC_LAUNCH(flush_blocks, grid, dim3(kThreads), shared, stream, p, plan, from);
}

void launch_append_rows(const AttentionParams &p, const KvPlan &plan, void *rows, CUstream_st *stream) {
  const dim3 grid = grid_of(p.tokens, p.num_kv_heads, p.rows);
  MOEC_LAUNCH(append_rows, grid, dim3(kThreads), 0, stream, p, plan, static_cast<__half *>(rows));
}

} // namespace moec::kernels
