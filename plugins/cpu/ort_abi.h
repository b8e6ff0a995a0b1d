// The part of onnxruntime's C ABI that a custom-operator library needs, declared by hand.
//
// onnxruntime publishes no headers in its Python wheels, and its function table (OrtApi) is append-only, so
// functions are addressed by their slot number. `GetApi(kApiVersion)` is null in a runtime that is too old.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moec::ort {

constexpr uint32_t kApiVersion = 18; // the oldest version that has every slot below

using Table = const void *const *;
struct ApiBase {
  Table (*GetApi)(uint32_t version);
  const char *(*GetVersionString)();
};

struct Status;
struct Value;
struct KernelContext;
struct KernelInfo;
struct CustomOpDomain;
struct SessionOptions;
struct TensorInfo;
struct ShapeInferContext;

enum Slot : int {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoAttributeFloat = 85,
  kKernelInfoAttributeInt64 = 86,
  kKernelInfoAttributeString = 87,
  kKernelContextInputCount = 88,
  kKernelContextInput = 90,
  kKernelContextOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorInfo = 99,
  kHasSessionConfigEntry = 237,
  kGetSessionConfigEntry = 238,
  kKernelContextParallelFor = 274,
};

enum ElementType : int { kUndefined = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kFloat16 = 10 };
enum Characteristic : int { kRequired = 0, kVariadic = 2 };
enum StatusCode : int { kFail = 1, kInvalidArgument = 2 };

// struct OrtCustomOp as of API version 18.
struct CustomOp {
  uint32_t version;
  void *(*CreateKernel)(const CustomOp *, Table, const KernelInfo *);
  const char *(*GetName)(const CustomOp *);
  const char *(*GetExecutionProviderType)(const CustomOp *);
  int (*GetInputType)(const CustomOp *, size_t);
  size_t (*GetInputTypeCount)(const CustomOp *);
  int (*GetOutputType)(const CustomOp *, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp *);
  void (*KernelCompute)(void *, KernelContext *);
  void (*KernelDestroy)(void *);
  int (*GetInputCharacteristic)(const CustomOp *, size_t);
  int (*GetOutputCharacteristic)(const CustomOp *, size_t);
  int (*GetInputMemoryType)(const CustomOp *, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp *);
  int (*GetVariadicInputHomogeneity)(const CustomOp *);
  int (*GetVariadicOutputMinArity)(const CustomOp *);
  int (*GetVariadicOutputHomogeneity)(const CustomOp *);
  Status *(*CreateKernelV2)(const CustomOp *, Table, const KernelInfo *, void **);
  Status *(*KernelComputeV2)(void *, KernelContext *);
  Status *(*InferOutputShape)(const CustomOp *, ShapeInferContext *);
  int (*GetStartVersion)(const CustomOp *);
  int (*GetEndVersion)(const CustomOp *);
  size_t (*GetMayInplace)(int **, int **);
  void (*ReleaseMayInplace)(int *, int *);
  size_t (*GetAliasMap)(int **, int **);
  void (*ReleaseAliasMap)(int *, int *);
};
static_assert(sizeof(void *) == 8, "the layout below is the 64-bit one");
static_assert(offsetof(CustomOp, CreateKernel) == 8);
static_assert(offsetof(CustomOp, KernelCompute) == 64);
static_assert(offsetof(CustomOp, GetVariadicInputMinArity) == 104);
static_assert(offsetof(CustomOp, CreateKernelV2) == 136);
static_assert(offsetof(CustomOp, KernelComputeV2) == 144);
static_assert(offsetof(CustomOp, GetStartVersion) == 160);
static_assert(offsetof(CustomOp, GetAliasMap) == 192);
static_assert(sizeof(CustomOp) == 208);

// Calls through the function table.
class Api {
public:
  explicit Api(Table table) : table_(table) {}
  template <class R, class... A> R call(Slot slot, A... args) const {
    return reinterpret_cast<R (*)(A...)>(const_cast<void *>(table_[slot]))(args...);
  }
  Status *error(const char *message, StatusCode code = kFail) const {
    return call<Status *>(kCreateStatus, static_cast<int>(code), message);
  }

private:
  Table table_;
};

} // namespace moec::ort
