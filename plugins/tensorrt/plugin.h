// IPluginV3 for a moec op: everything that is the same for every op.
//
// `Op` is a copyable struct of attributes with:
//   kName, kInputs                          the op's name; the kinds of its inputs (TensorKind), in order
//   visit(field)                            names every attribute (plugin_fields.h)
//   validate() -> char const *              null, or what is wrong with the attributes
//   outputs(), aliased_input(output)        number of outputs; input whose memory an output is, or -1
//   output_shape(in, out, builder)          shape of output 0; the others have their aliased input's, or
//                                           without one the shape and type of input 0
//   check(in), workspace(in)                as the launchers' functions, from shapes alone
//   enqueue(in, out, data, results, workspace, stream) -> cudaError_t
// enqueue only launches kernels: no allocation and no synchronization, so a call can be captured.
#pragma once

#include "plugin_fields.h"
#include "trt_plugin_abi.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <new>

namespace moec::trt {

enum class TensorKind { kActivation, kFloat, kHalf, kInt8, kInt32 };

// TensorRT believes the version that the build capability reports, and never asks for aliases of an older one
// (it then builds an engine that silently copies or loses the caches). It is data, not an immediate, so that
// a test can plant that bug in a built library.
extern "C" int32_t const volatile moec_trt_build_version;

// How often TensorRT asked for an alias, in this process: the build child checks that it did.
extern std::atomic<int64_t> alias_queries;

inline void report(char const *op, char const *node, std::string const &what) {
  std::fprintf(stderr, "[moec] %s '%s': %s\n", op, node, what.c_str());
  std::fflush(stderr);
}

inline bool matches(TensorKind kind, DataType type, DataType activation) {
  switch (kind) {
  case TensorKind::kActivation:
    return type == activation && (type == DataType::kHALF || type == DataType::kBF16);
  case TensorKind::kFloat:
    return type == DataType::kFLOAT;
  case TensorKind::kHalf:
    return type == DataType::kHALF;
  case TensorKind::kInt8:
    return type == DataType::kINT8;
  case TensorKind::kInt32:
    return type == DataType::kINT32;
  }
  return false;
}

class BuildCapability : public IPluginV3OneBuildV2 {
public:
  InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"PLUGIN_V3ONE_BUILD", moec_trt_build_version, 0};
  }
};

template <class Op>
class Plugin final : public IPluginV3,
                     public IPluginV3OneCore,
                     public BuildCapability,
                     public IPluginV3OneRuntime {
public:
  Plugin(Op op, std::string node) : op_(std::move(op)), node_(std::move(node)) {}

  IPluginCapability *getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
    case PluginCapabilityType::kBUILD:
      return static_cast<IPluginV3OneBuildV2 *>(this);
    case PluginCapabilityType::kRUNTIME:
      return static_cast<IPluginV3OneRuntime *>(this);
    case PluginCapabilityType::kCORE:
      return static_cast<IPluginV3OneCore *>(this);
    }
    return nullptr;
  }
  IPluginV3 *clone() noexcept override { return new (std::nothrow) Plugin(op_, node_); }

  char const *getPluginName() const noexcept override { return Op::kName; }
  char const *getPluginVersion() const noexcept override { return "1"; }
  char const *getPluginNamespace() const noexcept override { return ""; }

  int32_t getNbOutputs() const noexcept override { return op_.outputs(); }

  int32_t configurePlugin(DynamicPluginTensorDesc const *in, int32_t nbIn, DynamicPluginTensorDesc const *,
                          int32_t) noexcept override {
    auto const inputs = largest(in, nbIn);
    char const *error = op_.check(inputs.data());
    if (error != nullptr)
      report(Op::kName, node_.c_str(), error);
    return error == nullptr ? 0 : 1;
  }

  int32_t getOutputDataTypes(DataType *out, int32_t nbOut, DataType const *in,
                             int32_t nbIn) const noexcept override {
    if (!arity(nbIn, nbOut))
      return 1;
    for (int32_t i = 0; i < nbOut; ++i)
      out[i] = in[like(i)];
    return 0;
  }

  int32_t getOutputShapes(DimsExprs const *in, int32_t nbIn, DimsExprs const *, int32_t, DimsExprs *out,
                          int32_t nbOut, IExprBuilder &builder) noexcept override {
    if (!arity(nbIn, nbOut))
      return 1;
    op_.output_shape(in, out[0], builder);
    for (int32_t i = 1; i < nbOut; ++i)
      out[i] = in[like(i)];
    return 0;
  }

  bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const *io, int32_t nbIn,
                                 int32_t) noexcept override {
    auto const &desc = io[pos].desc;
    if (desc.format != TensorFormat::kLINEAR)
      return false;
    int32_t const output = pos - nbIn;
    TensorKind const kind = Op::kInputs[output < 0 ? pos : like(output)];
    return matches(kind, desc.type, io[0].desc.type);
  }

  int32_t getAliasedInput(int32_t output) noexcept override {
    ++alias_queries;
    return op_.aliased_input(output);
  }

  size_t getWorkspaceSize(DynamicPluginTensorDesc const *in, int32_t nbIn, DynamicPluginTensorDesc const *,
                          int32_t) const noexcept override {
    return op_.workspace(largest(in, nbIn).data());
  }

  int32_t onShapeChange(PluginTensorDesc const *in, int32_t nbIn, PluginTensorDesc const *,
                        int32_t nbOut) noexcept override {
    return arity(nbIn, nbOut) && op_.check(in) == nullptr ? 0 : 1;
  }

  int32_t enqueue(PluginTensorDesc const *in, PluginTensorDesc const *, void const *const *data,
                  void *const *results, void *workspace, CUstream_st *stream) noexcept override {
    return op_.enqueue(in, data, results, workspace, stream);
  }

  IPluginV3 *attachToContext(IPluginResourceContext *) noexcept override { return clone(); }
  PluginFieldCollection const *getFieldsToSerialize() noexcept override { return fields_.of(op_); }

