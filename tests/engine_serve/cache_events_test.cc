// What a prefix cache tells of itself: the block manager's news, and their lines.
#include "engine/serve/cache/cache_events.h"

#include "absl/strings/str_replace.h"
#include "engine/serve/cache/block_manager.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

BlockHash hash_of(int i) { return chain_hash({}, absl::StrCat(i)); }

std::set<std::string> names(const std::vector<BlockHash>& hashes) {
  std::set<std::string> out;
  for (const BlockHash& hash : hashes) EXPECT_TRUE(out.insert(block_name(hash)).second);
  return out;
}

TEST(CacheEvents, LinesComeBack) {
  const CacheNews all{.snapshot = true, .changes = 7, .stored = {hash_of(1), hash_of(2)}};
  std::string line = cache_line(all, "a \"model\"\n");
  ASSERT_TRUE(line.ends_with("\n"));
  line.pop_back();
  EXPECT_EQ(line.find('\n'), std::string::npos);
  auto back = parse_cache_line(line);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(back->snapshot);
  EXPECT_EQ(back->changes, 7u);
  EXPECT_EQ(back->stored, all.stored);
  EXPECT_EQ(back->model, "a \"model\"\n");
  EXPECT_EQ(back->root, model_root("a \"model\"\n"));
  back = parse_cache_line(cache_line({.changes = 9, .removed = {hash_of(1)}, .stored = {}}, "m"));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_FALSE(back->snapshot);
  EXPECT_EQ(back->changes, 9u);
  EXPECT_EQ(back->removed, std::vector<BlockHash>{hash_of(1)});
  EXPECT_TRUE(back->stored.empty());
}

TEST(CacheEvents, NamesAreTheHashesBytes) {
  // As IsTheSameEverywhere of BlockHash has it, from its first byte to its last.
  const BlockHash hash{.low = 0xd4b9dcf57372f341u, .high = 0xed82d3201c54f817u};
  EXPECT_EQ(block_name(hash), "41f37273f5dcb9d417f8541c20d382ed");
  EXPECT_EQ(parse_block_name("41F37273f5dcb9d417f8541c20d382ed"), hash);
  for (const char* bad :
       {"", "41", "41f37273f5dcb9d417f8541c20d382eg", "41f37273f5dcb9d417f8541c20d382ed00",
        "0x41f37273f5dcb9d417f8541c20d382"}) {
    EXPECT_FALSE(parse_block_name(bad).has_value()) << bad;
  }
}

TEST(CacheEvents, BadLinesAreRefusedWithTheReason) {
  const std::string good =
      cache_line({.snapshot = true, .changes = 1, .stored = {hash_of(1)}}, "m");
  const std::string name = block_name(hash_of(1));
  const auto with = [&](const char* from, const char* to) {
    const std::string line = absl::StrReplaceAll(good, {{from, to}});
    EXPECT_NE(line, good) << from;
    return line;
  };
  const struct {
    std::string line;
    const char* reason;
  } cases[] = {
      {"", "JSON"},
      {"5", "changes"},
      {"[]", "changes"},
      {"{}", "changes"},
      {R"({"changes":-3,"blocks":[]})", "changes"},
      {R"({"changes":1})", "removed"},
      {R"({"changes":1,"removed":[]})", "stored"},
      {R"({"changes":1,"removed":[],"stored":[5]})", "stored"},
      {R"({"changes":1,"removed":["zz"],"stored":[]})", "removed"},
      {with("\"block_tokens\":16", "\"block_tokens\":32"), "32 tokens"},
      {with("\"block_tokens\":16", "\"block_tokens\":\"16\""), "block_tokens"},
      {with("\"root\":\"", "\"root\":\"zz"), "root"},
      {with("\"model\":\"m\"", "\"model\":5"), "model"},
      {with("\"root\"", "\"rood\""), "root"},
      {with(name.c_str(), "41"), "blocks"},
  };
  for (const auto& bad : cases) {
    const absl::Status status = parse_cache_line(bad.line).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.line;
    EXPECT_NE(status.message().find(bad.reason), absl::string_view::npos) << status;
  }
}

TEST(CacheEvents, NothingIsNotedWithoutAWatcher) {
  BlockManager blocks(2);
  std::vector<uint32_t> table;
  ASSERT_TRUE(blocks.allocate(2, &table));
  blocks.publish(table[0], hash_of(1));
  EXPECT_TRUE(blocks.news(false).stored.empty());
  blocks.watch(true);
  blocks.publish(table[1], hash_of(2));
  EXPECT_EQ(blocks.changes(), 2u);
  EXPECT_EQ(blocks.news(false).stored, std::vector<BlockHash>{hash_of(2)});
  EXPECT_TRUE(blocks.news(false).stored.empty());  // once
  EXPECT_EQ(names(blocks.news(true).stored), names({hash_of(1), hash_of(2)}));
}

TEST(CacheEvents, EventsReproduceTheCacheContents) {
  std::mt19937 random(1);
  BlockManager blocks(24);
  std::set<std::string> known;
  std::vector<std::vector<uint32_t>> tables;
  blocks.watch(true);
  uint64_t removed = 0;
  for (int round = 0; round < 2000; ++round) {
    // Some steps between two tellings, so that a block comes and goes within one.
    for (int step = 0; step < 1 + round % 4; ++step) {
      std::vector<uint32_t> table;
      if (random() % 2 == 0 && blocks.allocate(1 + random() % 6, &table)) {
        for (const uint32_t block : table) {
          blocks.publish(block, hash_of(static_cast<int>(random() % 60)));
        }
        tables.push_back(table);
      } else if (!tables.empty()) {
        std::swap(tables[random() % tables.size()], tables.back());
        blocks.release(tables.back());
        tables.pop_back();
      }
    }
    const CacheNews news = blocks.news(false);
    for (const std::string& name : names(news.removed)) known.erase(name);
    for (const std::string& name : names(news.stored)) known.insert(name);
    removed += news.removed.size();
    const CacheNews all = blocks.news(true);
    ASSERT_EQ(known, names(all.stored)) << round;
    ASSERT_EQ(all.changes, news.changes);
  }
  EXPECT_GT(removed, 100u);
}

}  // namespace
}  // namespace baton::engine::serve
