// Activations in the form that the matrix kernels of a weight format read.
#pragma once
#include "kernels.h"
#include "scratch.h"

namespace moec {

enum class Arithmetic { kInt4Int8, kInt4Fp32, kBf16 };

// One matrix of an expert.
struct Matrix {
  Arithmetic arithmetic;
  const uint8_t *data;   // codes, or bf16
  const uint8_t *scales; // fp16, int4 only
  int columns;
};

class Vectors {
public:
  static constexpr int kGroup = 64;

  Vectors(Arithmetic arithmetic, int count, int columns);
  // Sets columns [64*group, 64*group + count) of one vector; count is 64 but for the last group.
  void set_group(int vector, int group, const float *x, int count);
  void set(int vector, const float *x);
  // y[i][row - begin] of vectors which[0 .. count) and rows [begin, end) of w; y has `stride` floats per
  // vector.
  void multiply(const Matrix &w, int begin, int end, const int *which, int count, float *y,
                int64_t stride) const;

private:
  QuantizedVector quantized(int vector) const;
  Arithmetic arithmetic_;
  int columns_, groups_;
  size_t units_; // groups of all vectors
  bool coded_;
  mutable Scratch<int8_t> codes_;
  mutable Scratch<float> scales_;
  mutable Scratch<int32_t> offsets_;
  mutable Scratch<float> values_; // [count][groups*64]
};

} // namespace moec
