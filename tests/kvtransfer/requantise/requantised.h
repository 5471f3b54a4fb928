// Pairs of caches that differ in all that a plan which requantises allows, and what the target has
// to be, byte for byte, by the definition.
#pragma once

#include "kvtransfer/kv_requantise.h"
#include "tests/kvtransfer/requantise/fp8_layout.h"
#include "tests/test.h"

namespace baton::kvtransfer {

using CacheBytes = std::vector<std::vector<std::byte>>;  // of each buffer

// Which blocks hold the sequence on either side, and what of it moves.
struct RequantisedBlocks {
  KvShare share;
  std::vector<int64_t> from, to;
  KvTokens tokens;
  KvTokens layers;  // by the model's numbers
};

struct RequantisedPair {
  KvLayout source, target;
  RequantisedBlocks blocks;
};

// What the target has to be, of what it was: its bytes after run(), which kv_requantise_test holds
// against the definition.
inline CacheBytes requantised(const KvLayout& source, const CacheBytes& source_bytes,
                              const KvLayout& target, CacheBytes target_bytes,
                              const RequantisedBlocks& of) {
  std::vector<const std::byte*> from;
  for (const auto& buffer : source_bytes) from.push_back(buffer.data());
  std::vector<std::byte*> to;
  for (auto& buffer : target_bytes) to.push_back(buffer.data());
  const auto plan = KvRequantisePlan::make(source, target, of.share);
  EXPECT_TRUE(plan.ok()) << plan.status();
  const std::vector<uint32_t> read(of.from.begin(), of.from.end());
  const std::vector<uint32_t> written(of.to.begin(), of.to.end());
  for (size_t p = 0; p < plan->parts().size(); ++p) {
    const KvPart& part = plan->parts()[p];
    const KvTokens whole{of.tokens.begin / part.unit * part.unit,
                         (of.tokens.end + part.unit - 1) / part.unit * part.unit};
    for (uint64_t i = 0; i < part.layers.size(); ++i) {
      if (part.layers[i].layer < of.layers.begin || part.layers[i].layer >= of.layers.end) continue;
      const KvTokens one{i, i + 1};
      const absl::Status status = plan->run(p, whole, {0, read}, {0, written}, from, to, one);
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  return target_bytes;
}

inline std::vector<int64_t> some_blocks(std::mt19937& random, uint32_t of, uint32_t count) {
  std::vector<int64_t> all(of);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

// Tensor-parallel degrees, block sizes, orders, element types and scales by chance.
inline RequantisedPair random_pair(uint32_t seed) {
  std::mt19937 random(seed);
  const auto one_of = [&](std::initializer_list<uint32_t> list) {
    return list.begin()[random() % list.size()];
  };
  KvShape shape{.layers = 1 + static_cast<uint32_t>(random() % 4),
                .block_tokens = one_of({1, 4, 8, 12, 16, 32}),
                .total_heads = one_of({1, 2, 4, 6}),
                .head_size = 24,
                .dtype = seed % 5 == 4 ? KvDtype::kFloat32 : KvDtype::kBfloat16};
  const uint32_t tokens = 1 + static_cast<uint32_t>(random() % 200);
  const auto shard = [&](KvShape of, uint32_t ranks, uint32_t rank) {
    const KvHeads heads = shard_heads(of.total_heads, ranks, rank);
    of.first_head = heads.first;
    of.heads = heads.end - heads.first;
    of.blocks = (tokens - 1) / of.block_tokens + 1 + static_cast<uint32_t>(random() % 4);
    return of;
  };
  KvShape there = shape;
  there.block_tokens = one_of({1, 4, 8, 12, 16, 32});
  const uint32_t ranks = one_of({1, 2, 3});
  RequantisedPair pair;
  RequantisedBlocks& blocks = pair.blocks;
  blocks.share = {ranks, static_cast<uint32_t>(random() % ranks), seed};
  const uint32_t target_ranks = one_of({1, 2});
  const KvShape mine = shard(shape, blocks.share.ranks, blocks.share.rank);
  const KvShape theirs =
      shard(there, target_ranks, static_cast<uint32_t>(random() % 2) % target_ranks);
  pair.source = seed % 3 == 0
                    ? KvLayout::transposed_keys(mine)
                    : KvLayout::paged(mine, static_cast<KvLayout::Order>(random() % 2),
                                      static_cast<KvLayout::Pair>(random() % 4), random() % 2 == 0);
  pair.target =
      fp8_layout(theirs, static_cast<KvLayout::Order>(random() % 2), one_of({1, 2, 3, 24}));
  blocks.from = some_blocks(random, mine.blocks, (tokens - 1) / mine.block_tokens + 1);
  blocks.to = some_blocks(random, theirs.blocks, (tokens - 1) / theirs.block_tokens + 1);
  blocks.tokens = {random() % 3 == 0 ? random() % tokens : 0, tokens};
  blocks.layers = {random() % 3 == 0 ? random() % 2 : 0, random() % 3 == 0 ? 2u : 100u};
  return pair;
}

}  // namespace baton::kvtransfer
