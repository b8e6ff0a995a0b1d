#include "op_base.h"
#include <exception>
#include <mutex>

namespace moec {

void check(const ort::Api &api, ort::Status *status, const std::string &message) {
  if (!status)
    return;
  std::string detail =
      api.call<const char *>(ort::kGetErrorMessage, static_cast<const ort::Status *>(status));
  api.call<void>(ort::kReleaseStatus, status);
  throw Error(message + ": " + detail);
}

void Attributes::missing(const char *name) const {
  throw Error(std::string(op_) + ": attribute '" + name + "' is missing or has the wrong type");
}

int64_t Attributes::integer(const char *name) const {
  int64_t value = 0;
  if (auto *s = api_.call<ort::Status *>(ort::kKernelInfoAttributeInt64, info_, name, &value)) {
    api_.call<void>(ort::kReleaseStatus, s);
    missing(name);
  }
  return value;
}

float Attributes::real(const char *name) const {
  float value = 0;
  if (auto *s = api_.call<ort::Status *>(ort::kKernelInfoAttributeFloat, info_, name, &value)) {
    api_.call<void>(ort::kReleaseStatus, s);
    missing(name);
  }
  return value;
}

std::string Attributes::text(const char *name) const {
  char buffer[64];
  size_t size = sizeof buffer;
  if (auto *s = api_.call<ort::Status *>(ort::kKernelInfoAttributeString, info_, name, buffer + 0, &size)) {
    api_.call<void>(ort::kReleaseStatus, s);
    missing(name);
  }
  return buffer;
}

int64_t Tensor::count() const {
  return shape[0] * shape[1] * shape[2] * shape[3];
}

size_t Tensor::bytes() const {
  const size_t each = type == ort::kInt8 || type == ort::kUint8 ? 1 : type == ort::kFloat16 ? 2 : 4;
  return static_cast<size_t>(count()) * each;
}

const ort::Value *Call::value(size_t index) const {
  const ort::KernelContext *context = context_;
  const ort::Value *v = nullptr;
  check(api_, api_.call<ort::Status *>(ort::kKernelContextInput, context, index, &v), "input");
  return v;
}

const void *Call::raw(size_t index) const {
  void *data = nullptr;
  auto *v = const_cast<ort::Value *>(value(index));
  check(api_, api_.call<ort::Status *>(ort::kGetTensorMutableData, v, &data), "tensor data");
  return data;
}

size_t Call::input_count() const {
  size_t count = 0;
  const ort::KernelContext *context = context_;
  check(api_, api_.call<ort::Status *>(ort::kKernelContextInputCount, context, &count), "input count");
  return count;
}

Tensor Call::input(size_t index) const {
  using namespace ort;
  TensorInfo *info = nullptr;
  check(api_, api_.call<Status *>(kGetTensorTypeAndShape, value(index), &info), "tensor type");
  const TensorInfo *view = info;
  Tensor t;
  api_.call<Status *>(kGetDimensionsCount, view, &t.rank);
  if (t.rank <= Tensor::kMaxRank)
    api_.call<Status *>(kGetDimensions, view, static_cast<int64_t *>(t.shape), t.rank);
  api_.call<Status *>(kGetTensorElementType, view, &t.type);
  api_.call<void>(kReleaseTensorInfo, info);
  if (t.rank > Tensor::kMaxRank)
    throw Error("input " + std::to_string(index) + " has too many dimensions");
  t.data = const_cast<void *>(raw(index));
  return t;
}

void *Call::output(size_t index, const int64_t *shape, size_t rank) const {
  using namespace ort;
  Value *v = nullptr;
  check(api_, api_.call<Status *>(kKernelContextOutput, context_, index, shape, rank, &v), "output");
  void *data = nullptr;
  check(api_, api_.call<Status *>(kGetTensorMutableData, v, &data), "tensor data");
  return data;
}

void *Call::state_output(size_t index, const Tensor &input) const {
  void *data = output(index, input.shape, input.rank);
  if (data != input.data)
    std::memcpy(data, input.data, input.bytes());
  return data;
}

void Call::parallel(size_t count, const std::function<void(size_t)> &body) const {
  if (count <= 1)
    return count ? body(0) : void();
  struct Loop {
    const std::function<void(size_t)> &body;
    std::mutex mutex;
    std::exception_ptr failure;
  } loop{body, {}, nullptr};
  auto run = [](void *user, size_t i) {
    auto *l = static_cast<Loop *>(user);
    try {
      l->body(i);
    } catch (...) { // must not unwind through the threads that run it
      std::lock_guard<std::mutex> lock(l->mutex);
      l->failure = std::current_exception();
    }
  };
  if (!team_ || !team_->run(static_cast<uint32_t>(count), run, &loop))
    check(api_,
          api_.call<ort::Status *>(
              ort::kKernelContextParallelFor, static_cast<const ort::KernelContext *>(context_),
              static_cast<void (*)(void *, size_t)>(run), count, count, static_cast<void *>(&loop)),
          "ParallelFor");
  if (loop.failure)
    std::rethrow_exception(loop.failure);
}

} // namespace moec
