// Which blocks of another engine are named, and which are left out.
#include "engine/kv_events/token_index.h"
#include "tests/test.h"

namespace baton::engine::kv_events {
namespace {

using serve::BlockHash;

std::vector<int32_t> tokens(int first, size_t count) {
  std::vector<int32_t> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = first + static_cast<int>(i);
  return out;
}

// As the router names a prompt's blocks.
std::vector<BlockHash> names(const std::vector<int32_t>& prompt, int block_size) {
  std::vector<BlockHash> chain;
  serve::extend_chain(prompt, block_size, tokens_root(), &chain);
  return chain;
}

BlockStored stored(std::vector<SentHash> hashes, std::optional<SentHash> parent,
                   std::vector<int32_t> of, int block_size = 16) {
  return {.hashes = std::move(hashes),
          .parent = std::move(parent),
          .tokens = std::move(of),
          .block_size = block_size,
          .medium = "GPU"};
}

std::set<std::string> as_set(const std::vector<BlockHash>& hashes) {
  std::set<std::string> out;
  for (const BlockHash& hash : hashes) out.insert(serve::block_name(hash));
  return out;
}

// All that it has, which ends what it had to tell.
std::set<std::string> all(TokenIndex* index) {
  index->apply({.events = {}});
  const serve::CacheNews news = index->news();
  EXPECT_TRUE(news.snapshot);
  return as_set(news.stored);
}

TEST(TokenIndex, NamesBlocksAsAPromptsTokensDo) {
  TokenIndex index;
  index.apply({.events = {stored({"h1", "h2"}, std::nullopt, tokens(0, 32)),
                          stored({"h3"}, "h2", tokens(32, 16))}});
  const serve::CacheNews news = index.news();
  EXPECT_TRUE(news.snapshot);
  EXPECT_FALSE(news.names_a_model);
  EXPECT_EQ(news.block_tokens, 16);
  EXPECT_EQ(as_set(news.stored), as_set(names(tokens(0, 48), 16)));
  // Behind it, changes.
  index.apply({.events = {BlockRemoved{.hashes = {"h2", "unknown"}, .medium = "GPU"},
                          stored({"h4"}, "h1", tokens(100, 16))}});
  const serve::CacheNews changes = index.news();
  EXPECT_FALSE(changes.snapshot);
  EXPECT_EQ(as_set(changes.removed), as_set({names(tokens(0, 32), 16)[1]}));
  std::vector<int32_t> other = tokens(0, 16);
  for (const int32_t token : tokens(100, 16)) other.push_back(token);
  EXPECT_EQ(as_set(changes.stored), as_set({names(other, 16)[1]}));
  EXPECT_GT(changes.changes, news.changes);
  EXPECT_FALSE(index.has_news());
  index.apply({.events = {AllBlocksCleared()}});
  EXPECT_EQ(all(&index).size(), 0u);
}

TEST(TokenIndex, ABlockBehindAnUnknownOneIsLeftOut) {
  TokenIndex index;
  index.apply({.events = {stored({"h2", "h3"}, "h1", tokens(0, 32))}});
  EXPECT_EQ(index.blocks(), 0u);
  EXPECT_EQ(index.left_out(), 2u);
  // It is known once it is told of behind one that is.
  index.apply({.events = {stored({"h1", "h2"}, std::nullopt, tokens(0, 32))}});
  EXPECT_EQ(index.blocks(), 2u);
}

TEST(TokenIndex, WhatDependsOnMoreThanTokensIsLeftOut) {
  TokenIndex index;
  BlockStored salted = stored({"s1", "s2"}, std::nullopt, tokens(0, 32));
  salted.plain = {false, true};  // a salt is said of the first block, and all behind it hang on it
  BlockStored picture = stored({"p1", "p2", "p3"}, std::nullopt, tokens(0, 48));
  picture.plain = {true, false, true};
  index.apply({.events = {salted, stored({"s3"}, "s2", tokens(32, 16)), picture}});
  EXPECT_EQ(all(&index), as_set(names(tokens(0, 16), 16)));
  EXPECT_EQ(index.left_out(), 5u);
}

TEST(TokenIndex, BlocksMayHaveAnySize) {
  TokenIndex index;
  // Half a block first, as of a block that is not full yet.
  index.apply({.events = {stored({"half"}, std::nullopt, tokens(0, 8), 8),
                          stored({"h1", "h2"}, std::nullopt, tokens(0, 256), 128),
                          stored({"half2"}, "h2", tokens(256, 16), 16)}});
  const serve::CacheNews news = index.news();
  EXPECT_TRUE(news.snapshot);
  EXPECT_EQ(news.block_tokens, 128);
  EXPECT_EQ(as_set(news.stored), as_set(names(tokens(0, 256), 128)));
}

TEST(TokenIndex, ABlockIsThereAsLongAsOneMediumHasIt) {
  TokenIndex index;
  // What is copied to host memory may be told of without tokens.
  BlockStored copy{.hashes = {"h1", "other"}, .block_size = 0, .medium = "CPU", .ownership = "a"};
  index.apply({.events = {stored({"h1"}, std::nullopt, tokens(0, 16)), copy,
                          BlockRemoved{.hashes = {"h1"}, .medium = "GPU"}}});
  EXPECT_EQ(index.blocks(), 1u);
  index.apply({.events = {BlockRemoved{.hashes = {"h1"}, .medium = "CPU", .ownership = "b"}}});
  EXPECT_EQ(index.blocks(), 1u);
  index.apply({.events = {BlockRemoved{.hashes = {"h1"}, .medium = "CPU", .ownership = "a"}}});
  EXPECT_EQ(index.blocks(), 0u);
  EXPECT_EQ(index.block_tokens(), 16);
}

TEST(TokenIndex, OneGroupWithFullAttentionCounts) {
  TokenIndex index;
  BlockStored full = stored({"h1"}, std::nullopt, tokens(0, 16));
  full.group = 1;
  full.group_kind = "full_attention";
  BlockStored window = stored({"w1"}, std::nullopt, tokens(100, 16));
  window.group = 0;
  window.group_kind = "sliding_window";
  BlockStored second = stored({"f2"}, std::nullopt, tokens(200, 16));
  second.group = 2;
  second.group_kind = "full_attention";
  BlockStored remote = stored({"r1"}, std::nullopt, tokens(300, 16));
  remote.remote = true;
  index.apply({.events = {window, full, second, remote,
                          BlockRemoved{.hashes = {"h1"}, .medium = "GPU", .group = 0}}});
  EXPECT_EQ(index.blocks(), 1u);
  index.apply({.events = {BlockRemoved{.hashes = {"h1"}, .medium = "GPU", .group = 1}}});
  EXPECT_EQ(index.blocks(), 0u);
}

// vLLM may compute a block twice, and forgets the copies one by one: the first counts.
TEST(TokenIndex, TheRemovalOfOneOfTwoCopiesCounts) {
  TokenIndex index;
  index.apply({.events = {stored({"h1"}, std::nullopt, tokens(0, 16)),
                          stored({"h1"}, std::nullopt, tokens(0, 16)),
                          BlockRemoved{.hashes = {"h1"}, .medium = "GPU"}}});
  EXPECT_EQ(index.blocks(), 0u);
}

TEST(TokenIndex, TooManyBlocksAreNotKept) {
  TokenIndex index(2);
  index.apply({.events = {stored({"h1", "h2"}, std::nullopt, tokens(0, 32))}});
  EXPECT_EQ(index.blocks(), 2u);
  index.apply({.events = {stored({"h3"}, "h2", tokens(32, 16))}});
  EXPECT_EQ(index.blocks(), 0u);
  EXPECT_TRUE(index.news().snapshot);
}

}  // namespace
}  // namespace baton::engine::kv_events
