// What the operator after this one will read: idle threads fetch it into their caches meanwhile.
//
// A graph runs its operators in the same order every time, so each remembers what came after it on its thread
// the last time. A wrong memory costs time only: fetching never faults, whatever the address.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace moec {

// Stretches of memory that an operator reads piece by piece. Threads may use it at the same time; what one
// reads while another writes may be a mixture.
class Forecast {
public:
  // `pieces` pieces of `bytes` each from `data` on, the first of them piece number `first` of its operator.
  struct Stretch {
    const char *data;
    size_t bytes;
    uint32_t first, pieces;
  };
  static constexpr size_t kMost = 8;

  void clear() { count_.store(0, std::memory_order_relaxed); }
  void add(const void *data, size_t bytes, uint32_t first, uint32_t pieces);
  void set_pieces(uint32_t pieces) { pieces_.store(pieces, std::memory_order_relaxed); }
  void copy_from(const Forecast &other);

  // Where a walk through the memory that a member will read stands.
  struct Walk {
    size_t stretch = 0, at = 0;
  };
  struct Lines {
    const char *data;
    size_t bytes;
  };
  // The next kilobyte, or the rest of a stretch, of what `member` of `members` will read; 0 bytes at the end.
  Lines lines(Walk &walk, size_t member, size_t members) const;

private:
  struct Entry {
    std::atomic<const char *> data{nullptr};
    std::atomic<size_t> bytes{0};
    std::atomic<uint32_t> first{0}, pieces{0};
  };
  Stretch stretch(size_t index) const;
  Entry entries_[kMost];
  std::atomic<size_t> count_{0};
  std::atomic<uint32_t> pieces_{0};
};

} // namespace moec
