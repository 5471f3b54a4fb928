// The block manager: reference counts, prefix cache, LRU order, quarantine, random operations.
#include "engine/serve/cache/block_manager.h"

#include "engine/serve/scheduler.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

std::vector<BlockHash> chain_of(std::vector<int32_t> tokens) {
  std::vector<BlockHash> chain;
  extend_chain(tokens, 16, {}, &chain);
  return chain;
}

std::vector<int32_t> some_tokens(size_t count, int32_t first) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = first + static_cast<int32_t>(i);
  return tokens;
}

TEST(BlockHash, IsTheSameEverywhere) {
  // SHA-256 of 16 zero bytes and the tokens 0..15 as little-endian 32-bit words; computed with
  // an independent implementation.
  const auto chain = chain_of(some_tokens(16, 0));
  ASSERT_EQ(chain.size(), 1u);
  EXPECT_EQ(chain[0].low, 0xd4b9dcf57372f341u);
  EXPECT_EQ(chain[0].high, 0xed82d3201c54f817u);
}

TEST(BlockHash, TwoModelsShareNoHash) {
  // SHA-256 of 16 zero bytes and "model", by an independent implementation.
  EXPECT_EQ(model_root("model"), (BlockHash{0x41b765ff0f46359fu, 0xbb9b43e204f2f66du}));
  const std::vector<int32_t> tokens = some_tokens(48, 1);
  std::vector<BlockHash> one, other;
  extend_chain(tokens, 16, model_root("one"), &one);
  extend_chain(tokens, 16, model_root("other"), &other);
  for (const BlockHash& hash : one) {
    EXPECT_EQ(std::find(other.begin(), other.end(), hash), other.end());
  }
  // Begun in two goes it is the same.
  std::vector<BlockHash> grown;
  extend_chain(std::span(tokens).first(20), 16, model_root("one"), &grown);
  extend_chain(tokens, 16, model_root("one"), &grown);
  EXPECT_EQ(grown, one);
}

