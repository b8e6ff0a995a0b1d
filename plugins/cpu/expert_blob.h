// Where everything is in an expert's blob (the C++ side of moec/reference/experts.py: BlobLayout).
#pragma once
#include "kernels.h"
#include "kv_layout.h"

namespace moec {

struct BlobLayout {
  bool bf16 = false, gated = true, has_bias = false;
  int hidden = 0, intermediate = 0;
  size_t gate_up = 0, gate_up_scales = 0, down = 0, down_scales = 0, gate_up_bias = 0, down_bias = 0;
  size_t blob_bytes = 0;

  int gate_up_rows() const { return (gated ? 2 : 1) * intermediate; }
  void place_sections();
};

inline void BlobLayout::place_sections() {
  size_t end = 0;
  auto place = [&end](size_t &offset, size_t rows, size_t row_bytes) {
    offset = align_up(end, 128);
    end = offset + rows * row_bytes;
  };
  auto matrix = [&](size_t &codes, size_t &scales, int rows, int columns) {
    const size_t n = static_cast<size_t>(rows), groups = (static_cast<size_t>(columns) + 63) / 64;
    if (bf16)
      return place(codes, n, static_cast<size_t>(columns) * 2);
    place(codes, n, groups * 32);
    place(scales, n, groups * 2);
  };
  matrix(gate_up, gate_up_scales, gate_up_rows(), hidden);
  matrix(down, down_scales, hidden, intermediate);
  if (has_bias) {
    place(gate_up_bias, static_cast<size_t>(gate_up_rows()), 4);
    place(down_bias, static_cast<size_t>(hidden), 4);
  }
  blob_bytes = align_up(end, 4096);
}

} // namespace moec
