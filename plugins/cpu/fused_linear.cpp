// moec::FusedLinear: the dense layers that read one tensor, in one node. Matrix i is codes and fp16 scales,
// or fp32 (gates of a few rows), perhaps with a bias:
//
//   inputs   x [..., K], for each matrix (codes, scales[, bias]) or (weight[, bias]), [gate_logit],
//   addends... outputs  y_i [..., N_i] = x W_i^T + b_i; with an activation y_0 becomes act(y_0) * y_1, and
//   y_1 is no output;
//            then y_0 is multiplied with sigmoid(gate_logit [..., 1]), then the addends are added to it.
//
// Activations are rounded to int8, a scale per 64. A token's result depends on no other token of the call.
#include "activation.h"
#include "kernels.h"
#include "op_base.h"
#include "scratch.h"
#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

namespace moec {
namespace {

constexpr int kGroup = 64;
constexpr int64_t kTokensPerTask = 64;
constexpr int kMostRows = 512; // rows of a matrix in one task

// One matrix: which inputs it is, and its size.
struct Part {
  size_t weight;
  bool fp32, biased;
  int bits;
  int64_t rows;
  size_t scales() const { return weight + 1; }
  size_t bias() const { return weight + (fp32 ? 1 : 2); }
  size_t end() const { return bias() + (biased ? 1 : 0); }
  int64_t task_rows() const { return rows >= 8 * kMostRows ? kMostRows : kGroup; }
  int64_t pieces() const { return (rows + task_rows() - 1) / task_rows(); }
};

// RMSNormalization before the products: its weight, and where the results go.
struct Norm {
  const float *weight = nullptr;
  float epsilon = 0;
  float *out = nullptr; // [tokens][columns]
};

// Activations of all tokens of a call.
class Inputs {
public:
  Inputs(const float *x, int64_t tokens, int64_t columns, const Norm &norm)
      : raw_(x), x_(norm.weight ? norm.out : x), columns_(columns), groups_((columns + kGroup - 1) / kGroup),
        norm_(norm), codes_(static_cast<size_t>(tokens * groups_) * 2 * kGroup),
        scales_(static_cast<size_t>(tokens * groups_)),
        offsets_(static_cast<size_t>(tokens * groups_) * 2 * 8) {}
  void prepare(int64_t token) {
    if (norm_.weight)
      normalize(raw_ + token * columns_, norm_.out + token * columns_);
    kernels().quantize_int8(fp32(token), static_cast<int>(columns_), int8(token));
  }
  const float *fp32(int64_t token) const { return x_ + token * columns_; }
  Int8Vector int8(int64_t token) const {
    const int64_t at = token * groups_;
    int8_t *codes = codes_.data() + at * 2 * kGroup;
    int32_t *offsets = offsets_.data() + at * 2 * 8;
    return {codes, codes + groups_ * kGroup, scales_.data() + at, offsets, offsets + groups_ * 8};
  }
  int groups() const { return static_cast<int>(groups_); }
  int columns() const { return static_cast<int>(columns_); }

private:
  void normalize(const float *x, float *out) const {
    const float mean = kernels().dot(x, x, static_cast<int>(columns_)) / static_cast<float>(columns_);
    const float scale = 1.0f / std::sqrt(mean + norm_.epsilon);
    for (int64_t c = 0; c < columns_; ++c)
      out[c] = x[c] * scale * norm_.weight[c];
  }

  const float *raw_, *x_;
  int64_t columns_, groups_;
  Norm norm_;
  mutable Scratch<int8_t> codes_;
  mutable Scratch<float> scales_;
  mutable Scratch<int32_t> offsets_;
};

class FusedLinear {
public:
  static constexpr const char *kName = "FusedLinear";
  static constexpr int kInputs[] = {ort::kFloat, ort::kUndefined};
  static constexpr int kOutputs[] = {ort::kFloat};
  static constexpr bool kVariadic = true;

  explicit FusedLinear(const Attributes &a)
      : biases_(a.text("biases")), gate_(a.integer("gate") != 0),
        addends_(static_cast<size_t>(a.integer("addends"))), norm_(a.integer("norm") != 0),
        keep_(a.integer("keep") != 0), epsilon_(a.real("epsilon")) {
    const std::string activation = a.text("activation");
    activated_ = activation != "none";
    if (activated_)
      activation_ = parse_activation(activation);
    require(!biases_.empty() && biases_.find_first_not_of("01") == std::string::npos,
            "biases must have a 0 or 1 for each matrix");
    require(norm_ || !keep_, "keep needs norm");
    require(!activated_ || (biases_.size() > 1 && activation_ != Activation::kSwigluOai),
            "an activation needs gate and up");
  }

