// Where every byte of a layer's KV cache is (the C++ side of moec/reference/kv_layout.py).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace moec {

struct KvLayout {
  static constexpr int kBlockTokens = 64;
  bool quantized = false; // has blocks; otherwise the ring holds everything
  bool ring_fp32 = false;
  bool int8 = false; // blocks of int8 codes: k_lo and v_codes are [64][dim] bytes, k_hi and zeros are empty
  int k_dim = 0, v_dim = 0, promoted = 0, window = 0;
  int sinks = 0;  // ring rows that are never reused (0 when not quantized)
  int recent = 0; // newest tokens that are never quantized
  int period = 0; // ring rows that are reused in turn
  int num_blocks = 0;
  int v_group = 1, num_v_groups = 1;
  size_t k_lo = 0, k_hi = 0, k_scale = 0, k_zero = 0, v_codes = 0, v_scale = 0, v_zero = 0; // block offsets
  size_t block_bytes = 0;

  int row_dim() const { return k_dim + v_dim; }
  size_t row_bytes() const { return static_cast<size_t>(row_dim()) * (ring_fp32 ? 4 : 2); }
  int ring_rows() const { return sinks + period; }
  int64_t row(int64_t token) const { return token < sinks ? token : sinks + (token - sinks) % period; }
  // Blocks that are quantized when `length` tokens are cached.
  int64_t blocks_at(int64_t length) const {
    const int64_t rest = length - sinks - recent;
    return quantized && rest > 0 ? rest / kBlockTokens : 0;
  }
  // Fills the dimensions of V's groups and, for quantized layers, the offsets within a block.
  void place_sections();
};

inline size_t align_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline void KvLayout::place_sections() {
  v_group = v_dim & -v_dim;
  v_group = v_group < kBlockTokens ? v_group : kBlockTokens;
  num_v_groups = v_dim / v_group;
  const size_t dk = static_cast<size_t>(k_dim), dv = static_cast<size_t>(v_dim),
               p = static_cast<size_t>(promoted);
  const size_t metadata = static_cast<size_t>(kBlockTokens) * static_cast<size_t>(num_v_groups);
  const size_t per_byte = int8 ? 1 : 4, zeros = int8 ? 0 : 1;
  const size_t sizes[7] = {kBlockTokens * dk / per_byte,
                           kBlockTokens * p / 4,
                           dk,
                           dk * zeros,
                           kBlockTokens * dv / per_byte,
                           metadata,
                           metadata * zeros};
  size_t *offsets[7] = {&k_lo, &k_hi, &k_scale, &k_zero, &v_codes, &v_scale, &v_zero};
  size_t end = 0;
  for (int i = 0; i < 7; ++i) {
    *offsets[i] = align_up(end, 16);
    end = *offsets[i] + sizes[i];
  }
  block_bytes = align_up(end, 128);
}

} // namespace moec
