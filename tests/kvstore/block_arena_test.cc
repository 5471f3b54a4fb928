// Room for blocks: what is handed out is nobody else's, and who leaves.
#include "kvtransfer/store/block_arena.h"
#include "tests/kvtiers/records.h"
#include "tests/test.h"

namespace baton::kvtransfer::store {
namespace {

using std::chrono::seconds;
using tiers::key_of;

class Arena : public ::testing::Test {
 protected:
  std::vector<std::byte> memory_ = std::vector<std::byte>(1000);
  BlockArena arena_{memory_, 100};

  bool put(uint64_t number, size_t bytes, Time now = {}) {
    BlockArena::SpacePtr space = arena_.take(bytes, now);
    if (space == nullptr) return false;
    arena_.publish(key_of(number), std::move(space), std::to_string(number));
    return true;
  }
};

TEST_F(Arena, TheLeastRecentlyUsedLeaves) {
  for (uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(put(i, 100));
  ASSERT_NE(arena_.find(key_of(0)).space, nullptr);
  ASSERT_TRUE(put(10, 150));  // in place of two
  EXPECT_TRUE(arena_.contains(key_of(0)));
  EXPECT_FALSE(arena_.contains(key_of(1)));
  EXPECT_FALSE(arena_.contains(key_of(2)));
  EXPECT_EQ(arena_.find(key_of(10)).tag(), "10");
  EXPECT_EQ(arena_.stats().evicted, 2u);
  EXPECT_EQ(arena_.stats().blocks, 9u);
}

TEST_F(Arena, WhatIsLeasedOrHeldStays) {
  for (uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(put(i, 100));
  const BlockArena::Found held = arena_.find(key_of(0));
  for (uint64_t i = 1; i < 10; ++i) arena_.find(key_of(i), seconds(5));
  EXPECT_FALSE(put(10, 100, seconds(4)));
  EXPECT_EQ(arena_.stats().refused, 1u);
  EXPECT_TRUE(put(10, 100, seconds(5)));
  EXPECT_TRUE(arena_.contains(key_of(0)));
  EXPECT_FALSE(arena_.contains(key_of(1)));
}

// Somebody still reads the older one: its space comes back when he lets go of it.
TEST_F(Arena, ABlockOfTheSameKeyTakesItsPlace) {
  ASSERT_TRUE(put(1, 300));
  BlockArena::Found older = arena_.find(key_of(1));
  ASSERT_TRUE(put(1, 300));
  EXPECT_NE(arena_.find(key_of(1)).space, older.space);
  EXPECT_EQ(arena_.stats().bytes, 600u);
  older = {};
  EXPECT_EQ(arena_.stats().bytes, 300u);
}

TEST_F(Arena, MoreThanThereIsIsRefused) {
  EXPECT_FALSE(put(1, 1001));
  EXPECT_FALSE(put(1, SIZE_MAX));
  EXPECT_TRUE(put(1, 1000));
  EXPECT_TRUE(put(2, 1));  // the whole of it leaves
  EXPECT_EQ(arena_.stats().bytes, 100u);
}

// Blocks of all sizes, some held for a while: no two share a byte, and nothing is lost.
TEST_F(Arena, SpacesNeverOverlap) {
  std::mt19937_64 random(5);
  std::vector<BlockArena::SpacePtr> held;
  std::vector<int> owners(memory_.size());
  for (int i = 0; i < 20000; ++i) {
    if (held.size() > 6 || (random() % 2 == 0 && !held.empty())) {
      const size_t which = random() % held.size();
      for (size_t at = 0; at < held[which]->bytes().size(); ++at) {
        --owners[held[which]->offset() + at];
      }
      std::swap(held[which], held.back());
      if (random() % 2 == 0) arena_.publish(key_of(random() % 20), held.back());
      held.pop_back();
      continue;
    }
    BlockArena::SpacePtr space = arena_.take(1 + random() % 400, {});
    if (space == nullptr) continue;
    for (size_t at = 0; at < space->bytes().size(); ++at) {
      ASSERT_EQ(++owners[space->offset() + at], 1);
    }
    held.push_back(std::move(space));
  }
  held.clear();
  for (uint64_t i = 0; i < 20; ++i) arena_.publish(key_of(i), nullptr);
  EXPECT_EQ(arena_.stats().bytes, 0u);
}

}  // namespace
}  // namespace baton::kvtransfer::store
