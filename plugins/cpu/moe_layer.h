// The experts of one MoE layer on a batch of tokens that have been routed already.
#pragma once
#include "activation.h"
#include "expert_blob.h"
#include "op_base.h"
#include <cstdint>
#include <vector>

namespace moec {

class MoeLayer {
public:
  explicit MoeLayer(const Attributes &attributes);

  int top_k() const { return top_k_; }
  int num_experts() const { return num_experts_; }
  [[noreturn]] void fail(const std::string &what) const;

  // Which of the T flattened tokens are not padding, from num_tokens [b].
  std::vector<char> valid_tokens(int64_t tokens, const Tensor &num_tokens) const;

  // hidden [T,H], ids and weights [T,top_k] (read where valid), experts [num_experts,blob_bytes] -> out
  // [T,H]. A token's result depends on nothing but its own hidden state, ids and weights.
  void run(const Call &call, const Tensor &hidden, const std::vector<char> &valid, const int32_t *ids,
           const float *weights, const Tensor &experts, float *out) const;

private:
  std::string op_;
  int64_t layer_;
  int num_experts_, top_k_;
  Activation activation_;
  float alpha_, limit_;
  bool int8_;
  BlobLayout layout_;
};

} // namespace moec
