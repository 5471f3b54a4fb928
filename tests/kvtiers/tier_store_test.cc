// The store over a cache of its own: blocks go out and come back, or do not come at all.
#include "kvtransfer/tiers/tier_store.h"

#include "tests/captured_log.h"
#include "tests/kvtiers/records.h"
#include "tests/manual_clock.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::kvtransfer::tiers {
namespace {

using Cache = TestCache<8>;

// Two layers in each part, the last of them alone in its own.
TierStoreOptions options(Cache& cache) {
  return {.cache = cache.view(), .host_bytes = 1 << 20, .part_bytes = 2 * kCacheBytes};
}

TEST(TierStore, BlocksComeBackWhereverTheyGo) {
  const TemporaryFolder folder;
  for (bool disk : {false, true}) {
    Cache cache;
    TierStoreOptions wanted = options(cache);
    if (disk) {
      wanted.host_bytes = 0;
      wanted.disk = folder.path("kv");
      wanted.disk_bytes = 1 << 22;
    }
    auto store = *TierStore::open(wanted);
    for (uint64_t i = 0; i < 4; ++i) save(*store, cache, i);
    const std::vector<TierKey> keys = {key_of(3), key_of(0), key_of(2), key_of(9)};
    EXPECT_EQ(store->find(keys).blocks, 3u);
    std::ranges::fill(cache.memory, std::byte{0});
    const std::vector<uint32_t> blocks = {5, 1, 7};
    const TierLoadId load =
        store->load(std::span(keys).first(3), blocks, patient(std::chrono::seconds(60)));
    ASSERT_TRUE(outcome(*store, load).ok());
    EXPECT_TRUE(cache.holds(5, 3));
    EXPECT_TRUE(cache.holds(1, 0));
    EXPECT_TRUE(cache.holds(7, 2));
    EXPECT_EQ(store->stats().loaded, 3u);
  }
}

TEST(TierStore, ALoadOfWhatIsNotHereFails) {
  Cache cache;
  auto store = *TierStore::open(options(cache));
  const TierKey key = key_of(1);
  const uint32_t block = 2;
  const TierLoadId load = store->load({&key, 1}, {&block, 1}, patient(std::chrono::seconds(60)));
  EXPECT_EQ(outcome(*store, load).code(), absl::StatusCode::kNotFound);
}

// Its deadline is by the clock that the store was given.
// Promise(tiers): A load that does not come has a deadline | blocks stay in quarantine until
//   nothing writes to them
TEST(TierStore, ALoadThatDoesNotComeHasADeadline) {
  Cache cache;
  ManualClock clock;
  TierStoreOptions wanted = options(cache);
  wanted.clock = &clock;
  wanted.host_bytes = 0;
  auto store = *TierStore::open(wanted);  // no tier, and so nobody who answers
  const TierKey key = key_of(1);
  const uint32_t block = 2;
  const TierLoadId load = store->load({&key, 1}, {&block, 1}, std::chrono::seconds(5));
  EXPECT_TRUE(store->load_status(load).ok());
  clock.advance(std::chrono::seconds(6));
  EXPECT_EQ(store->load_status(load).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(store->end_load(load));
}

TEST(TierStore, ATierThatCannotBeOpenedIsALineOfTheLog) {
  const CapturedLog log(base::LogLevel::kWarning);
  Cache cache;
  TierStoreOptions wanted = options(cache);
  wanted.host_bytes = 0;
  wanted.disk = "/proc/no/such/place";
  wanted.disk_bytes = 1 << 20;
  auto store = *TierStore::open(wanted);
  EXPECT_FALSE(store->is_on());
  EXPECT_EQ(log.lines.size(), 1u);
  const TierSave save{key_of(1), 0};
  EXPECT_EQ(store->save({&save, 1}), 0u);
}

TEST(TierStore, WhatIsThereAlreadyIsNotCopiedAgain) {
  Cache cache;
  auto store = *TierStore::open(options(cache));
  save(*store, cache, 1);
  const TierSave again{key_of(1), 3};
  EXPECT_EQ(store->save({&again, 1}), 1u);
  EXPECT_EQ(store->unpinned(), std::vector<uint32_t>{3});
  EXPECT_EQ(store->stats().saved, 1u);
}

}  // namespace
}  // namespace baton::kvtransfer::tiers
