#include "internal.h"
#include "kv_attend.cuh"

namespace moec::kernels {
namespace {

struct Scratch {
  __half *rows;
  float *queries, *sinks, *partial, *summary;

  Scratch(const KvPlan &plan, void *workspace) {
    unsigned char *base = static_cast<unsigned char *>(workspace);
    rows = reinterpret_cast<__half *>(base + plan.rows_at);
    queries = reinterpret_cast<float *>(base + plan.query_at);
    sinks = reinterpret_cast<float *>(base + plan.sink_at);
    partial = reinterpret_cast<float *>(base + plan.partial_at);
    summary = reinterpret_cast<float *>(base + plan.summary_at);
  }
};

template <class T>
void launch_queries(const AttentionParams &p, const KvPlan &plan, const Scratch &w, CUstream_st *stream) {
  const dim3 grid = grid_of(p.tokens, p.num_heads, p.rows);
  MOEC_LAUNCH((prepare_queries<T>), grid, dim3(kThreads), sizeof(float) * kWarps, stream, p, plan, w.queries,
              w.sinks);
}

template <class Codes, int HEADS>
void launch_attend(const AttentionParams &p, const KvPlan &plan, int first, int pass, const Scratch &w,
                   CUstream_st *stream) {
  const dim3 grid = grid_of(plan.num_splits, p.num_kv_heads * plan.head_chunks, p.rows * pass);
  const size_t shared = sizeof(float) * static_cast<size_t>(AttendShared<HEADS>::floats(p.k_dim));
  MOEC_LAUNCH((attend_tiles<Codes, HEADS>), grid, dim3(kThreads), shared, stream, p, plan, first, pass,
              w.rows, w.queries, w.partial, w.summary);
}

template <class Codes>
void launch_attend(const AttentionParams &p, const KvPlan &plan, int first, int pass, const Scratch &w,
                   CUstream_st *stream) {
  if (plan.heads_per_cta == 1)
    launch_attend<Codes, 1>(p, plan, first, pass, w, stream);
  else if (plan.heads_per_cta == 4)
    launch_attend<Codes, 4>(p, plan, first, pass, w, stream);
  else
    launch_attend<Codes, 8>(p, plan, first, pass, w, stream);
}

template <class T>
void launch_join(const AttentionParams &p, const KvPlan &plan, int first, int pass, const Scratch &w,
                 CUstream_st *stream) {
  const dim3 grid = grid_of(p.num_heads, pass, p.rows);
  const size_t shared = sizeof(float) * static_cast<size_t>(p.v_dim);
  MOEC_LAUNCH((join_splits<T>), grid, dim3(kThreads), shared, stream, p, plan, first, pass, w.partial,
              w.summary, w.sinks);
}

template <class T>
void launch_all(const AttentionParams &p, const KvPlan &plan, void *workspace, CUstream_st *stream) {
  const Scratch w(plan, workspace);
  launch_prepare_rows(p, plan, w.rows, stream);
  launch_queries<T>(p, plan, w, stream);
  if (plan.quantized)
    launch_flush_blocks(p, plan, w.rows, stream);
  for (int first = 0; first < p.tokens; first += plan.tokens_per_pass) {
    const int pass = smaller(plan.tokens_per_pass, p.tokens - first);
    if (plan.int8)
      launch_attend<CodesOf8Bits>(p, plan, first, pass, w, stream);
    else
      launch_attend<CodesOf2Bits>(p, plan, first, pass, w, stream);
    launch_join<T>(p, plan, first, pass, w, stream);
  }
  launch_append_rows(p, plan, w.rows, stream); // last: until here the ring holds the state before the call
}

} // namespace

int asym_kv_attention(const AttentionParams &params, void *workspace, CUstream_st *stream) {
  if (check(params) || !workspace)
    return kInvalidValue;
  AttentionParams p = params;
  if (!p.error_flag)
    p.error_flag = default_error_flag();
  const KvPlan plan = make_plan(p);
  if (p.dtype == Dtype::kFloat16)
    launch_all<__half>(p, plan, workspace, stream);
  else
    launch_all<__nv_bfloat16>(p, plan, workspace, stream);
  return launch_status();
}

} // namespace moec::kernels
