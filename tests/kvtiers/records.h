// Records and caches with content that follows from a number, for the tests of tiers.
#pragma once

#include "kvtransfer/tiers/tier_record.h"
#include "kvtransfer/tiers/tier_store.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/base/splitmix.h"

namespace baton::kvtransfer::tiers {

inline TierKey key_of(uint64_t number) {
  static const TierKeys keys({.weights = "w", .dtype = "bf16"});
  return keys.key(std::to_string(number));
}

inline std::byte content(uint64_t number, size_t at) {
  return static_cast<std::byte>(base::splitmix(number * 1000003 + at));
}

inline std::shared_ptr<TierRecord> record_of(uint64_t number, const TierShape& shape) {
  std::shared_ptr<TierRecord> record = TierRecord::make(shape);
  for (uint32_t part = 0; part < shape.parts; ++part) {
    for (size_t i = 0; i < shape.part_bytes; ++i) {
      record->part(part)[i] = content(number, part * shape.part_bytes + i);
    }
  }
  record->seal(key_of(number), number + 1);
  return record;
}

inline constexpr uint32_t kCacheLayers = 5;
inline constexpr size_t kCacheBytes = 3000;  // of a block, in a layer

template <uint32_t kBlocks>
struct TestCache {
  std::vector<std::byte> memory = std::vector<std::byte>(kCacheLayers * kBlocks * kCacheBytes);
  TierCache view() { return {memory.data(), kCacheLayers, kBlocks, kCacheBytes}; }
  void fill(uint32_t block, uint64_t number) {
    for (size_t i = 0; i < kCacheLayers * kCacheBytes; ++i) at(block, i) = content(number, i);
  }
  bool holds(uint32_t block, uint64_t number) {
    for (size_t i = 0; i < kCacheLayers * kCacheBytes; ++i) {
      if (at(block, i) != content(number, i)) return false;
    }
    return true;
  }

 private:
  std::byte& at(uint32_t block, size_t i) {
    return view().at(static_cast<uint32_t>(i / kCacheBytes), block)[i % kCacheBytes];
  }
};

// Until nothing of block 0 is read any more, and all tiers have it.
template <uint32_t kBlocks>
void save(TierStore& store, TestCache<kBlocks>& cache, uint64_t number) {
  cache.fill(0, number);
  const TierSave save{key_of(number), 0};
  ASSERT_EQ(store.save(std::span(&save, 1)), 1u);
  until([&] { return store.unpinned(), !store.has_pinned(); },
        [&] { store.wait(std::chrono::seconds(1), -1); });
  store.flush();
}

// Waits for the load's end, and says how it was.
inline absl::Status outcome(TierStore& store, TierLoadId id) {
  until([&] { return store.layers_loaded(id) == kCacheLayers || !store.load_status(id).ok(); },
        [&] { store.wait(std::chrono::milliseconds(10), -1); });
  const absl::Status status = store.load_status(id);
  until([&] { return store.end_load(id); }, [&] { store.wait(std::chrono::milliseconds(1), -1); });
  return status;
}

}  // namespace baton::kvtransfer::tiers