TEST(BlockHash, ChainsOverAllTokensBefore) {
  auto a = some_tokens(48, 1);
  auto b = a;
  b[3] = 99;  // differs in the first block only
  const auto x = chain_of(a);
  const auto y = chain_of(b);
  ASSERT_EQ(x.size(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(x[i] == y[i]) << i;
  a.resize(47);
  EXPECT_EQ(chain_of(a).size(), 2u);
}

TEST(BlockManager, AllocatesAllOrNothing) {
  BlockManager blocks(4);
  std::vector<uint32_t> table;
  EXPECT_TRUE(blocks.allocate(3, &table));
  EXPECT_FALSE(blocks.allocate(2, &table));
  EXPECT_EQ(table.size(), 3u);
  EXPECT_EQ(blocks.free_blocks(), 1u);
  blocks.release(table);
  EXPECT_EQ(blocks.free_blocks(), 4u);
  EXPECT_TRUE(blocks.check_integrity(0).ok());
}

TEST(BlockManager, FindsPublishedBlocksUntilTheyAreReused) {
  BlockManager blocks(4);
  const auto chain = chain_of(some_tokens(32, 1));
  std::vector<uint32_t> table;
  ASSERT_TRUE(blocks.allocate(2, &table));
  EXPECT_EQ(blocks.find(chain).blocks, 0u);
  blocks.publish(table[0], chain[0]);
  blocks.publish(table[1], chain[1]);
  EXPECT_EQ(blocks.find(chain).blocks, 2u);
  EXPECT_EQ(blocks.find(chain).free_blocks, 0u);
  blocks.release(table);
  EXPECT_EQ(blocks.find(chain).free_blocks, 2u);

  std::vector<uint32_t> again;
  blocks.acquire(chain, &again);
  EXPECT_EQ(again, table);
  EXPECT_EQ(blocks.free_blocks(), 2u);
  blocks.release(again);

  // Three of four blocks are handed out: the two never used, then the end of the sequence.
  std::vector<uint32_t> others;
  ASSERT_TRUE(blocks.allocate(3, &others));
  EXPECT_EQ(others[2], table[1]);
  EXPECT_EQ(blocks.find(chain).blocks, 1u);
  EXPECT_TRUE(blocks.check_integrity(3).ok());
}

// A sequence of as many blocks, computed, published and over.
std::vector<BlockHash> pass_through(BlockManager& blocks, size_t count, int32_t first) {
  const auto chain = chain_of(some_tokens(16 * count, first));
  std::vector<uint32_t> table;
  EXPECT_TRUE(blocks.allocate(count, &table));
  for (size_t i = 0; i < count; ++i) blocks.publish(table[i], chain[i]);
  blocks.release(table);
  return chain;
}

void find_again(BlockManager& blocks, const std::vector<BlockHash>& chain) {
  std::vector<uint32_t> table;
  blocks.acquire(chain, &table);
  EXPECT_EQ(table.size(), chain.size());
  blocks.release(table);
}

TEST(BlockManager, WhatPassesThroughDoesNotPushOutWhatWasFoundAgain) {
  BlockManager blocks(16);
  const auto shared = pass_through(blocks, 6, 1000);
  find_again(blocks, shared);
  for (int32_t i = 1; i <= 20; ++i) {
    const auto once = pass_through(blocks, 5, 10'000 * i);
    EXPECT_EQ(blocks.find(once).blocks, 5u);
    EXPECT_EQ(blocks.find(shared).blocks, 6u) << i;
    ASSERT_TRUE(blocks.check_integrity(0).ok()) << blocks.check_integrity(0);
  }
  // But where nothing else is left it is handed out, from its end.
  std::vector<uint32_t> all;
  ASSERT_TRUE(blocks.allocate(14, &all));
  EXPECT_EQ(blocks.find(shared).blocks, 2u);
  blocks.release(all);
}

TEST(BlockManager, WhatWasFoundOnceIsNotKeptForEver) {
  BlockManager blocks(16);  // 12 for what was found again
  const auto old = pass_through(blocks, 8, 1000);
  find_again(blocks, old);
  const auto young = pass_through(blocks, 8, 5000);
  find_again(blocks, young);
  // The four of the old ones that were used longest ago are the next to go: two new sequences have
  // room beside each other, and a third one takes the place of the first.
  const auto first = pass_through(blocks, 2, 20'000);
  const auto second = pass_through(blocks, 2, 30'000);
  EXPECT_EQ(blocks.find(young).blocks, 8u);
  EXPECT_EQ(blocks.find(old).blocks, 4u);
  EXPECT_EQ(blocks.find(first).blocks, 2u);
  pass_through(blocks, 2, 40'000);
  EXPECT_EQ(blocks.find(first).blocks, 0u);
  EXPECT_EQ(blocks.find(second).blocks, 2u);
  EXPECT_EQ(blocks.find(old).blocks, 4u);
  EXPECT_TRUE(blocks.check_integrity(0).ok());
}

TEST(BlockManager, ABlockThatIsHandedOutIsAsNew) {
  BlockManager blocks(4);
  find_again(blocks, pass_through(blocks, 1, 1000));
  std::vector<uint32_t> all;
  ASSERT_TRUE(blocks.allocate(4, &all));
  blocks.release(all);
  const auto once = pass_through(blocks, 4, 5000);
  const auto other = pass_through(blocks, 4, 9000);
  EXPECT_EQ(blocks.find(once).blocks, 0u);
  EXPECT_EQ(blocks.find(other).blocks, 4u);
}

TEST(BlockManager, QuarantineHoldsBlocks) {
  BlockManager blocks(2);
  std::vector<uint32_t> table, more;
  ASSERT_TRUE(blocks.allocate(2, &table));
  const uint64_t entry = blocks.quarantine(table);
  EXPECT_EQ(blocks.quarantined_blocks(), 2u);
  EXPECT_FALSE(blocks.allocate(1, &more));
  EXPECT_TRUE(blocks.check_integrity(0).ok());
  blocks.end_quarantine(entry);
  blocks.end_quarantine(entry);  // unknown by now: nothing happens
  EXPECT_EQ(blocks.free_blocks(), 2u);
  EXPECT_TRUE(blocks.check_integrity(0).ok());
}

TEST(BlockManager, IntegrityCheckNoticesALostReference) {
  BlockManager blocks(2);
  std::vector<uint32_t> table;
  ASSERT_TRUE(blocks.allocate(1, &table));
  EXPECT_TRUE(blocks.check_integrity(1).ok());
  EXPECT_FALSE(blocks.check_integrity(0).ok());
}

// Random sequences grow, share prefixes, end and go through quarantine, against a plain model.
TEST(BlockManager, SurvivesRandomOperations) {
  constexpr uint32_t kBlocks = 64;
  std::mt19937_64 random(1);
  const auto pick = [&](size_t n) { return static_cast<size_t>(random() % n); };
  BlockManager blocks(kBlocks);
  struct User {
    std::vector<int32_t> tokens;
    std::vector<BlockHash> chain;
    std::vector<uint32_t> table;
    size_t published = 0;
  };
  std::vector<User> users;
  std::vector<std::pair<uint64_t, std::vector<uint32_t>>> held;
  std::map<uint32_t, std::vector<int32_t>>
      content;  // tokens up to the block's end, where published

  constexpr int kOperations = 200000;
  for (int operation = 0; operation < kOperations; ++operation) {
    switch (pick(6)) {
      case 0: {  // a new sequence of one of a few families
        if (users.size() > 12) break;
        User user;
        user.tokens = some_tokens(16 * (1 + pick(6)), static_cast<int32_t>(1000 * pick(4)));
        if (pick(2) == 0) user.tokens.back() = static_cast<int32_t>(pick(50));
        extend_chain(user.tokens, 16, {}, &user.chain);
        const BlockManager::Match match = blocks.find(user.chain);
        if (match.free_blocks + user.chain.size() - match.blocks > blocks.free_blocks()) break;
        blocks.acquire(std::span(user.chain).first(match.blocks), &user.table);
        ASSERT_EQ(user.table.size(), match.blocks);
        for (size_t i = 0; i < match.blocks; ++i) {  // found by content, not by chance
          const std::vector<int32_t> prefix(user.tokens.begin(),
                                            user.tokens.begin() + static_cast<long>(16 * (i + 1)));
          ASSERT_EQ(content[user.table[i]], prefix);
        }
        user.published = match.blocks;
        ASSERT_TRUE(blocks.allocate(user.chain.size() - match.blocks, &user.table));
        users.push_back(std::move(user));
        break;
      }
      case 1: {  // the next block of a sequence is complete
        if (users.empty()) break;
        User& user = users[pick(users.size())];
        if (user.published == user.chain.size()) break;
        const size_t i = user.published++;
        if (blocks.find(std::span(user.chain).first(i + 1)).blocks <= i) {
          content[user.table[i]].assign(user.tokens.begin(),
                                        user.tokens.begin() + static_cast<long>(16 * (i + 1)));
        }
        blocks.publish(user.table[i], user.chain[i]);
        break;
      }
      case 2:
      case 3: {  // a sequence ends, sometimes with bytes still on their way into its blocks
        if (users.empty()) break;
        const size_t i = pick(users.size());
        if (pick(4) == 0) {
          held.emplace_back(blocks.quarantine(users[i].table), users[i].table);
        } else {
          blocks.release(users[i].table);
        }
        users.erase(users.begin() + static_cast<long>(i));
        break;
      }
      case 4: {
        if (held.empty()) break;
        const size_t i = pick(held.size());
        blocks.end_quarantine(held[i].first);
        held.erase(held.begin() + static_cast<long>(i));
        break;
      }
      default: {  // free blocks are overwritten by someone who keeps them for a moment
        std::vector<uint32_t> table;
        if (!blocks.allocate(pick(blocks.free_blocks() + 1), &table)) FAIL();
        for (uint32_t block : table) {
          content.erase(block);
          for (const User& user : users) {
            ASSERT_EQ(std::count(user.table.begin(), user.table.end(), block), 0);
          }
          for (const auto& [entry, list] : held) {
            ASSERT_EQ(std::count(list.begin(), list.end(), block), 0);
          }
        }
        blocks.release(table);
        break;
      }
    }
    if (operation % 1000 == 0) {
      uint64_t references = 0;
      for (const User& user : users) references += user.table.size();
      const absl::Status status = blocks.check_integrity(references);
      ASSERT_TRUE(status.ok()) << "operation " << operation << ": " << status;
    }
  }
}

}  // namespace
}  // namespace baton::engine::serve
