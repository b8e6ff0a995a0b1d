#include "router.h"
#include <algorithm>
#include <cmath>
#include <functional>

namespace moec {
namespace {

constexpr float kNever = -3.4028235e38f;

// In place, sums in double as the reference does.
void softmax(float *x, int count) {
  const float top = *std::max_element(x, x + count);
  double sum = 0;
  thread_local std::vector<double> e;
  e.resize(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i)
    sum += e[i] = std::exp(static_cast<double>(x[i]) - static_cast<double>(top));
  for (int i = 0; i < count; ++i)
    x[i] = static_cast<float>(e[i] / sum);
}

// Index of the largest; the lower index wins a tie. It is then taken out.
int take_best(float *x, int count) {
  const int best = static_cast<int>(std::max_element(x, x + count) - x);
  x[best] = -INFINITY;
  return best;
}

} // namespace

Router::Router(const Attributes &a)
    : num_experts(static_cast<int>(a.integer("num_experts"))), top_k(static_cast<int>(a.integer("top_k"))),
      num_groups(static_cast<int>(a.integer("num_groups"))),
      topk_groups(static_cast<int>(a.integer("topk_groups"))), renormalize(a.integer("renormalize") != 0),
      group_by_top2(a.text("group_score") == "top2"), routed_scale(a.real("routed_scale")) {
  const std::string name = a.text("scoring");
  if (name != "softmax" && name != "sigmoid" && name != "softmax_after_topk")
    throw Error("PipelinedMoE: unknown scoring '" + name + "'");
  scoring = name == "softmax"   ? Scoring::kSoftmax
            : name == "sigmoid" ? Scoring::kSigmoid
                                : Scoring::kSoftmaxAfterTopk;
  if (num_groups > 1 && (num_experts % num_groups != 0 || topk_groups < 1 || topk_groups > num_groups))
    throw Error("PipelinedMoE: groups do not divide the experts");
}

void Router::mask_groups(float *choice) const {
  const int size = num_experts / num_groups;
  std::vector<float> score(static_cast<size_t>(num_groups));
  for (int g = 0; g < num_groups; ++g) {
    std::vector<float> members(choice + g * size, choice + (g + 1) * size);
    std::sort(members.begin(), members.end(), std::greater<float>());
    score[g] = group_by_top2 && size > 1 ? members[0] + members[1] : members[0];
  }
  std::vector<char> chosen(static_cast<size_t>(num_groups));
  for (int i = 0; i < topk_groups; ++i)
    chosen[take_best(score.data(), num_groups)] = 1;
  for (int e = 0; e < num_experts; ++e)
    if (!chosen[e / size])
      choice[e] = kNever;
}

void Router::route(float *scores, const float *selection_bias, int32_t *ids, float *weights) const {
  if (scoring == Scoring::kSoftmax)
    softmax(scores, num_experts);
  else if (scoring == Scoring::kSigmoid)
    for (int e = 0; e < num_experts; ++e)
      scores[e] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(scores[e]))));
  thread_local std::vector<float> choice;
  choice.resize(static_cast<size_t>(num_experts));
  for (int e = 0; e < num_experts; ++e)
    choice[e] = scores[e] + selection_bias[e];
  if (num_groups > 1)
    mask_groups(choice.data());
  double sum = 1e-20;
  for (int k = 0; k < top_k; ++k) {
    ids[k] = take_best(choice.data(), num_experts);
    weights[k] = scores[ids[k]];
    sum += weights[k];
  }
  if (scoring == Scoring::kSoftmaxAfterTopk)
    softmax(weights, top_k);
  for (int k = 0; k < top_k; ++k) {
    const bool divide = renormalize && scoring != Scoring::kSoftmaxAfterTopk;
    const double weight = divide ? weights[k] / sum : weights[k];
    weights[k] = static_cast<float>(weight * static_cast<double>(routed_scale));
  }
}

} // namespace moec
