// Attributes of an op and TensorRT's plugin fields, both ways.
//
// An op struct names its attributes once, in `visit(field)`, which calls field(name, member) for every one;
// the creator's field names, the parser and the serializer below are all made from it, so none can forget
// one.
#pragma once

#include "trt_plugin_abi.h"

#include <cstring>
#include <string>
#include <vector>

namespace moec::trt {

inline PluginFieldType field_type(int32_t const &) {
  return PluginFieldType::kINT32;
}
inline PluginFieldType field_type(float const &) {
  return PluginFieldType::kFLOAT32;
}
inline PluginFieldType field_type(std::string const &) {
  return PluginFieldType::kCHAR;
}

// The fields that a creator asks the ONNX parser for: it drops every attribute that is not named here.
template <class Op> std::vector<PluginField> field_names() {
  std::vector<PluginField> fields;
  Op op;
  op.visit([&](char const *name, auto const &member) {
    auto const type = field_type(member);
    fields.push_back({name, nullptr, type, type == PluginFieldType::kCHAR ? 0 : 1});
  });
  return fields;
}

inline bool read_field(PluginField const &field, std::string &out) {
  auto const *text = static_cast<char const *>(field.data);
  // The parser counts the terminating NUL in the length; other callers may not.
  out.assign(text, strnlen(text, static_cast<size_t>(field.length)));
  return true;
}

template <class T> bool read_field(PluginField const &field, T &out) {
  if (field.length != 1)
    return false;
  std::memcpy(&out, field.data, sizeof(T));
  return true;
}

// Reads every attribute of `op`. Returns an empty string, or what is wrong with the first bad one.
template <class Op> std::string read_fields(PluginFieldCollection const &fields, Op &op) {
  std::string error;
  op.visit([&](char const *name, auto &member) {
    if (!error.empty())
      return;
    for (int32_t i = 0; i < fields.nbFields; ++i) {
      auto const &field = fields.fields[i];
      if (std::strcmp(field.name, name) != 0)
        continue;
      if (field.data == nullptr || field.type != field_type(member) || !read_field(field, member))
        error = std::string("attribute '") + name + "' has the wrong type or length";
      return;
    }
    error = std::string("attribute '") + name + "' is missing";
  });
  return error;
}

// What getFieldsToSerialize returns: points into `op`, which must outlive it.
class SerializedFields {
public:
  template <class Op> PluginFieldCollection const *of(Op const &op) {
    fields_.clear();
    const_cast<Op &>(op).visit([&](char const *name, auto const &member) { add(name, member); });
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  }

private:
  void add(char const *name, std::string const &text) {
    fields_.push_back({name, text.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(text.size() + 1)});
  }
  template <class T> void add(char const *name, T const &member) {
    fields_.push_back({name, &member, field_type(member), 1});
  }

  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

} // namespace moec::trt
