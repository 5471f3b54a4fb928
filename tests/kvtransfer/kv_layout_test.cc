// KV layouts and plans: what a plan moves is compared with a walk over every head of every block.
#include "kvtransfer/kv_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

KvLayout small() { return KvLayout::dense(3, 10, 16, 4, 96, "test"); }

TEST(KvLayout, DenseIsDense) {
  const KvLayout layout = small();
  EXPECT_TRUE(layout.check().ok());
  EXPECT_EQ(layout.bytes(), 3u * 10 * 4 * 96);
  EXPECT_EQ(layout.blocks_for(0), 0u);
  EXPECT_EQ(layout.blocks_for(16), 1u);
  EXPECT_EQ(layout.blocks_for(17), 2u);
}

TEST(KvLayout, RefusesNonsense) {
  const auto broken = [](auto change) {
    KvLayout layout = small();
    change(layout);
    return layout.check();
  };
  EXPECT_FALSE(KvLayout().check().ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.heads = 0; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.first_head = 1; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.first_head = UINT32_MAX; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.head_stride = 95; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.block_stride -= 1; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.layer_stride = 0; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.layer_stride = UINT64_MAX / 2; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.layers = KvLayout::kMaxLayers + 1; }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.format = std::string(200, 'x'); }).ok());
  EXPECT_FALSE(broken([](KvLayout& l) { l.model = std::string(200, 'x'); }).ok());
  // Blocks outside, layers inside: the layout of a cache with all layers of a block together.
  EXPECT_TRUE(broken([](KvLayout& l) {
                l.layer_stride = l.heads * l.head_stride;
                l.block_stride = l.layers * l.layer_stride;
              }).ok());
}

TEST(KvLayout, SurvivesTheWire) {
  KvLayout layout = small();
  layout.head_stride = 128;
  layout.block_stride = 1000;
  layout.layer_stride = 20000;
  const std::string bytes = layout.encode();
  const absl::StatusOr<KvLayout> again = KvLayout::decode(bytes);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, layout);
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_FALSE(KvLayout::decode(bytes.substr(0, cut)).ok());
  }
  EXPECT_FALSE(KvLayout::decode(bytes + "x").ok());
}

TEST(KvPlan, EqualGeometryMovesWholeBlocksInOneBox) {
  const KvLayout layout = small();
  const absl::StatusOr<KvPlan> plan = KvPlan::make(layout, layout);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->boxes().size(), 1u);
  EXPECT_TRUE(plan->complete());
  EXPECT_EQ(plan->bytes_per_block(), 4u * 96);
  // Neighbouring blocks are one contiguous piece.
  const std::vector<uint32_t> source = {2, 3, 4};
  const std::vector<uint32_t> target = {7, 8, 9};
  const Layout from = plan->source_layout(plan->boxes()[0], 1, source);
  const Layout to = plan->target_layout(plan->boxes()[0], 1, target);
  TransferCursor cursor(from, to, 0, from.bytes());
  Piece piece;
  ASSERT_TRUE(cursor.next(piece));
  EXPECT_EQ(piece.bytes, 3u * 4 * 96);
  EXPECT_EQ(piece.local_offset, (10u + 2) * 4 * 96);
  EXPECT_EQ(piece.remote_offset, (10u + 7) * 4 * 96);
  EXPECT_FALSE(cursor.next(piece));
}

TEST(KvPlan, DifferencesAreRefusedWithTheRemedy) {
  const auto refused = [](auto change) {
    KvLayout target = small();
    change(target);
    const absl::Status status = KvPlan::make(small(), target).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused([](KvLayout& l) { l.block_tokens = 32; }),
              AllOf(HasSubstr("16"), HasSubstr("32"), HasSubstr("same block size")));
  EXPECT_THAT(refused([](KvLayout& l) { l.layers = 2; }), HasSubstr("same model"));
  EXPECT_THAT(refused([](KvLayout& l) { l.total_heads = 8; }), HasSubstr("same model"));
  EXPECT_THAT(refused([](KvLayout& l) { l.head_bytes = 95; }), HasSubstr("same KV data type"));
  EXPECT_THAT(refused([](KvLayout& l) { l.format = "fp8"; }),
              AllOf(HasSubstr("\"test\""), HasSubstr("\"fp8\"")));
  EXPECT_THAT(refused([](KvLayout& l) { l.model = "another"; }),
              AllOf(HasSubstr("\"another\""), HasSubstr("same checkpoint")));
}

TEST(KvPlan, ShardsWithoutCommonHeadsOweEachOtherNothing) {
  KvLayout source = KvLayout::dense(3, 10, 16, 2, 96, "test");
  source.total_heads = 4;
  KvLayout target = source;
  target.first_head = 2;
  const absl::StatusOr<KvPlan> plan = KvPlan::make(source, target);
  ASSERT_TRUE(plan.ok());
  EXPECT_TRUE(plan->boxes().empty());
  EXPECT_FALSE(plan->complete());
  EXPECT_EQ(plan->bytes_per_block(), 0u);
}

