#include "quantized_linear.h"

#include "device.h"

namespace moec::kernels {
namespace {

constexpr int kLinearGroup = 64; // columns a scale
constexpr int kLaneColumns = 8;  // columns a lane decodes at once
constexpr int kTileRows = 8;     // rows of x that share a decoded weight
constexpr int kLinearMaxGrid = 65535;

// Weights of columns 8*lane%8.. of group g of a row of codes, without their scale.
template <int BITS> MOEC_DEVICE void decode(const uint8_t *codes, int g, float *w) {
  const int lane = threadIdx.x % 8;
  if (BITS == 4) {
    const uint32_t word = reinterpret_cast<const uint32_t *>(codes)[g * 8 + lane];
#pragma unroll
    for (int i = 0; i < kLaneColumns; i++)
      w[i] = static_cast<float>(static_cast<int>(word >> 4 * i & 15u) - 8);
    return;
  }
  const uint32_t *words = reinterpret_cast<const uint32_t *>(codes) + g * 16 + lane * 2;
#pragma unroll
  for (int i = 0; i < kLaneColumns; i++)
    w[i] = static_cast<float>(static_cast<int>(words[i / 4] >> 8 * (i % 4) & 255u) - 128);
}

template <class T> MOEC_DEVICE float dot8(const float *w, const T *x, int columns) {
  float part = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneColumns; i++)
    part += w[i] * (i < columns ? load(x + i) : 0.0f);
  return part;
}

// Grid (N / 4, M / 8): a warp makes one column of out for 8 rows of x.
template <class T, int BITS> __global__ void MOEC_KERNEL linear_tile(LinearParams p) {
  const int lane = threadIdx.x % 32, n = static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (n >= p.outputs)
    return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTileRows;
  const int groups = ceil_div(p.columns, kLinearGroup);
  const uint8_t *codes = static_cast<const uint8_t *>(p.codes) + static_cast<size_t>(n) * p.code_bytes;
  const __half *scales = static_cast<const __half *>(p.scales) + static_cast<size_t>(n) * groups;
  float sums[kTileRows] = {};
  for (int g = lane / 8; g < groups; g += 4) {
    float w[kLaneColumns];
    decode<BITS>(codes, g, w);
    const float scale = load(scales + g);
    const int column = g * kLinearGroup + lane % 8 * kLaneColumns;
#pragma unroll
    for (int j = 0; j < kTileRows; j++) {
      if (first + j >= p.rows || column >= p.columns)
        continue;
      const T *x = static_cast<const T *>(p.x) + (first + j) * p.columns + column;
      sums[j] += dot8(w, x, p.columns - column) * scale;
    }
  }
#pragma unroll
  for (int j = 0; j < kTileRows; j++) {
    const float sum = warp_sum(sums[j]);
    if (lane == 0 && first + j < p.rows)
      store(static_cast<T *>(p.out) + (first + j) * p.outputs + n, sum);
  }
}

template <class T> void launch_linear(const LinearParams &p, CUstream_st *stream) {
  const dim3 grid =
      grid_of(ceil_div(p.outputs, kWarps), static_cast<int>((p.rows + kTileRows - 1) / kTileRows), 1);
  if (p.bits == 4)
    MOEC_LAUNCH((linear_tile<T, 4>), grid, dim3(kThreads), 0, stream, p);
  else
    MOEC_LAUNCH((linear_tile<T, 8>), grid, dim3(kThreads), 0, stream, p);
}

} // namespace

const char *check(const LinearParams &p) {
  if (p.rows < 1 || p.columns < 1 || p.outputs < 1)
    return "QuantizedLinear: a dimension is not positive";
  if (p.rows > static_cast<int64_t>(kLinearMaxGrid) * kTileRows)
    return "QuantizedLinear: too many rows for one launch";
  if (p.bits != 4 && p.bits != 8)
    return "QuantizedLinear: bits must be 4 or 8";
  if (p.group_size != kLinearGroup)
    return "QuantizedLinear: group_size must be 64";
  if (p.code_bytes != static_cast<int64_t>(ceil_div(p.columns, kLinearGroup)) * kLinearGroup * p.bits / 8)
    return "QuantizedLinear: the rows of codes do not fit the columns of x";
  return nullptr;
}

int quantized_linear(const LinearParams &p, CUstream_st *stream) {
  if (check(p))
    return kInvalidValue;
  if (p.dtype == Dtype::kFloat16)
    launch_linear<__half>(p, stream);
  else
    launch_linear<__nv_bfloat16>(p, stream);
  return launch_status();
}

} // namespace moec::kernels
