#include "expert_store.h"
#include "op_base.h"
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace moec {
namespace {

// XXH64 as specified at https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
constexpr uint64_t kP1 = 0x9E3779B185EBCA87, kP2 = 0xC2B2AE3D27D4EB4F, kP3 = 0x165667B19E3779F9,
                   kP4 = 0x85EBCA77C2B2AE63, kP5 = 0x27D4EB2F165667C5;

uint64_t rotate(uint64_t x, int n) {
  return x << n | x >> (64 - n);
}

template <class T> T read(const uint8_t *p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

uint64_t lane_round(uint64_t acc, uint64_t lane) {
  return rotate(acc + lane * kP2, 31) * kP1;
}

uint64_t merge(uint64_t acc, uint64_t lane) {
  return (acc ^ lane_round(0, lane)) * kP1 + kP4;
}

uint64_t stripes(const uint8_t *&p, const uint8_t *end) {
  uint64_t a = kP1 + kP2, b = kP2, c = 0, d = 0 - kP1;
  for (; end - p >= 32; p += 32) {
    a = lane_round(a, read<uint64_t>(p));
    b = lane_round(b, read<uint64_t>(p + 8));
    c = lane_round(c, read<uint64_t>(p + 16));
    d = lane_round(d, read<uint64_t>(p + 24));
  }
  const uint64_t acc = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
  return merge(merge(merge(merge(acc, a), b), c), d);
}

struct Store {
  uint64_t blob_bytes;
  uint32_t layer;
  std::vector<uint64_t> hashes;
  std::vector<std::atomic<bool>> verified;
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const void *, std::shared_ptr<Store>> stores;
};

Registry &registry() {
  static Registry *r = new Registry; // never destroyed: sessions may outlive static destructors
  return *r;
}

std::shared_ptr<Store> find(const void *base) {
  std::shared_lock<std::shared_mutex> lock(registry().mutex);
  const auto it = registry().stores.find(base);
  return it == registry().stores.end() ? nullptr : it->second;
}

} // namespace

uint64_t xxh64(const void *data, size_t bytes) {
  const auto *p = static_cast<const uint8_t *>(data), *end = p + bytes;
  uint64_t acc = (bytes >= 32 ? stripes(p, end) : kP5) + bytes;
  for (; end - p >= 8; p += 8)
    acc = rotate(acc ^ lane_round(0, read<uint64_t>(p)), 27) * kP1 + kP4;
  for (; end - p >= 4; p += 4)
    acc = rotate(acc ^ read<uint32_t>(p) * kP1, 23) * kP2 + kP3;
  for (; p < end; ++p)
    acc = rotate(acc ^ *p * kP5, 11) * kP1;
  acc = (acc ^ acc >> 33) * kP2;
  acc = (acc ^ acc >> 29) * kP3;
  return acc ^ acc >> 32;
}

void verify_expert(const void *base, int expert) {
  const std::shared_ptr<Store> store = find(base);
  const size_t index = static_cast<size_t>(expert);
  if (!store || index >= store->hashes.size() || store->verified[index].load(std::memory_order_relaxed))
    return;
  const char *blob = static_cast<const char *>(base) + index * store->blob_bytes;
  if (xxh64(blob, store->blob_bytes) != store->hashes[index])
    throw Error("experts.moex: layer " + std::to_string(store->layer) + " expert " + std::to_string(expert) +
                ": checksum mismatch");
  store->verified[index].store(true, std::memory_order_relaxed);
}

} // namespace moec

#define MOEC_EXPORT extern "C" __attribute__((visibility("default")))

MOEC_EXPORT void moec_store_register(const void *base, uint64_t blob_bytes, uint32_t count,
                                     const uint64_t *hashes, uint32_t layer) {
  std::shared_ptr<moec::Store> store(new moec::Store{blob_bytes, layer,
                                                     std::vector<uint64_t>(hashes, hashes + count),
                                                     std::vector<std::atomic<bool>>(count)});
  std::unique_lock<std::shared_mutex> lock(moec::registry().mutex);
  moec::registry().stores[base] = std::move(store);
}

MOEC_EXPORT void moec_store_unregister(const void *base) {
  std::unique_lock<std::shared_mutex> lock(moec::registry().mutex);
  moec::registry().stores.erase(base);
}

MOEC_EXPORT uint64_t moec_xxh64(const void *data, uint64_t bytes) {
  return moec::xxh64(data, bytes);
}
