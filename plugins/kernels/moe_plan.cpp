#include "moe_plan.h"

namespace moec::kernels {
namespace {

int64_t section(int64_t *end, int64_t bytes) {
  const int64_t at = (*end + kBlobSectionAlign - 1) / kBlobSectionAlign * kBlobSectionAlign;
  *end = at + bytes;
  return at;
}

MatrixPlan place_matrix(const MoeParams &p, int rows, int columns, int64_t *end) {
  MatrixPlan m{0, 0, rows, columns, ceil_div(columns, kWeightGroup)};
  const int64_t groups = static_cast<int64_t>(rows) * m.groups;
  if (p.weight_format == WeightFormat::kBf16) {
    m.values = section(end, static_cast<int64_t>(rows) * columns * 2);
    return m;
  }
  m.values = section(end, groups * kWeightGroup / 2);
  m.scales = section(end, groups * 2);
  return m;
}

void place_blob(const MoeParams &p, MoePlan *plan) {
  const int gate_up_rows = (p.gated ? 2 : 1) * p.intermediate_size;
  int64_t end = 0;
  plan->gate_up = place_matrix(p, gate_up_rows, p.hidden_size, &end);
  plan->down = place_matrix(p, p.hidden_size, p.intermediate_size, &end);
  if (p.has_bias) {
    plan->gate_up_bias = section(&end, static_cast<int64_t>(gate_up_rows) * 4);
    plan->down_bias = section(&end, static_cast<int64_t>(p.hidden_size) * 4);
  }
  plan->blob_bytes = (end + kBlobAlign - 1) / kBlobAlign * kBlobAlign;
}

} // namespace

MoePlan make_plan(const MoeParams &p, bool with_router) {
  MoePlan plan{};
  place_blob(p, &plan);
  plan.hidden_stride = plan.gate_up.groups * kWeightGroup;
  plan.inner_stride = plan.down.groups * kWeightGroup;
  size_t offset = 0;
  auto place = [&](size_t count) {
    const size_t at = offset;
    offset = align_up(offset + count * sizeof(float), 256);
    return at;
  };
  const size_t tokens = static_cast<size_t>(p.tokens_total), chosen = tokens * static_cast<size_t>(p.top_k);
  plan.hidden_at = place(tokens * static_cast<size_t>(plan.hidden_stride));
  plan.inner_at = place(chosen * static_cast<size_t>(plan.inner_stride));
  plan.ids_at = with_router ? place(chosen) : 0;
  plan.weights_at = with_router ? place(chosen) : 0;
  plan.bytes = offset;
  return plan;
}

} // namespace moec::kernels
