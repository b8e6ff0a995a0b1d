// Mapped expert stores whose blobs are checked against their XXH64 the first time an op uses them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moec {

uint64_t xxh64(const void *data, size_t bytes);

// Throws Error when `base` (the first blob of a layer) is registered and blob `expert` does not match its
// hash.
void verify_expert(const void *base, int expert);

} // namespace moec

extern "C" {
// base: `count` blobs of blob_bytes; hashes: their XXH64 with seed 0 (copied). A second registration
// replaces.
void moec_store_register(const void *base, uint64_t blob_bytes, uint32_t count, const uint64_t *hashes,
                         uint32_t layer);
void moec_store_unregister(const void *base);
uint64_t moec_xxh64(const void *data, uint64_t bytes);
}