private:
  static constexpr int32_t kNbInputs = static_cast<int32_t>(std::size(Op::kInputs));
  using Inputs = std::array<PluginTensorDesc, kNbInputs>;

  // The shapes of the profile being built: profiles are static, so min, opt and max agree.
  static Inputs largest(DynamicPluginTensorDesc const *in, int32_t nbIn) {
    Inputs inputs{};
    for (int32_t i = 0; i < nbIn && i < kNbInputs; ++i) {
      inputs[i] = in[i].desc;
      inputs[i].dims = in[i].max;
    }
    return inputs;
  }

  // The input whose type an output has: the aliased one, or input 0, an activation in every op.
  int32_t like(int32_t output) const {
    int32_t const aliased = op_.aliased_input(output);
    return aliased < 0 ? 0 : aliased;
  }

  bool arity(int32_t nbIn, int32_t nbOut) const {
    bool const ok = nbIn == kNbInputs && nbOut == op_.outputs();
    if (!ok)
      report(Op::kName, node_.c_str(),
             "takes " + std::to_string(kNbInputs) + " inputs and " + std::to_string(op_.outputs()) +
                 " outputs, the node has " + std::to_string(nbIn) + " and " + std::to_string(nbOut));
    return ok;
  }

  Op op_;
  std::string node_;
  SerializedFields fields_;
};

template <class Op> class Creator final : public IPluginCreatorV3One {
public:
  Creator() : fields_(field_names<Op>()), collection_{static_cast<int32_t>(fields_.size()), fields_.data()} {}

  char const *getPluginName() const noexcept override { return Op::kName; }
  char const *getPluginVersion() const noexcept override { return "1"; }
  char const *getPluginNamespace() const noexcept override { return ""; }
  PluginFieldCollection const *getFieldNames() noexcept override { return &collection_; }

  IPluginV3 *createPlugin(char const *name, PluginFieldCollection const *fields,
                          TensorRTPhase) noexcept override {
    Op op;
    std::string error = fields == nullptr ? "no attributes" : read_fields(*fields, op);
    if (error.empty())
      if (char const *invalid = op.validate())
        error = invalid;
    if (!error.empty()) {
      report(Op::kName, name == nullptr ? "" : name, error);
      return nullptr;
    }
    return new (std::nothrow) Plugin<Op>(std::move(op), name == nullptr ? "" : name);
  }

private:
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_;
};

} // namespace moec::trt
