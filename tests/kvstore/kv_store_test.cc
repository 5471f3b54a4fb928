// A store and an engine's tiers over it: blocks come back as they were, or not at all.
#include "kvtransfer/store/kv_store.h"

#include "kvtransfer/store/store_client.h"
#include "kvtransfer/store/store_messages.h"
#include "kvtransfer/tiers/tier_store.h"
#include "tests/fails_with.h"
#include "tests/kvtiers/records.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/until.h"
#include "tests/usable_provider.h"
#include "transport/progress_thread.h"

namespace baton::kvtransfer::store {
namespace {

using std::chrono::seconds;
using tiers::key_of;
using tiers::TierFound;
using tiers::TierKey;
using tiers::TierStore;

using Cache = tiers::TestCache<64>;
constexpr uint32_t kLayers = tiers::kCacheLayers;
constexpr size_t kBytes = tiers::kCacheBytes;
const Time kLong = until_gives_up();  // for what must come

ClusterKey cluster_key() { return *ClusterKey::from_bytes("a key for the tests of stores"); }

// An engine, as far as its tiers are concerned.
struct Engine {
  Cache cache;
  std::unique_ptr<TierStore> tiers;

  explicit Engine(StoreClientOptions options, size_t host_bytes = 0, bool answers = true) {
    tiers = *TierStore::open({.cache = cache.view(),
                              .host_bytes = host_bytes,
                              .peer = store_client(std::move(options)),
                              .part_bytes = 2 * kBytes});
    if (answers) wait_until_up();
  }
  bool is_up() const { return tiers->explain().find("(up)") != std::string::npos; }
  void wait_until_up() {
    until([&] { return is_up(); }, [&] { tiers->wait(std::chrono::milliseconds(20), -1); },
          [&] { return tiers->explain(); });
  }
  void save(uint64_t number) { kvtransfer::tiers::save(*tiers, cache, number); }
  TierFound find(const std::vector<TierKey>& keys) {
    TierFound found;
    until([&] { return !(found = tiers->find(keys)).pending; },
          [&] { tiers->wait(seconds(1), -1); });
    return found;
  }
  absl::Status load(const std::vector<TierKey>& keys, Time timeout = kLong) {
    std::vector<uint32_t> blocks(keys.size());
    for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    std::ranges::fill(cache.memory, std::byte{0});
    return kvtransfer::tiers::outcome(*tiers, tiers->load(keys, blocks, timeout));
  }
};

class KvStoreTest : public OverEveryProvider<std::string> {
 protected:
  std::unique_ptr<KvStore> start(size_t bytes = 4 << 20, Time longest_lease = seconds(60)) {
    KvStoreOptions options;
    options.worker = {.name = "store", .providers = {GetParam()}, .key = cluster_key()};
    options.memory_bytes = bytes;
    options.longest_lease = longest_lease;
    return must(KvStore::start(std::move(options)));
  }
  StoreClientOptions client(const std::string& address) {
    return {.store = address,
            .providers = {GetParam()},
            .key = cluster_key(),
            .lookup_timeout = kNever,
            .load_timeout = kNever,
            .staging_bytes = 128 << 10};
  }
};

std::vector<TierKey> keys(uint64_t first, uint64_t end) {
  std::vector<TierKey> out;
  for (uint64_t i = first; i < end; ++i) out.push_back(key_of(i));
  return out;
}

// More than the staging memory holds at a time; one engine has some of them itself.
TEST_P(KvStoreTest, WhatOneEngineSavesAnotherLoads) {
  auto store = start();
  Engine one(client(store->address()));
  for (uint64_t i = 0; i < 50; ++i) one.save(i);
  EXPECT_EQ(store->stats().taken, 50u);
  for (size_t host_bytes : {0, 1 << 20}) {
    Engine two(client(store->address()), host_bytes);
    if (host_bytes > 0) two.save(0);
    const TierFound found = two.find(keys(0, 60));
    EXPECT_EQ(found.blocks, 50u);
    EXPECT_EQ(found.peer, host_bytes > 0 ? 49u : 50u);
    ASSERT_TRUE(two.load(keys(0, 50)).ok());
    for (uint32_t i = 0; i < 50; ++i) EXPECT_TRUE(two.cache.holds(i, i)) << i;
    EXPECT_EQ(two.tiers->stats().from_peer, found.peer);
  }
  EXPECT_EQ(store->stats().taken, 50u);  // what is there is not read again
}

TEST_P(KvStoreTest, WhatIsNotThereIsNotFound) {
  auto store = start();
  Engine engine(client(store->address()));
  engine.save(1);
  EXPECT_EQ(engine.find(keys(5, 9)).blocks, 0u);
  EXPECT_EQ(engine.find({key_of(1), key_of(7), key_of(1)}).blocks, 1u);
  EXPECT_FALSE(engine.load(keys(5, 9)).ok());
}

// A record that has left while the engine believes in its lease, and others in its place.
// Promise(tiers): An evicted, overwritten or damaged record of a store is a miss | sums are checked
//   after the read
TEST_P(KvStoreTest, ARecordThatWasEvictedIsAMiss) {
  auto store = start(4 * 40960, Time{});  // the store keeps no lease
  Engine engine(client(store->address()));
  engine.save(0);
  engine.save(1);
  ASSERT_EQ(engine.find(keys(0, 2)).blocks, 2u);
  for (uint64_t i = 10; i < 30; ++i) engine.save(i);
  ASSERT_GT(store->stats().arena.evicted, 10u);
  ASSERT_EQ(engine.find(keys(0, 2)).blocks, 2u);  // so it believes
  EXPECT_FALSE(engine.load(keys(0, 2)).ok());
  EXPECT_GT(engine.tiers->stats().corrupt, 0u);
}

TEST_P(KvStoreTest, WhatIsLeasedIsNotEvicted) {
  auto store = start(4 * 40960);
  Engine engine(client(store->address()));
  engine.save(0);
  engine.save(1);
  ASSERT_EQ(engine.find(keys(0, 2)).blocks, 2u);
  for (uint64_t i = 10; i < 30; ++i) engine.save(i);
  ASSERT_TRUE(engine.load(keys(0, 2)).ok());
  EXPECT_TRUE(engine.cache.holds(0, 0));
  EXPECT_TRUE(engine.cache.holds(1, 1));
}

// Memory goes bad without anybody's lock: the thread sanitizer is told nothing of it.
__attribute__((no_sanitize("thread"))) void go_bad(std::byte& byte) {
  auto* const raw = reinterpret_cast<volatile unsigned char*>(&byte);
  *raw = *raw ^ 16;
}

// Each byte of the store's memory in turn is another: the header's, and the parts'.
TEST_P(KvStoreTest, AFlippedByteIsAMiss) {
  auto store = start();
  Engine engine(client(store->address()));
  engine.save(3);
  const auto bytes = store->arena().find(key_of(3)).space->bytes();
  const size_t stride = 8192;
  for (size_t at : {size_t{0}, size_t{9}, size_t{60}, size_t{4096}, 4096 + 2 * kBytes - 1,
                    4096 + stride, 4096 + 2 * stride + 7}) {
    ASSERT_LT(at, bytes.size());
    go_bad(bytes[at]);
    ASSERT_EQ(engine.find(keys(3, 4)).blocks, 1u);
    EXPECT_FALSE(engine.load(keys(3, 4)).ok()) << at;
    go_bad(bytes[at]);
    Engine another(client(store->address()));
    ASSERT_EQ(another.find(keys(3, 4)).blocks, 1u);
    ASSERT_TRUE(another.load(keys(3, 4)).ok());
    EXPECT_TRUE(another.cache.holds(0, 3));
  }
}

TEST_P(KvStoreTest, AStoreThatIsAwayHasNothing) {
  auto store = start();
  Engine engine(client(store->address()));
  engine.save(1);
  store.reset();
  until([&] { return !engine.is_up(); },
        [&] { engine.tiers->wait(std::chrono::milliseconds(20), -1); });
  EXPECT_EQ(engine.find(keys(1, 2)).blocks, 0u);
  EXPECT_FALSE(engine.load(keys(1, 2)).ok());
}

// By the engine's clock, and only once: it is not asked again before it has spoken.
// Promise(tiers): A silent store costs one deadline, then nothing until it answers | the engine's
//   clock
TEST_P(KvStoreTest, AStoreThatFallsSilentHasNothing) {
  // It belongs to the cluster, and answers nothing.
  const auto mute =
      *Worker::create({.name = "mute", .providers = {GetParam()}, .key = cluster_key()});
  const ProgressThread progress(*mute);
  ManualClock clock;
  StoreClientOptions options = client(mute->address());
  options.clock = &clock;
  options.lookup_timeout = options.load_timeout = kLong;
  Engine engine(options, 0, false);
  // It says who it is, and nothing more.
  std::vector<std::byte> memory(1 << 20);
  const RemoteRegion region =
      *mute->remote_region(*mute->register_memory(memory.data(), memory.size()));
  Notification note;
  ASSERT_TRUE(mute->wait_until([&] { return mute->next_notification(note); }, kLong).ok());
  const auto hello = must(decode_store_message(note.payload));
  const auto say = [&](uint64_t id) {
    ASSERT_TRUE(mute->notify_detached(note.peer, encode(Found{.id = id, .region = region})).ok());
  };
  say(std::get<Lookup>(hello).id);
  engine.wait_until_up();
  EXPECT_TRUE(engine.tiers->find(keys(0, 3)).pending);
  clock.advance(kLong - seconds(1));
  EXPECT_TRUE(engine.tiers->find(keys(0, 3)).pending);
  clock.advance(seconds(2));
  EXPECT_FALSE(engine.tiers->find(keys(0, 3)).pending);
  EXPECT_FALSE(engine.is_up());
  EXPECT_FALSE(engine.tiers->find(keys(5, 9)).pending);
  EXPECT_EQ(engine.tiers->stats().silences, 1u);
  say(77);
  engine.wait_until_up();
  EXPECT_TRUE(engine.tiers->find(keys(5, 9)).pending);
}

TEST_P(KvStoreTest, RecordsThatAreNotWhatTheyAreSaidToBeAreNotKept) {
  auto store = start();
  auto worker = *Worker::create({.name = "liar", .providers = {GetParam()}, .key = cluster_key()});
  const tiers::TierShape shape{.parts = 2, .part_bytes = 5000};
  auto record = tiers::record_of(1, shape);
  auto region = *worker->register_memory(record->bytes().data(), record->bytes().size());
  const PeerId peer = *worker->connect(store->address());
  const auto offer = [&](const TierKey& key, size_t flip) {
    record->bytes()[flip] ^= std::byte{1};
    Offer message{.id = 1, .shape = shape, .key = key, .region = *worker->remote_region(region)};
    EXPECT_TRUE(worker->notify_detached(peer, encode(message)).ok());
    Notification note;
    EXPECT_TRUE(worker->wait_until([&] { return worker->next_notification(note); }, kLong).ok());
    const auto answer = decode_store_message(note.payload);
    record->bytes()[flip] ^= std::byte{1};
    return answer.ok() && std::holds_alternative<Taken>(*answer) ? std::get<Taken>(*answer).fate
                                                                 : Fate::kFull;
  };
  EXPECT_EQ(offer(key_of(1), 20), Fate::kBroken);
  EXPECT_EQ(offer(key_of(1), 4096 + 17), Fate::kBroken);
  EXPECT_EQ(offer(key_of(1), record->bytes().size() - 8192 + 3), Fate::kBroken);
  EXPECT_EQ(offer(key_of(2), record->bytes().size() - 1), Fate::kBroken);  // another's
  EXPECT_EQ(store->stats().arena.blocks, 0u);
  EXPECT_EQ(offer(key_of(1), record->bytes().size() - 1), Fate::kTaken);  // that fills a page up
  EXPECT_EQ(offer(key_of(1), 20), Fate::kHad);
  EXPECT_TRUE(worker->notify_detached(peer, "no message").ok());
  EXPECT_EQ(offer(key_of(1), 20), Fate::kHad);
  EXPECT_EQ(store->stats().rejected, 1u);
}

TEST(KvStore, AnAddressThatCannotBeOneIsRefusedAtTheStart) {
  std::vector<std::byte> memory(kLayers * kBytes);
  EXPECT_THAT(
      tiers::TierStore::open(
          {.cache = {.base = memory.data(), .layers = kLayers, .blocks = 1, .block_bytes = kBytes},
           .peer = store_client({.store = "nowhere", .key = cluster_key()})})
          .status(),
      fails_with(Code::kInvalidArgument, {"host:port"}));
}

INSTANTIATE_TEST_SUITE_P(Over, KvStoreTest, ::testing::Values("tcp", "shm"),
                         [](const auto& name) { return name.param; });

}  // namespace
}  // namespace baton::kvtransfer::store