  void compute(const Call &call) {
    const Tensor x = call.input(0);
    std::call_once(once_, [&] { read_parts(call, x); });
    const int64_t columns = x.last(), tokens = x.rows();
    std::vector<float *> out = outputs(call, x);
    Norm norm;
    if (norm_) {
      thread_local std::vector<float> normalized;
      normalized.resize(keep_ ? 0 : static_cast<size_t>(tokens * columns));
      norm = {call.data<float>(1), epsilon_, keep_ ? out.back() : normalized.data()};
    }
    if (call.reads())
      foretell(call, *call.reads());
    Inputs inputs(x.as<float>(), tokens, columns, norm);
    if (tokens <= 8)
      for (int64_t t = 0; t < tokens; ++t)
        inputs.prepare(t);
    else
      call.parallel(static_cast<size_t>(tokens), [&](size_t t) { inputs.prepare(static_cast<int64_t>(t)); });
    run(call, {inputs, tokens, out, *this, call});
  }

private:
  static void require(bool ok, const std::string &what) {
    if (!ok)
      throw Error("FusedLinear: " + what);
  }

  // Weights are constants of the graph: their shapes are read once.
  void read_parts(const Call &call, const Tensor &x) {
    const int64_t columns = columns_ = x.last(), groups = (columns + kGroup - 1) / kGroup;
    size_t at = norm_ ? 2 : 1;
    const size_t count = call.input_count();
    require(!norm_ || (count > 1 && call.input(1).count() == columns), "norm_weight must be float [K]");
    for (const char biased : biases_) {
      require(at < count, "a matrix is missing");
      const Tensor w = call.input(at);
      Part part{at, w.type == ort::kFloat, biased == '1', 0, w.shape[0]};
      require(part.fp32 || w.type == ort::kUint8, "a matrix must be uint8 codes or float");
      const int64_t each = part.rows ? w.count() / part.rows : 0;
      part.bits = each == groups * kGroup ? 8 : 4;
      require(each == (part.fp32 ? columns : groups * kGroup * part.bits / 8), "x and a matrix do not fit");
      at = part.end();
      require(at <= count, "scales or a bias is missing");
      if (!part.fp32) {
        const Tensor scales = call.input(part.scales());
        require(scales.type == ort::kFloat16 && scales.count() == part.rows * groups,
                "scales must be float16 [N, ceil(K/64)]");
      }
      require(!part.biased || call.input(part.bias()).count() == part.rows, "a bias must be float [N]");
      parts_.push_back(part);
    }
    require(!activated_ || parts_[0].rows == parts_[1].rows, "gate and up must be of one size");
    extra_ = at;
    require(count == extra_ + (gate_ ? 1 : 0) + addends_, "wrong number of inputs");
  }

  std::vector<float *> outputs(const Call &call, const Tensor &x) const {
    std::vector<float *> out;
    int64_t shape[Tensor::kMaxRank];
    std::copy_n(x.shape, x.rank, shape);
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (activated_ && i == 1) {
        out.push_back(nullptr);
        continue;
      }
      shape[x.rank - 1] = parts_[i].rows;
      out.push_back(static_cast<float *>(call.output(i - (activated_ && i > 1), shape, x.rank)));
    }
    if (keep_)
      out.push_back(static_cast<float *>(call.output(parts_.size() - activated_, x.shape, x.rank)));
    return out;
  }

  // Stretches in the order of the tasks of run().
  void foretell(const Call &call, Forecast &reads) const {
    const auto groups = static_cast<size_t>((columns_ + kGroup - 1) / kGroup);
    reads.clear();
    uint32_t first = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part &p = parts_[i];
      const auto pieces = static_cast<uint32_t>(p.pieces()), at = activated_ && i == 1 ? 0 : first;
      const size_t rows = static_cast<size_t>(p.task_rows());
      if (!p.fp32) {
        reads.add(call.data<void>(p.weight), rows * groups * kGroup * p.bits / 8, at, pieces);
        reads.add(call.data<void>(p.scales()), rows * groups * 2, at, pieces);
      }
      first = at + pieces;
    }
    reads.set_pieces(first);
  }

  struct Task {
    size_t part;
    int64_t first, rows; // of the matrix
  };

  // Where the data of one call is; looked up once, because tasks are small.
  struct Data {
    struct Matrix {
      const void *weight;
      const uint16_t *scales;
      const float *bias;
    };
    const Inputs &inputs;
    int64_t tokens;
    const std::vector<float *> &out;
    std::vector<Matrix> matrices;
    const float *gate;
    std::vector<const float *> addends;

    Data(const Inputs &inputs, int64_t tokens, const std::vector<float *> &out, const FusedLinear &op,
         const Call &call)
        : inputs(inputs), tokens(tokens), out(out), gate(op.gate_ ? call.data<float>(op.extra_) : nullptr) {
      for (const Part &p : op.parts_)
        matrices.push_back({call.data<void>(p.weight), p.fp32 ? nullptr : call.data<uint16_t>(p.scales()),
                            p.biased ? call.data<float>(p.bias()) : nullptr});
      for (size_t i = 0; i < op.addends_; ++i)
        addends.push_back(call.data<float>(op.extra_ + (op.gate_ ? 1 : 0) + i));
    }
  };

