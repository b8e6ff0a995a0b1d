#include "add_rms_norm.h"

#include "device.h"

namespace moec::kernels {
namespace {

// `v` as it is once stored: separate operators would square the sum that they had rounded.
template <class T> MOEC_DEVICE float rounded(float v) {
  T stored;
  store(&stored, v);
  return load(&stored);
}

// The sum over the whole CTA, on every thread; `parts` has room for one value a warp.
MOEC_DEVICE float cta_sum(float v, float *parts) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0)
    parts[threadIdx.x / 32] = v;
  if (!MOEC_BUG(9))
    __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < kWarps; i++)
    sum += parts[i];
  return sum;
}

// Grid (rows): a CTA makes one row.
template <class T> __global__ void MOEC_KERNEL add_rms_norm_row(AddRmsNormParams p) {
  const size_t first = static_cast<size_t>(blockIdx.x) * p.columns;
  const T *__restrict__ x = static_cast<const T *>(p.x) + first;
  const T *__restrict__ residual = static_cast<const T *>(p.residual) + first;
  const T *__restrict__ scale = static_cast<const T *>(p.scale);
  T *__restrict__ sum = static_cast<T *>(p.sum) + first;
  T *__restrict__ out = static_cast<T *>(p.out) + first;
  MOEC_DYN_SMEM(float, parts);
  float squares = 0.0f;
  for (int c = threadIdx.x; c < p.columns; c += kThreads) {
    const float v = rounded<T>(load(x + c) + load(residual + c));
    store(sum + c, v);
    squares += v * v;
  }
  const float mean = cta_sum(squares, parts) / static_cast<float>(p.columns);
  const float factor = 1.0f / sqrtf(mean + p.epsilon);
  for (int c = threadIdx.x; c < p.columns; c += kThreads)
    store(out + c, load(sum + c) * factor * (load(scale + c) + p.scale_offset));
}

template <class T> void launch_rows(const AddRmsNormParams &p, CUstream_st *stream) {
  MOEC_LAUNCH(add_rms_norm_row<T>, grid_of(static_cast<int>(p.rows), 1, 1), dim3(kThreads),
              kWarps * sizeof(float), stream, p);
}

} // namespace

const char *check(const AddRmsNormParams &p) {
  if (p.rows < 1 || p.columns < 1)
    return "AddRMSNorm: a dimension is not positive";
  if (p.rows > INT32_MAX)
    return "AddRMSNorm: too many rows for one launch";
  if (!(p.epsilon >= 0.0f))
    return "AddRMSNorm: epsilon must not be negative";
  if (p.dtype != Dtype::kFloat16 && p.dtype != Dtype::kBFloat16)
    return "AddRMSNorm: activations must be fp16 or bf16 on the GPU";
  return nullptr;
}

int add_rms_norm(const AddRmsNormParams &p, CUstream_st *stream) {
  if (check(p))
    return kInvalidValue;
  if (p.dtype == Dtype::kFloat16)
    launch_rows<__half>(p, stream);
  else
    launch_rows<__nv_bfloat16>(p, stream);
  return launch_status();
}

} // namespace moec::kernels
