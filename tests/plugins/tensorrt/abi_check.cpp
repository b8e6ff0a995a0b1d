// Compares our ABI header with NVIDIA's: layouts, enum values, vtable slots, interface identities.
// Exits with the number of differences and prints each.
#include "NvInfer.h"
#include "NvInferPlugin.h"
#include "NvInferVersion.h"

#include "tensorrt/trt_plugin_abi.h"

#include <cstdio>
#include <cstring>

namespace ours = moec::trt;
namespace theirs = nvinfer1;

static int differences = 0;

static void same(char const *what, long a, long b) {
  if (a == b)
    return;
  std::printf("%s: ours %ld, theirs %ld\n", what, a, b);
  ++differences;
}

// Itanium C++ ABI: a pointer to a virtual member function is 1 + its byte offset in the vtable.
template <class F> long slot(F pointer) {
  long words[2];
  static_assert(sizeof(pointer) == sizeof(words), "not a member function pointer");
  std::memcpy(words, &pointer, sizeof(words));
  return (words[0] - 1) / static_cast<long>(sizeof(void *));
}

#define SIZE(type) same("sizeof " #type, sizeof(ours::type), sizeof(theirs::type))
#define OFFSET(type, member)                                                                                 \
  same("offset of " #type "::" #member, offsetof(ours::type, member), offsetof(theirs::type, member))
#define VALUE(type, name)                                                                                    \
  same(#type "::" #name, static_cast<long>(ours::type::name), static_cast<long>(theirs::type::name))
#define SLOT(type, method)                                                                                   \
  same("slot of " #type "::" #method, slot(&ours::type::method), slot(&theirs::type::method))
// The classes of version 2 of the build interface have one name here and another there.
#define BUILD_SLOT(method)                                                                                   \
  same("slot of build::" #method, slot(&ours::IPluginV3OneBuildV2::method),                                  \
       slot(&theirs::IPluginV3OneBuildV2::method))

template <class A, class B> void same_info(char const *what, A const &a, B const &b) {
  auto const x = a.getInterfaceInfo();
  auto const y = b.getInterfaceInfo();
  if (std::strcmp(x.kind, y.kind) != 0 || x.major != y.major || x.minor != y.minor) {
    std::printf("%s: ours %s %d.%d, theirs %s %d.%d\n", what, x.kind, x.major, x.minor, y.kind, y.major,
                y.minor);
    ++differences;
  }
}

// Never called: only their inherited getInterfaceInfo is.
struct OurCore : ours::IPluginV3OneCore {
  char const *getPluginName() const noexcept override { return ""; }
  char const *getPluginVersion() const noexcept override { return ""; }
  char const *getPluginNamespace() const noexcept override { return ""; }
};
struct TheirCore : theirs::IPluginV3OneCore {
  char const *getPluginName() const noexcept override { return ""; }
  char const *getPluginVersion() const noexcept override { return ""; }
  char const *getPluginNamespace() const noexcept override { return ""; }
};
struct OurPlugin : ours::IPluginV3 {
  ours::IPluginCapability *getCapabilityInterface(ours::PluginCapabilityType) noexcept override {
    return nullptr;
  }
  ours::IPluginV3 *clone() noexcept override { return nullptr; }
};
struct TheirPlugin : theirs::IPluginV3 {
  theirs::IPluginCapability *getCapabilityInterface(theirs::PluginCapabilityType) noexcept override {
    return nullptr;
  }
  theirs::IPluginV3 *clone() noexcept override { return nullptr; }
};
#define BUILD_METHODS(ns)                                                                                    \
  int32_t configurePlugin(ns::DynamicPluginTensorDesc const *, int32_t, ns::DynamicPluginTensorDesc const *, \
                          int32_t) noexcept override {                                                       \
    return 0;                                                                                                \
  }                                                                                                          \
  int32_t getOutputDataTypes(ns::DataType *, int32_t, ns::DataType const *, int32_t)                         \
      const noexcept override {                                                                              \
    return 0;                                                                                                \
  }                                                                                                          \
  int32_t getOutputShapes(ns::DimsExprs const *, int32_t, ns::DimsExprs const *, int32_t, ns::DimsExprs *,   \
                          int32_t, ns::IExprBuilder &) noexcept override {                                   \
    return 0;                                                                                                \
  }                                                                                                          \
  bool supportsFormatCombination(int32_t, ns::DynamicPluginTensorDesc const *, int32_t,                      \
                                 int32_t) noexcept override {                                                \
    return true;                                                                                             \
  }                                                                                                          \
  int32_t getNbOutputs() const noexcept override {                                                           \
    return 0;                                                                                                \
  }
struct OurBuild : ours::IPluginV3OneBuildV2 {
  BUILD_METHODS(ours)
};
struct TheirBuild : theirs::IPluginV3OneBuildV2 {
  BUILD_METHODS(theirs)
};
struct OurRuntime : ours::IPluginV3OneRuntime {
  int32_t onShapeChange(ours::PluginTensorDesc const *, int32_t, ours::PluginTensorDesc const *,
                        int32_t) noexcept override {
    return 0;
  }
  int32_t enqueue(ours::PluginTensorDesc const *, ours::PluginTensorDesc const *, void const *const *,
                  void *const *, void *, CUstream_st *) noexcept override {
    return 0;
  }
  ours::IPluginV3 *attachToContext(ours::IPluginResourceContext *) noexcept override { return nullptr; }
  ours::PluginFieldCollection const *getFieldsToSerialize() noexcept override { return nullptr; }
};
struct TheirRuntime : theirs::IPluginV3OneRuntime {
  int32_t onShapeChange(theirs::PluginTensorDesc const *, int32_t, theirs::PluginTensorDesc const *,
                        int32_t) noexcept override {
    return 0;
  }
  int32_t enqueue(theirs::PluginTensorDesc const *, theirs::PluginTensorDesc const *, void const *const *,
                  void *const *, void *, cudaStream_t) noexcept override {
    return 0;
  }
  theirs::IPluginV3 *attachToContext(theirs::IPluginResourceContext *) noexcept override { return nullptr; }
  theirs::PluginFieldCollection const *getFieldsToSerialize() noexcept override { return nullptr; }
};
struct OurCreator : ours::IPluginCreatorV3One {
  ours::IPluginV3 *createPlugin(char const *, ours::PluginFieldCollection const *,
                                ours::TensorRTPhase) noexcept override {
    return nullptr;
  }
  ours::PluginFieldCollection const *getFieldNames() noexcept override { return nullptr; }
  char const *getPluginName() const noexcept override { return ""; }
  char const *getPluginVersion() const noexcept override { return ""; }
  char const *getPluginNamespace() const noexcept override { return ""; }
};
struct TheirCreator : theirs::IPluginCreatorV3One {
  theirs::IPluginV3 *createPlugin(char const *, theirs::PluginFieldCollection const *,
                                  theirs::TensorRTPhase) noexcept override {
    return nullptr;
  }
  theirs::PluginFieldCollection const *getFieldNames() noexcept override { return nullptr; }
  char const *getPluginName() const noexcept override { return ""; }
  char const *getPluginVersion() const noexcept override { return ""; }
  char const *getPluginNamespace() const noexcept override { return ""; }
};

static void layouts() {
  SIZE(Dims);
  SIZE(PluginTensorDesc);
  SIZE(DynamicPluginTensorDesc);
  SIZE(PluginField);
  SIZE(PluginFieldCollection);
  SIZE(DimsExprs);
  SIZE(InterfaceInfo);
  SIZE(IExprBuilder);
  SIZE(IDimensionExpr);
  OFFSET(Dims, d);
  OFFSET(PluginTensorDesc, type);
  OFFSET(PluginTensorDesc, format);
  OFFSET(PluginTensorDesc, scale);
  OFFSET(DynamicPluginTensorDesc, min);
  OFFSET(DynamicPluginTensorDesc, max);
  OFFSET(DynamicPluginTensorDesc, opt);
  OFFSET(PluginField, data);
  OFFSET(PluginField, type);
  OFFSET(PluginField, length);
  OFFSET(PluginFieldCollection, fields);
  OFFSET(DimsExprs, d);
  OFFSET(InterfaceInfo, major);
}

static void values() {
  VALUE(DataType, kFLOAT);
  VALUE(DataType, kHALF);
  VALUE(DataType, kINT8);
  VALUE(DataType, kINT32);
  VALUE(DataType, kBOOL);
  VALUE(DataType, kUINT8);
  VALUE(DataType, kFP8);
  VALUE(DataType, kBF16);
  VALUE(DataType, kINT64);
  VALUE(DataType, kINT4);
  VALUE(TensorFormat, kLINEAR);
  VALUE(PluginFieldType, kFLOAT16);
  VALUE(PluginFieldType, kFLOAT32);
  VALUE(PluginFieldType, kFLOAT64);
  VALUE(PluginFieldType, kINT8);
  VALUE(PluginFieldType, kINT16);
  VALUE(PluginFieldType, kINT32);
  VALUE(PluginFieldType, kCHAR);
  VALUE(PluginFieldType, kDIMS);
  VALUE(PluginFieldType, kUNKNOWN);
  VALUE(PluginFieldType, kBF16);
  VALUE(PluginFieldType, kINT64);
  VALUE(TensorRTPhase, kBUILD);
  VALUE(TensorRTPhase, kRUNTIME);
  VALUE(PluginCapabilityType, kCORE);
  VALUE(PluginCapabilityType, kBUILD);
  VALUE(PluginCapabilityType, kRUNTIME);
  VALUE(DimensionOperation, kSUM);
  VALUE(DimensionOperation, kPROD);
  VALUE(DimensionOperation, kMAX);
  VALUE(DimensionOperation, kMIN);
  VALUE(DimensionOperation, kSUB);
  VALUE(DimensionOperation, kEQUAL);
  VALUE(DimensionOperation, kLESS);
  VALUE(DimensionOperation, kFLOOR_DIV);
  VALUE(DimensionOperation, kCEIL_DIV);
  VALUE(APILanguage, kCPP);
  VALUE(APILanguage, kPYTHON);
}

static void slots() {
  SLOT(IVersionedInterface, getAPILanguage);
  SLOT(IVersionedInterface, getInterfaceInfo);
  SLOT(IPluginV3, getCapabilityInterface);
  SLOT(IPluginV3, clone);
  SLOT(IPluginV3OneCore, getPluginName);
  SLOT(IPluginV3OneCore, getPluginVersion);
  SLOT(IPluginV3OneCore, getPluginNamespace);
  BUILD_SLOT(configurePlugin);
  BUILD_SLOT(getOutputDataTypes);
  BUILD_SLOT(getOutputShapes);
  BUILD_SLOT(supportsFormatCombination);
  BUILD_SLOT(getNbOutputs);
  BUILD_SLOT(getWorkspaceSize);
  BUILD_SLOT(getValidTactics);
  BUILD_SLOT(getNbTactics);
  BUILD_SLOT(getTimingCacheID);
  BUILD_SLOT(getFormatCombinationLimit);
  BUILD_SLOT(getMetadataString);
  BUILD_SLOT(getAliasedInput);
  SLOT(IPluginV3OneRuntime, setTactic);
  SLOT(IPluginV3OneRuntime, onShapeChange);
  SLOT(IPluginV3OneRuntime, enqueue);
  SLOT(IPluginV3OneRuntime, attachToContext);
  SLOT(IPluginV3OneRuntime, getFieldsToSerialize);
  SLOT(IPluginCreatorV3One, createPlugin);
  SLOT(IPluginCreatorV3One, getFieldNames);
  SLOT(IPluginCreatorV3One, getPluginName);
  SLOT(IPluginCreatorV3One, getPluginVersion);
  SLOT(IPluginCreatorV3One, getPluginNamespace);
}

// Their objects {vptr, impl*} read through our classes.
struct TheirDimension : theirs::apiv::VDimensionExpr {
  bool isConstant() const noexcept override { return true; }
  int64_t getConstantValue() const noexcept override { return value; }
  bool isSizeTensor() const noexcept override { return false; }
  int64_t value = 7;
};
struct TheirDimensionHandle : theirs::IDimensionExpr {
  explicit TheirDimensionHandle(theirs::apiv::VDimensionExpr *impl) { mImpl = impl; }
};
struct TheirExpressions : theirs::apiv::VExprBuilder {
  theirs::IDimensionExpr const *constant(int64_t value) noexcept override {
    dimension.value = value;
    return &handle;
  }
  theirs::IDimensionExpr const *operation(theirs::DimensionOperation, theirs::IDimensionExpr const &a,
                                          theirs::IDimensionExpr const &b) noexcept override {
    dimension.value = a.getConstantValue() * 1000 + b.getConstantValue();
    return &handle;
  }
  theirs::IDimensionExpr const *declareSizeTensor(int32_t, theirs::IDimensionExpr const &,
                                                  theirs::IDimensionExpr const &) override {
    return nullptr;
  }
  TheirDimension dimension;
  TheirDimensionHandle handle{&dimension};
};
struct TheirBuilderHandle : theirs::IExprBuilder {
  explicit TheirBuilderHandle(theirs::apiv::VExprBuilder *impl) { mImpl = impl; }
};

static void expressions() {
  TheirExpressions impl;
  TheirBuilderHandle handle(&impl);
  auto *builder = reinterpret_cast<ours::IExprBuilder *>(&handle);
  auto const *seven = builder->constant(7);
  same("constant()", seven->getConstantValue(), 7);
  same("isConstant()", seven->isConstant(), 1);
  auto const *both = builder->operation(ours::DimensionOperation::kPROD, *seven, *seven);
  same("operation()", both->getConstantValue(), 7007);
}

int main() {
  std::printf("TensorRT headers %d.%d\n", NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR);
  layouts();
  values();
  slots();
  expressions();
  same_info("IPluginV3", OurPlugin(), TheirPlugin());
  same_info("IPluginV3OneCore", OurCore(), TheirCore());
  same_info("IPluginV3OneBuildV2", OurBuild(), TheirBuild());
  same_info("IPluginV3OneRuntime", OurRuntime(), TheirRuntime());
  same_info("IPluginCreatorV3One", OurCreator(), TheirCreator());
  return differences;
}
