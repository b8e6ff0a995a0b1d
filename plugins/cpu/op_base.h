// What every custom operator of this library shares: errors, attributes, tensors, the CustomOp table.
#pragma once
#include "ort_abi.h"
#include "team.h"
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace moec {

// A user-visible failure: becomes the OrtStatus of the call.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws Error with `message` when the status is not null.
void check(const ort::Api &api, ort::Status *status, const std::string &message);

class Attributes {
public:
  Attributes(const ort::Api &api, const ort::KernelInfo *info, const char *op)
      : api_(api), info_(info), op_(op) {}
  int64_t integer(const char *name) const;
  float real(const char *name) const;
  std::string text(const char *name) const;
  const char *op() const { return op_; }

private:
  [[noreturn]] void missing(const char *name) const;
  const ort::Api &api_;
  const ort::KernelInfo *info_;
  const char *op_;
};

struct Tensor {
  static constexpr size_t kMaxRank = 4;
  int64_t shape[kMaxRank] = {1, 1, 1, 1};
  size_t rank = 0;
  int type = 0;
  void *data = nullptr;
  int64_t count() const;
  int64_t last() const { return rank ? shape[rank - 1] : 0; }
  int64_t rows() const { return last() ? count() / last() : 0; } // of last() elements
  size_t bytes() const;
  template <class T> T *as() const { return static_cast<T *>(data); }
};

// One call of a kernel.
class Call {
public:
  Call(const ort::Api &api, ort::KernelContext *context, Team *team, Forecast *reads)
      : api_(api), context_(context), team_(team), reads_(reads) {}
  Tensor input(size_t index) const;
  size_t input_count() const;
  // Only the data, where the shape is known: cheaper.
  template <class T> const T *data(size_t index) const { return static_cast<const T *>(raw(index)); }
  // Allocates (or finds, when bound) output `index`.
  void *output(size_t index, const int64_t *shape, size_t rank) const;
  // Output `index` holds the state of `input`: nothing is copied where both are the same memory.
  void *state_output(size_t index, const Tensor &input) const;
  // Runs body(i) for i in [0, count) on the session's threads.
  void parallel(size_t count, const std::function<void(size_t)> &body) const;

  // What this operator reads in its first parallel(), to be told before it.
  Forecast *reads() const { return reads_; }

private:
  const ort::Value *value(size_t index) const;
  const void *raw(size_t index) const;
  const ort::Api &api_;
  ort::KernelContext *context_;
  Team *team_;
  Forecast *reads_;
};

// What an operator reads, and what the one after it read the last time.
struct Order : std::enable_shared_from_this<Order> {
  Forecast own, next;
  void begin(Team &team) {
    thread_local std::shared_ptr<Order> previous;
    if (previous)
      previous->next.copy_from(own);
    previous = shared_from_this();
    team.expect(next);
  }
};

// Builds the CustomOp table of a class with: kName, kInputs[], kOutputs[] (element types), a constructor
// (const Attributes &) and compute(const Call &). With kVariadic the last input stands for any number of
// inputs of any type, and the last output for any number of outputs of its type.
template <class Op> class Registration {
public:
  // For sessions that let `threads` threads work on an operator; 0: as onnxruntime decides.
  static const ort::CustomOp *table(int threads) {
    static std::mutex mutex;
    static std::map<int, Table> tables; // addresses stay
    std::lock_guard<std::mutex> lock(mutex);
    return &tables.try_emplace(threads, Table{make(), threads}).first->second.op;
  }

private:
  struct Table {
    ort::CustomOp op; // first: onnxruntime hands back its address
    int threads;
  };
  struct Kernel {
    ort::Api api;
    std::shared_ptr<Team> team;
    std::shared_ptr<Order> order = std::make_shared<Order>();
    Op op;
    Kernel(ort::Table table, const ort::KernelInfo *info, int threads)
        : api(table), team(Team::of(threads)), op(Attributes(api, info, Op::kName)) {}
  };
  template <class F> static ort::Status *guarded(const ort::Api &api, const F &body) {
    try {
      body();
      return nullptr;
    } catch (const std::exception &e) {
      return api.error(e.what());
    }
  }
  static ort::Status *create(const ort::CustomOp *op, ort::Table table, const ort::KernelInfo *info,
                             void **kernel) {
    const int threads = reinterpret_cast<const Table *>(op)->threads;
    return guarded(ort::Api(table), [&] { *kernel = new Kernel(table, info, threads); });
  }
  static ort::Status *compute(void *kernel, ort::KernelContext *context) {
    auto *k = static_cast<Kernel *>(kernel);
    return guarded(k->api, [&] {
      if (k->team)
        k->order->begin(*k->team);
      k->op.compute(Call(k->api, context, k->team.get(), k->team ? &k->order->own : nullptr));
    });
  }
  template <class T, class = void> struct IsVariadic : std::false_type {};
  template <class T> struct IsVariadic<T, std::void_t<decltype(T::kVariadic)>> : std::true_type {};
  static int kind(size_t index, size_t count) {
    return IsVariadic<Op>::value && index + 1 == count ? ort::kVariadic : ort::kRequired;
  }
  static ort::CustomOp make() {
    using ort::CustomOp;
    CustomOp op{};
    op.version = ort::kApiVersion;
    op.CreateKernelV2 = create;
    op.KernelComputeV2 = compute;
    op.KernelDestroy = [](void *k) { delete static_cast<Kernel *>(k); };
    op.GetName = [](const CustomOp *) -> const char * { return Op::kName; };
    op.GetExecutionProviderType = [](const CustomOp *) -> const char * { return nullptr; };
    op.GetInputType = [](const CustomOp *, size_t i) -> int { return Op::kInputs[i]; };
    op.GetOutputType = [](const CustomOp *, size_t i) -> int { return Op::kOutputs[i]; };
    op.GetInputTypeCount = [](const CustomOp *) { return std::size(Op::kInputs); };
    op.GetOutputTypeCount = [](const CustomOp *) { return std::size(Op::kOutputs); };
    op.GetInputCharacteristic = [](const CustomOp *, size_t i) { return kind(i, std::size(Op::kInputs)); };
    op.GetOutputCharacteristic = [](const CustomOp *, size_t i) { return kind(i, std::size(Op::kOutputs)); };
    op.GetInputMemoryType = [](const CustomOp *, size_t) { return 0; };
    op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const CustomOp *) { return 1; };
    op.GetVariadicInputHomogeneity = [](const CustomOp *) { return 0; };
    op.GetVariadicOutputHomogeneity = [](const CustomOp *) { return 1; };
    op.GetStartVersion = [](const CustomOp *) { return 1; };
    op.GetEndVersion = [](const CustomOp *) { return 0x7fffffff; };
    return op;
  }
};

const ort::CustomOp *asym_kv_attention_op(int threads);
const ort::CustomOp *pipelined_moe_op(int threads);
const ort::CustomOp *experts_op(int threads);
const ort::CustomOp *fused_linear_op(int threads);
const ort::CustomOp *rotary_pair_op(int threads);

} // namespace moec
