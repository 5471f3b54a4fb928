// The region table: what is refused, and how; RemoteRegion and RemoteCounter on the wire.
#include "transport/region.h"

#include "tests/test.h"
#include "transport/counter.h"

namespace baton {
namespace {

class Regions : public ::testing::Test {
 protected:
  WorkerUid uid_ = WorkerUid::random();
  RegionTable table_{uid_};
  std::byte memory_[100];
};

// Promise(memory): A worker holds 65,536 regions; the next registration fails with the limit and
//   the remedy | rows never move and are freed for reuse
TEST_F(Regions, SaysWhenFull) {
  MemoryRegion last;
  for (size_t i = 0; i < RegionTable::kCapacity; ++i) {
    const auto entry = table_.add(memory_, 1, Access::kLocal, {}).value();
    last = {.index = entry->index, .generation = entry->generation};
  }
  const absl::Status full = table_.add(memory_, 1, Access::kLocal, {}).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find(std::to_string(RegionTable::kCapacity)), std::string::npos) << full;
  EXPECT_NE(full.message().find("use a MemoryPool"), std::string::npos) << full;
  ASSERT_TRUE(table_.remove(last).ok());
  EXPECT_TRUE(table_.add(memory_, 1, Access::kLocal, {}).ok());
}

TEST(RemoteRegion, RoundTripsAndRefusesDamage) {
  const RemoteRegion region{.owner = WorkerUid::random(),
                            .key = 77,
                            .size = 1 << 30,
                            .index = 5,
                            .generation = 9,
                            .access = Access::kRemoteWrite};
  const std::string wire = region.encode();
  EXPECT_EQ(wire.size(), RemoteRegion::kEncodedBytes);
  auto back = RemoteRegion::decode(wire).value();
  EXPECT_EQ(back.owner, region.owner);
  EXPECT_EQ(back.key, 77u);
  EXPECT_EQ(back.access, Access::kRemoteWrite);
  for (size_t cut = 0; cut < wire.size(); ++cut) {
    EXPECT_FALSE(RemoteRegion::decode(wire.substr(0, cut)).ok());
  }
  EXPECT_FALSE(RemoteRegion::decode(wire + "x").ok());
}

TEST(RemoteCounter, RoundTripsAndRefusesDamage) {
  const RemoteCounter counter{WorkerUid::random(), 12, 3};
  const std::string wire = counter.encode();
  EXPECT_EQ(wire.size(), RemoteCounter::kEncodedBytes);
  auto back = RemoteCounter::decode(wire).value();
  EXPECT_EQ(back.index, 12u);
  EXPECT_EQ(back.generation, 3u);
  for (size_t cut = 0; cut < wire.size(); ++cut) {
    EXPECT_FALSE(RemoteCounter::decode(wire.substr(0, cut)).ok());
  }
}

// All but one are in use: that one is given out each time.
void use_all_but_one(CounterTable& table) {
  for (size_t i = 1; i < CounterTable::kCapacity; ++i) ASSERT_TRUE(table.allocate().ok());
}

TEST(CounterTable, AFreedWordRestsBehindOthers) {
  auto table = CounterTable::create(WorkerUid::random()).value();
  const CounterId first = *table.allocate();
  ASSERT_TRUE(table.free(first).ok());
  for (size_t i = 1; i <= CounterTable::kRest; ++i) {
    const CounterId next = *table.allocate();
    ASSERT_EQ(next.index, i);
    ASSERT_TRUE(table.free(next).ok());
  }
  for (size_t i = 0; i < 3 * CounterTable::kRest; ++i) {  // round and round, and no word more
    const CounterId next = *table.allocate();
    ASSERT_EQ(next.index, i % (CounterTable::kRest + 1));
    ASSERT_TRUE(table.free(next).ok());
  }
}

TEST(CounterTable, GenerationsWrapPastZero) {
  auto table = CounterTable::create(WorkerUid::random());
  use_all_but_one(*table);
  for (int i = 0; i < 70000; ++i) {
    auto id = table->allocate();
    ASSERT_NE(id->generation, 0);
    ASSERT_TRUE(table->add(id->index, id->generation, 1));
    ASSERT_EQ(table->value(*id), 1u);
    ASSERT_TRUE(table->free(*id).ok());
  }
}

// Generations come again after 32,767 uses of a word: of one in 16,384 allocations.
TEST(CounterTable, WordsAreGivenOutInTurns) {
  auto table = CounterTable::create(WorkerUid::random());
  const CounterId old = *table->allocate();
  ASSERT_TRUE(table->free(old).ok());
  for (int i = 0; i < 100'000; ++i) {
    const CounterId id = *table->allocate();
    ASSERT_FALSE(table->add(old.index, old.generation, 1)) << i;
    ASSERT_TRUE(table->free(id).ok());
  }
}

}  // namespace
}  // namespace baton