// A shard of a group: its heads, and a cache with random gaps and a random order of dimensions.
KvLayout random_shard(std::mt19937& random, const KvLayout& model, uint32_t rank, uint32_t ranks) {
  KvLayout shard = model;
  shard.heads = model.total_heads / ranks;
  shard.first_head = rank * shard.heads;
  shard.blocks = 6 + random() % 6;
  const auto gap = [&] { return random() % 3 == 0 ? random() % 40 : 0; };
  shard.head_stride = shard.head_bytes + gap();
  if (random() % 4 == 0) {
    shard.layer_stride = shard.heads * shard.head_stride + gap();
    shard.block_stride = shard.layers * shard.layer_stride + gap();
  } else {
    shard.block_stride = shard.heads * shard.head_stride + gap();
    shard.layer_stride = shard.blocks * shard.block_stride + gap();
  }
  return shard;
}

std::vector<uint32_t> random_pages(std::mt19937& random, uint32_t blocks, uint32_t count) {
  std::vector<uint32_t> all(blocks);
  std::iota(all.begin(), all.end(), 0);
  if (random() % 3 != 0) std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

uint64_t offset_of(const KvLayout& l, uint32_t layer, uint32_t block, uint32_t head) {
  return layer * l.layer_stride + block * l.block_stride + (head - l.first_head) * l.head_stride;
}

struct Shard {
  KvLayout layout;
  uint64_t cache_offset = 0;
  std::vector<uint32_t> pages;
  std::vector<unsigned char> bytes;
};

// What head `head` of sequence block `i` of a layer holds.
std::vector<unsigned char> content(const KvLayout& model, uint32_t layer, uint32_t i,
                                   uint32_t head) {
  std::mt19937 random(layer * 7919 + i * 104729 + head * 31 + 1);
  std::vector<unsigned char> bytes(model.head_bytes);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

TEST(KvPlan, EveryHeadOfEveryBlockArrivesWhereItBelongsAndNothingElseChanges) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    KvLayout model = KvLayout::dense(1 + random() % 4, 1, 16, 8, 1 + random() % 70, "test");
    const uint32_t sources_n = 1u << random() % 4;
    const uint32_t targets_n = 1u << random() % 4;
    const uint32_t count = 1 + random() % 6;
    const auto group = [&](uint32_t ranks) {
      std::vector<Shard> shards(ranks);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        Shard& shard = shards[rank];
        shard.layout = random_shard(random, model, rank, ranks);
        EXPECT_TRUE(shard.layout.check().ok()) << shard.layout.check();
        shard.cache_offset = random() % 100;
        shard.pages = random_pages(random, shard.layout.blocks, count);
        shard.bytes.resize(shard.cache_offset + shard.layout.bytes() + 50);
        for (unsigned char& byte : shard.bytes) byte = static_cast<unsigned char>(random());
      }
      return shards;
    };
    std::vector<Shard> sources = group(sources_n);
    std::vector<Shard> targets = group(targets_n);

    const auto put = [&](Shard& shard) {
      for (uint32_t layer = 0; layer < model.layers; ++layer) {
        for (uint32_t i = 0; i < count; ++i) {
          for (uint32_t h = 0; h < shard.layout.heads; ++h) {
            const uint32_t head = shard.layout.first_head + h;
            const auto bytes = content(model, layer, i, head);
            std::memcpy(&shard.bytes[shard.cache_offset +
                                     offset_of(shard.layout, layer, shard.pages[i], head)],
                        bytes.data(), bytes.size());
          }
        }
      }
    };
    std::vector<Shard> expected = targets;
    for (Shard& shard : sources) put(shard);
    for (Shard& shard : expected) put(shard);

    size_t moved = 0;
    for (const Shard& source : sources) {
      for (Shard& target : targets) {
        const absl::StatusOr<KvPlan> plan = KvPlan::make(source.layout, target.layout);
        ASSERT_TRUE(plan.ok()) << plan.status();
        for (const KvBox& box : plan->boxes()) {
          for (uint32_t layer = 0; layer < model.layers; ++layer) {
            const Layout from = plan->source_layout(box, layer, source.pages, source.cache_offset);
            const Layout to = plan->target_layout(box, layer, target.pages, target.cache_offset);
            ASSERT_EQ(from.bytes(), to.bytes());
            ASSERT_TRUE(from.check(source.bytes.size(), "local").ok());
            ASSERT_TRUE(to.check(target.bytes.size(), "remote").ok());
            TransferCursor cursor(from, to, 0, from.bytes());
            for (Piece piece; cursor.next(piece); moved += piece.bytes) {
              std::memcpy(&target.bytes[piece.remote_offset], &source.bytes[piece.local_offset],
                          piece.bytes);
            }
          }
        }
      }
    }
    // Each byte exactly once, all of them, and no other.
    EXPECT_EQ(moved, size_t{model.layers} * count * model.total_heads * model.head_bytes);
    for (uint32_t rank = 0; rank < targets_n; ++rank) {
      EXPECT_EQ(targets[rank].bytes, expected[rank].bytes) << "target rank " << rank;
    }
  }
}

}  // namespace
}  // namespace baton::kvtransfer