  void run(const Call &call, const Data &data) const {
    std::vector<Task> tasks;
    for (size_t i = 0; i < parts_.size(); ++i)
      for (int64_t p = 0; !(activated_ && i == 1) && p < parts_[i].pieces(); ++p) {
        const int64_t first = p * parts_[i].task_rows();
        tasks.push_back({i, first, std::min(parts_[i].task_rows(), parts_[i].rows - first)});
      }
    const size_t blocks = static_cast<size_t>((data.tokens + kTokensPerTask - 1) / kTokensPerTask);
    call.parallel(tasks.size() * blocks, [&](size_t index) {
      const int64_t first = static_cast<int64_t>(index / tasks.size()) * kTokensPerTask;
      piece(data, tasks[index % tasks.size()], first, std::min(kTokensPerTask, data.tokens - first));
    });
  }

  // Columns [task.first, + task.rows) of an output, for some tokens.
  void piece(const Data &data, const Task &task, int64_t first, int64_t count) const {
    thread_local std::vector<float> y, up;
    multiply(data, task, first, count, y);
    const bool activate_it = activated_ && task.part == 0;
    if (activate_it)
      multiply(data, {1, task.first, task.rows}, first, count, up);
    const int64_t width = parts_[task.part].rows;
    for (int64_t t = 0; t < count; ++t) {
      float *row = y.data() + t * task.rows;
      if (activate_it)
        activate(activation_, row, up.data() + t * task.rows, static_cast<int>(task.rows), 1.0f, 0.0f, row);
      const int64_t at = (first + t) * width + task.first;
      if (task.part == 0)
        finish(data, first + t, at, task.rows, row);
      std::copy_n(row, task.rows, data.out[task.part] + at);
    }
  }

  void multiply(const Data &data, const Task &task, int64_t first, int64_t count,
                std::vector<float> &y) const {
    y.resize(static_cast<size_t>(count * task.rows));
    if (parts_[task.part].fp32)
      multiply_fp32(data, task, first, count, y.data());
    else
      multiply_codes(data, task, first, count, y.data());
    const float *bias = data.matrices[task.part].bias;
    for (int64_t t = 0; bias && t < count; ++t)
      for (int64_t r = 0; r < task.rows; ++r)
        y[t * task.rows + r] += bias[task.first + r];
  }

  static void multiply_fp32(const Data &data, const Task &task, int64_t first, int64_t count, float *y) {
    const int columns = data.inputs.columns();
    const float *weight = static_cast<const float *>(data.matrices[task.part].weight) + task.first * columns;
    for (int64_t r = 0; r < task.rows; ++r)
      for (int64_t t = 0; t < count; ++t)
        y[t * task.rows + r] = kernels().dot(data.inputs.fp32(first + t), weight + r * columns, columns);
  }

  void multiply_codes(const Data &data, const Task &task, int64_t first, int64_t count, float *y) const {
    const int bits = parts_[task.part].bits, groups = data.inputs.groups();
    const Data::Matrix &matrix = data.matrices[task.part];
    const auto *codes = static_cast<const uint8_t *>(matrix.weight) + task.first * groups * kGroup * bits / 8;
    const uint16_t *halves = matrix.scales + task.first * groups;
    thread_local std::vector<float> scales;
    scales.resize(static_cast<size_t>(task.rows * groups));
    for (size_t i = 0; i < scales.size(); i += 32) // the next task's, which are there while this one computes
      __builtin_prefetch(halves + scales.size() + i);
    kernels().from_half(halves, scales.data(), static_cast<int>(task.rows * groups));
    Int8Vector x[kTokensPerTask];
    for (int64_t t = 0; t < count; ++t)
      x[t] = data.inputs.int8(first + t);
    const auto product = bits == 4 ? kernels().dense4 : kernels().dense8;
    product({codes, scales.data(), groups}, static_cast<int>(task.rows), x, static_cast<int>(count), y,
            task.rows);
  }

  // The first output's gate and addends, for `rows` values of one token that start at `at`.
  static void finish(const Data &data, int64_t token, int64_t at, int64_t rows, float *y) {
    if (data.gate) {
      float gate;
      kernels().sigmoid(data.gate + token, 1.0f, &gate, 1);
      for (int64_t r = 0; r < rows; ++r)
        y[r] *= gate;
    }
    for (const float *addend : data.addends)
      for (int64_t r = 0; r < rows; ++r)
        y[r] += addend[at + r];
  }

  std::string biases_;
  bool gate_, activated_;
  size_t addends_;
  bool norm_, keep_;
  float epsilon_;
  Activation activation_ = Activation::kSilu;
  std::once_flag once_;
  std::vector<Part> parts_;
  size_t extra_ = 0;
  int64_t columns_ = 0;
};

} // namespace

const ort::CustomOp *fused_linear_op(int threads) {
  return Registration<FusedLinear>::table(threads);
}

} // namespace moec
