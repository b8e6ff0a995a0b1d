// Drives a plugin library the way TensorRT does, without TensorRT: `probe LIBRARY OP [name=value ...]`.
//
// Makes the plugin from attributes given as text, serializes it, makes a second one from those fields,
// serializes that, and prints both lists. Exit code 3: the creator refused the attributes.
#include "tensorrt/trt_plugin_abi.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <string>
#include <vector>

using namespace moec::trt;

namespace {

struct Value {
  std::string text;
  int32_t integer;
  float real;
};

void print(char const *title, PluginFieldCollection const &fields) {
  std::printf("%s\n", title);
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    auto const &f = fields.fields[i];
    if (f.type == PluginFieldType::kCHAR)
      std::printf("%s s %d %s\n", f.name, f.length, static_cast<char const *>(f.data));
    else if (f.type == PluginFieldType::kFLOAT32)
      std::printf("%s f %d %a\n", f.name, f.length, static_cast<double>(*static_cast<float const *>(f.data)));
    else
      std::printf("%s i %d %d\n", f.name, f.length, *static_cast<int32_t const *>(f.data));
  }
}

IPluginCreatorV3One *find_creator(void *library, char const *op) {
  using GetCreators = IPluginCreatorInterface *const *(*)(int32_t &);
  auto const get = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
  int32_t count = 0;
  auto const *creators = get(count);
  for (int32_t i = 0; i < count; ++i) {
    auto *creator = static_cast<IPluginCreatorV3One *>(creators[i]);
    if (std::strcmp(creator->getPluginName(), op) == 0)
      return creator;
  }
  return nullptr;
}

// The fields that the creator asks for and that were given, as the ONNX parser would make them.
std::vector<PluginField> parse(PluginFieldCollection const &names, std::map<std::string, Value> &given) {
  std::vector<PluginField> fields;
  for (int32_t i = 0; i < names.nbFields; ++i) {
    auto const &wanted = names.fields[i];
    auto found = given.find(wanted.name);
    if (found == given.end())
      continue;
    Value &v = found->second;
    v.integer = std::atoi(v.text.c_str());
    v.real = std::strtof(v.text.c_str(), nullptr);
    if (wanted.type == PluginFieldType::kCHAR)
      fields.push_back({wanted.name, v.text.c_str(), wanted.type, static_cast<int32_t>(v.text.size() + 1)});
    else if (wanted.type == PluginFieldType::kFLOAT32)
      fields.push_back({wanted.name, &v.real, wanted.type, 1});
    else
      fields.push_back({wanted.name, &v.integer, wanted.type, 1});
  }
  return fields;
}

IPluginV3OneRuntime *runtime_of(IPluginV3 *plugin) {
  return static_cast<IPluginV3OneRuntime *>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

IPluginV3OneBuildV2 *build_of(IPluginV3 *plugin) {
  return static_cast<IPluginV3OneBuildV2 *>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

DynamicPluginTensorDesc tensor(DataType type, TensorFormat format) {
  DynamicPluginTensorDesc desc{};
  desc.desc.type = type;
  desc.desc.format = format;
  return desc;
}

// For every tensor: which of the types 0..9 are taken in the linear layout, and how many in another layout.
void print_formats(IPluginV3OneBuildV2 *build, int32_t inputs) {
  int32_t const outputs = build->getNbOutputs();
  for (DataType activation : {DataType::kHALF, DataType::kBF16}) {
    std::vector<DynamicPluginTensorDesc> io(inputs + outputs, tensor(activation, TensorFormat::kLINEAR));
    std::printf("formats %d:", static_cast<int>(activation));
    for (int32_t pos = 0; pos < inputs + outputs; ++pos) {
      std::printf(" ");
      for (int type = 0; type < 10; ++type) {
        auto const before = io[pos];
        io[pos] = tensor(static_cast<DataType>(type), TensorFormat::kLINEAR);
        bool const linear = build->supportsFormatCombination(pos, io.data(), inputs, outputs);
        io[pos].desc.format = static_cast<TensorFormat>(3);
        bool const other = build->supportsFormatCombination(pos, io.data(), inputs, outputs);
        std::printf("%s", other ? "!" : linear ? std::to_string(type).c_str() : "");
        io[pos] = before;
      }
    }
    std::printf("\n");
  }
}

} // namespace

int main(int argc, char **argv) {
  void *library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) {
    std::printf("%s\n", dlerror());
    return 2;
  }
  auto *creator = find_creator(library, argv[2]);
  std::map<std::string, Value> given;
  int32_t inputs = std::atoi(argv[3]);
  for (int i = 4; i < argc; ++i) {
    std::string const argument = argv[i];
    auto const equals = argument.find('=');
    given[argument.substr(0, equals)] = {argument.substr(equals + 1), 0, 0.0f};
  }
  auto const fields = parse(*creator->getFieldNames(), given);
  PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
  auto *first = creator->createPlugin("node_name", &collection, TensorRTPhase::kBUILD);
  if (first == nullptr)
    return 3;
  auto const *saved = runtime_of(first)->getFieldsToSerialize();
  print("first", *saved);
  auto *second = creator->createPlugin("node_name", saved, TensorRTPhase::kRUNTIME);
  auto *copy = second->clone();
  delete second;
  print("second", *runtime_of(copy)->getFieldsToSerialize());
  auto *build = build_of(copy);
  std::printf("outputs %d aliases", build->getNbOutputs());
  for (int32_t i = 0; i < build->getNbOutputs(); ++i)
    std::printf(" %d", build->getAliasedInput(i));
  std::printf("\n");
  auto const info = build->getInterfaceInfo();
  std::printf("interface %s %d\n", info.kind, info.major);
  print_formats(build, inputs);
  delete first;
  delete copy;
  return 0;
}
