// The part of the TensorRT 10/11 (and TensorRT-RTX 1.x) binary interface that an IPluginV3 library touches.
//
// Written from the observable ABI (Itanium C++ ABI, Linux, 64 bit), so that the plugin library builds where
// no TensorRT headers are installed; tests/plugins/tensorrt/test_trt_plugin_abi.py compares it with the
// official headers where they are. What has to match: the order of virtual functions (vtable slots; a virtual
// destructor takes two), struct layouts, enum values, and what getInterfaceInfo() reports. Names, RTTI and
// noexcept do not.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace moec::trt {

enum class DataType : int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kBOOL = 4,
  kUINT8 = 5,
  kFP8 = 6,
  kBF16 = 7,
  kINT64 = 8,
  kINT4 = 9
};
// Vectorised layouts exist too and are offered to plugins; ours accept kLINEAR only.
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class PluginFieldType : int32_t {
  kFLOAT16 = 0,
  kFLOAT32 = 1,
  kFLOAT64 = 2,
  kINT8 = 3,
  kINT16 = 4,
  kINT32 = 5,
  kCHAR = 6,
  kDIMS = 7,
  kUNKNOWN = 8,
  kBF16 = 9,
  kINT64 = 10
};
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class DimensionOperation : int32_t {
  kSUM = 0,
  kPROD = 1,
  kMAX = 2,
  kMIN = 3,
  kSUB = 4,
  kEQUAL = 5,
  kLESS = 6,
  kFLOOR_DIV = 7,
  kCEIL_DIV = 8
};
enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };

struct Dims {
  int32_t nbDims;
  int64_t d[8];
};

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};

struct PluginField {
  char const *name;
  void const *data;
  PluginFieldType type;
  int32_t length; // elements, not bytes; for kCHAR the terminating NUL counts
};

struct PluginFieldCollection {
  int32_t nbFields;
  PluginField const *fields;
};

struct InterfaceInfo { // 16 bytes: returned in registers
  char const *kind;
  int32_t major, minor;
};

// Objects that TensorRT hands to a plugin are {vptr, impl*}: their own vtable is never called, every call
// goes through impl, whose first two slots are its destructor.
class IDimensionExpr {
public:
  bool isConstant() const { return impl_->isConstant(); }
  int64_t getConstantValue() const { return impl_->getConstantValue(); }

private:
  struct Impl {
    virtual ~Impl() = default;
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
  };
  virtual ~IDimensionExpr() = default;
  Impl *impl_;
};

class IExprBuilder {
public:
  IDimensionExpr const *constant(int64_t value) { return impl_->constant(value); }
  IDimensionExpr const *operation(DimensionOperation op, IDimensionExpr const &a, IDimensionExpr const &b) {
    return impl_->operation(op, a, b);
  }

private:
  struct Impl {
    virtual ~Impl() = default;
    virtual IDimensionExpr const *constant(int64_t value) = 0;
    virtual IDimensionExpr const *operation(DimensionOperation op, IDimensionExpr const &a,
                                            IDimensionExpr const &b) = 0;
    virtual IDimensionExpr const *declareSizeTensor(int32_t output, IDimensionExpr const &opt,
                                                    IDimensionExpr const &upper) = 0;
  };
  virtual ~IExprBuilder() = default;
  Impl *impl_;
};

struct DimsExprs {
  int32_t nbDims;
  IDimensionExpr const *d[8];
};

// Interfaces that we implement. The comments give vtable slots.
class IVersionedInterface {
public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; } // 0
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;                      // 1
  virtual ~IVersionedInterface() noexcept = default;                                // 2, 3
};

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};
class IPluginResourceContext; // opaque to us

class IPluginV3 : public IVersionedInterface {
public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability *getCapabilityInterface(PluginCapabilityType type) noexcept = 0; // 4
  virtual IPluginV3 *clone() noexcept = 0;                                                   // 5
};

class IPluginV3OneCore : public IPluginCapability {
public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual char const *getPluginName() const noexcept = 0;      // 4
  virtual char const *getPluginVersion() const noexcept = 0;   // 5
  virtual char const *getPluginNamespace() const noexcept = 0; // 6
};

// Version 2 of the build capability is version 1 with getAliasedInput appended.
class IPluginV3OneBuildV2 : public IPluginCapability {
public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
  virtual int32_t configurePlugin(DynamicPluginTensorDesc const *in, int32_t nbIn,
                                  DynamicPluginTensorDesc const *out, int32_t nbOut) noexcept = 0; // 4
  virtual int32_t getOutputDataTypes(DataType *out, int32_t nbOut, DataType const *in,
                                     int32_t nbIn) const noexcept = 0; // 5
  virtual int32_t getOutputShapes(DimsExprs const *in, int32_t nbIn, DimsExprs const *shapeIn,
                                  int32_t nbShapeIn, DimsExprs *out, int32_t nbOut,
                                  IExprBuilder &builder) noexcept = 0; // 6
  virtual bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const *inOut, int32_t nbIn,
                                         int32_t nbOut) noexcept = 0; // 7
  virtual int32_t getNbOutputs() const noexcept = 0;                  // 8
  virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const * /*in*/, int32_t /*nbIn*/,
                                  DynamicPluginTensorDesc const * /*out*/,
                                  int32_t /*nbOut*/) const noexcept { // 9
    return 0;
  }
  virtual int32_t getValidTactics(int32_t * /*tactics*/, int32_t /*nb*/) noexcept { return 0; } // 10
  virtual int32_t getNbTactics() noexcept { return 0; }                                         // 11
  virtual char const *getTimingCacheID() noexcept { return nullptr; }                           // 12
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }                          // 13
  virtual char const *getMetadataString() noexcept { return nullptr; }                          // 14
  virtual int32_t getAliasedInput(int32_t /*output*/) noexcept { return -1; }                   // 15
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t setTactic(int32_t /*tactic*/) noexcept { return 0; } // 4
  virtual int32_t onShapeChange(PluginTensorDesc const *in, int32_t nbIn, PluginTensorDesc const *out,
                                int32_t nbOut) noexcept = 0; // 5
  virtual int32_t enqueue(PluginTensorDesc const *inDesc, PluginTensorDesc const *outDesc,
                          void const *const *in, void *const *out, void *workspace,
                          CUstream_st *stream) noexcept = 0;                        // 6
  virtual IPluginV3 *attachToContext(IPluginResourceContext *context) noexcept = 0; // 7
  virtual PluginFieldCollection const *getFieldsToSerialize() noexcept = 0;         // 8
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3 *createPlugin(char const *name, PluginFieldCollection const *fields,
                                  TensorRTPhase phase) noexcept = 0; // 4
  virtual PluginFieldCollection const *getFieldNames() noexcept = 0; // 5
  virtual char const *getPluginName() const noexcept = 0;            // 6
  virtual char const *getPluginVersion() const noexcept = 0;         // 7
  virtual char const *getPluginNamespace() const noexcept = 0;       // 8
};

static_assert(sizeof(Dims) == 72 && sizeof(PluginTensorDesc) == 88 &&
                  sizeof(DynamicPluginTensorDesc) == 304 && sizeof(PluginField) == 24 &&
                  sizeof(PluginFieldCollection) == 16 && sizeof(DimsExprs) == 72 &&
                  sizeof(InterfaceInfo) == 16 && sizeof(IExprBuilder) == 16,
              "layout differs from libnvinfer's");

} // namespace moec::trt
// A plugin library exports, with C linkage:
//   moec::trt::IPluginCreatorInterface *const *getCreators(int32_t &count);
//   void setLoggerFinder(void *finder);
