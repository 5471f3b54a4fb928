// Paged decode attention: near the engine's plain loops, and the same bits in any batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "tests/gpudirect/kernels/emulated_memory.h"

namespace baton::gpudirect::kernels {
namespace {

// Sequences of given lengths over a cache whose blocks lie in any order.
struct Batch {
  Batch(std::vector<uint32_t> sequence_lengths, uint32_t heads, uint32_t query_group, uint32_t dim,
        uint64_t seed)
      : lengths(std::move(sequence_lengths)),
        geometry{
            .layers = 1, .kv_heads = static_cast<int>(heads), .head_dim = static_cast<int>(dim)},
        group(query_group) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> distribution;
    longest = *std::max_element(lengths.begin(), lengths.end());
    stride = (longest + kBlockTokens - 1) / kBlockTokens;
    tables.resize(lengths.size() * stride);
    std::iota(tables.begin(), tables.end(), 0u);
    std::shuffle(tables.begin(), tables.end(), random);
    cache = engine::AlignedArray<uint16_t>(geometry.cache_bytes(tables.size()) / 2);
    for (size_t i = 0; i < cache.size(); ++i) {
      cache[i] = engine::bf16_from_float(distribution(random));
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    q.resize(lengths.size() * heads * group * dim);
    for (float& value : q) value = distribution(random) * scale;
  }

  // The kernels' output for some of the sequences, in that order.
  std::vector<float> run(const std::vector<size_t>& which, uint32_t blocks, uint64_t seed) const {
    const auto heads = static_cast<uint32_t>(geometry.kv_heads);
    const auto dim = static_cast<uint32_t>(geometry.head_dim);
    const size_t row = size_t{heads} * group * dim;
    std::vector<float> queries, out(which.size() * row);
    std::vector<uint32_t> tables_of, lengths_of;
    for (const size_t i : which) {
      queries.insert(queries.end(), q.begin() + static_cast<ptrdiff_t>(i * row),
                     q.begin() + static_cast<ptrdiff_t>((i + 1) * row));
      tables_of.insert(tables_of.end(), tables.begin() + static_cast<ptrdiff_t>(i * stride),
                       tables.begin() + static_cast<ptrdiff_t>((i + 1) * stride));
      lengths_of.push_back(lengths[i]);
    }
    const uint32_t splits =
        (*std::max_element(lengths_of.begin(), lengths_of.end()) + kSplitTokens - 1) / kSplitTokens;
    std::vector<float> partial(which.size() * heads * splits * group * (2 + dim));
    std::vector<uint16_t> pages(cache.data(), cache.data() + cache.size());
    EmulatedMemory memory;
    memory.allow(queries);
    memory.allow(tables_of);
    memory.allow(lengths_of);
    memory.allow(pages);
    memory.allow(partial, true);
    memory.allow(out, true);
    const Attention arguments{.q = queries.data(),
                              .out = out.data(),
                              .block_tables = tables_of.data(),
                              .lengths = lengths_of.data(),
                              .partial = partial.data(),
                              .cache = {pages.data(), heads, dim},
                              .sequences = static_cast<uint32_t>(which.size()),
                              .group = group,
                              .table_stride = stride,
                              .splits = splits};
    EXPECT_EQ(run_kernel("baton_attend_splits", arguments, blocks, memory, seed), std::nullopt);
    EXPECT_EQ(run_kernel("baton_join_splits", arguments, blocks, memory, seed), std::nullopt);
    return out;
  }

  std::vector<float> plain(size_t sequence) {
    const engine::KvCache view(geometry, cache.data(), tables.size());
    const size_t row = size_t{group} * static_cast<size_t>(geometry.head_dim);
    std::vector<float> out(row * static_cast<size_t>(geometry.kv_heads));
    for (int head = 0; head < geometry.kv_heads; ++head) {
      const size_t at = static_cast<size_t>(head) * row;
      engine::AttentionCall call;
      call.cache = &view;
      call.kv_head = head;
      call.block_table = {tables.data() + sequence * stride, stride};
      call.position = static_cast<int>(lengths[sequence]) - 1;
      call.tokens = 1;
      call.group = static_cast<int>(group);
      call.q = q.data() + sequence * out.size() + at;
      call.out = out.data() + at;
      engine::reference_attention(call);
    }
    return out;
  }

  std::vector<uint32_t> lengths;
  engine::KvGeometry geometry;
  uint32_t group;
  uint32_t longest = 0;
  uint32_t stride = 0;
  std::vector<uint32_t> tables;
  engine::AlignedArray<uint16_t> cache;
  std::vector<float> q;
};

TEST(Attention, IsTheEnginesWithin1e5) {
  for (const uint32_t dim : {32u, 64u, 128u}) {
    for (const uint32_t group : {1u, 4u, 8u}) {
      Batch batch({1, 16, 255, 256, 257, 700}, 2, group, dim, dim + group);
      std::vector<size_t> all(batch.lengths.size());
      std::iota(all.begin(), all.end(), 0u);
      const std::vector<float> ours = batch.run(all, 5, 1);
      for (const size_t i : all) {
        const std::vector<float> plain = batch.plain(i);
        for (size_t e = 0; e < plain.size(); ++e) {
          ASSERT_NEAR(ours[i * plain.size() + e], plain[e], 1e-5f) << i << " " << e;
        }
      }
    }
  }
}

TEST(Attention, ASequenceHasTheSameBitsInEveryBatch) {
  const Batch batch({300, 513, 40, 1024}, 2, 4, 64, 7);
  const std::vector<float> together = batch.run({0, 1, 2, 3}, 3, 1);
  const std::vector<float> reordered = batch.run({2, 0, 3, 1}, 16, 2);
  const size_t row = together.size() / 4;
  const std::vector<size_t> places = {1, 3, 0, 2};
  for (size_t i = 0; i < 4; ++i) {
    const auto wanted = together.begin() + static_cast<ptrdiff_t>(i * row);
    const std::vector<float> alone = batch.run({i}, 1, 3);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), wanted)) << i;
    const auto again = reordered.begin() + static_cast<ptrdiff_t>(places[i] * row);
    EXPECT_TRUE(std::equal(again, again + static_cast<ptrdiff_t>(row), wanted)) << i;
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
