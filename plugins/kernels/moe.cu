#include "moe_experts.cuh"
#include "moe_router.cuh"

namespace moec::kernels {
namespace {

void launch_widen(const MoeParams &p, const MoePlan &plan, float *hidden, CUstream_st *stream) {
  const dim3 grid = grid_of(p.tokens_total, 1, 1);
  if (p.dtype == Dtype::kFloat16)
    MOEC_LAUNCH((widen_hidden<__half>), grid, dim3(kThreads), 0, stream, p, plan, hidden);
  else
    MOEC_LAUNCH((widen_hidden<__nv_bfloat16>), grid, dim3(kThreads), 0, stream, p, plan, hidden);
}

void launch_router(const MoeParams &p, const MoePlan &plan, const float *hidden, int32_t *ids, float *weights,
                   CUstream_st *stream) {
  const size_t shared = sizeof(float) * static_cast<size_t>(2 * p.num_experts + larger(1, p.num_groups));
  MOEC_LAUNCH(route_tokens, grid_of(p.tokens_total, 1, 1), dim3(kThreads), shared, stream, p, plan, hidden,
              ids, weights);
}

template <WeightFormat FORMAT>
void launch_experts(const MoeParams &p, const MoePlan &plan, const float *hidden, float *inner,
                    CUstream_st *stream) {
  const dim3 up = grid_of(ceil_div(plan.inner_stride, kRowsPerCta), p.top_k, p.tokens_total);
  const dim3 down = grid_of(ceil_div(p.hidden_size, kRowsPerCta), p.tokens_total, 1), block(kThreads);
  MOEC_LAUNCH((expert_up<FORMAT>), up, block, 0, stream, p, plan, p.ids, hidden, inner);
  if (p.dtype == Dtype::kFloat16)
    MOEC_LAUNCH((expert_down<__half, FORMAT>), down, block, 0, stream, p, plan, p.ids, p.weights, inner);
  else
    MOEC_LAUNCH((expert_down<__nv_bfloat16, FORMAT>), down, block, 0, stream, p, plan, p.ids, p.weights,
                inner);
}

int launch_all(MoeParams p, bool with_router, void *workspace, CUstream_st *stream) {
  if (check(p, with_router) || !workspace)
    return kInvalidValue;
  if (!p.error_flag)
    p.error_flag = default_error_flag();
  const MoePlan plan = make_plan(p, with_router);
  unsigned char *base = static_cast<unsigned char *>(workspace);
  float *hidden = reinterpret_cast<float *>(base + plan.hidden_at);
  float *inner = reinterpret_cast<float *>(base + plan.inner_at);
  launch_widen(p, plan, hidden, stream);
  if (with_router) {
    int32_t *ids = reinterpret_cast<int32_t *>(base + plan.ids_at);
    float *weights = reinterpret_cast<float *>(base + plan.weights_at);
    launch_router(p, plan, hidden, ids, weights, stream);
    p.ids = ids;
    p.weights = weights;
  }
  if (p.weight_format == WeightFormat::kInt4)
    launch_experts<WeightFormat::kInt4>(p, plan, hidden, inner, stream);
  else
    launch_experts<WeightFormat::kBf16>(p, plan, hidden, inner, stream);
  return launch_status();
}

} // namespace

int pipelined_moe(const MoeParams &params, void *workspace, CUstream_st *stream) {
  return launch_all(params, true, workspace, stream);
}

int experts(const MoeParams &params, void *workspace, CUstream_st *stream) {
  return launch_all(params, false, workspace, stream);
}

} // namespace moec::kernels
