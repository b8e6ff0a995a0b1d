#include "forecast.h"
#include <algorithm>

namespace moec {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr size_t kStep = 1024; // between two looks for work

} // namespace

void Forecast::add(const void *data, size_t bytes, uint32_t first, uint32_t pieces) {
  const size_t at = count_.load(kRelaxed);
  if (at == kMost)
    return;
  Entry &e = entries_[at];
  e.data.store(static_cast<const char *>(data), kRelaxed);
  e.bytes.store(bytes, kRelaxed);
  e.first.store(first, kRelaxed);
  e.pieces.store(pieces, kRelaxed);
  count_.store(at + 1, kRelaxed);
}

Forecast::Stretch Forecast::stretch(size_t index) const {
  const Entry &e = entries_[index];
  return {e.data.load(kRelaxed), e.bytes.load(kRelaxed), e.first.load(kRelaxed), e.pieces.load(kRelaxed)};
}

void Forecast::copy_from(const Forecast &other) {
  clear();
  for (size_t i = 0; i < other.count_.load(kRelaxed); ++i) {
    const Stretch s = other.stretch(i);
    add(s.data, s.bytes, s.first, s.pieces);
  }
  pieces_.store(other.pieces_.load(kRelaxed), kRelaxed);
}

Forecast::Lines Forecast::lines(Walk &walk, size_t member, size_t members) const {
  const size_t pieces = pieces_.load(kRelaxed);
  const size_t begin = member * pieces / members, end = (member + 1) * pieces / members;
  for (; walk.stretch < std::min(count_.load(kRelaxed), kMost); ++walk.stretch, walk.at = 0) {
    const Stretch s = stretch(walk.stretch);
    const size_t from = std::max<size_t>(begin, s.first), to = std::min<size_t>(end, s.first + s.pieces);
    const size_t size = from < to ? (to - from) * s.bytes : 0;
    if (walk.at >= size)
      continue;
    const size_t at = walk.at;
    walk.at = std::min(size, at + kStep);
    return {s.data + (from - s.first) * s.bytes + at, walk.at - at};
  }
  return {nullptr, 0};
}

} // namespace moec
