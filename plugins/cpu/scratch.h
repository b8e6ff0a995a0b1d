// Zeroed memory for the length of a call, kept by the thread for its next one: an operator runs every few us,
// and what exceeds malloc's small sizes is slow. Allocation took 5 % of the calling thread's time.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

namespace moec {

template <class T> class Scratch {
public:
  explicit Scratch(size_t count) {
    if (!kept().empty()) {
      memory_ = std::move(kept().back());
      kept().pop_back();
    }
    memory_.assign(count, T{});
  }
  ~Scratch() { kept().push_back(std::move(memory_)); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  T *data() { return memory_.data(); }

private:
  static std::vector<std::vector<T>> &kept() {
    thread_local std::vector<std::vector<T>> vectors;
    return vectors;
  }
  std::vector<T> memory_;
};

} // namespace moec
