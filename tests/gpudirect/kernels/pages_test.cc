// Attention over pages of prompts, pieces of them and single tokens: the engine's bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/gpudirect/kernels/normal_numbers.h"

namespace baton::gpudirect::kernels {
namespace {

constexpr uint32_t kHeads = 2;  // of K and V

struct Chunk {
  uint32_t position, tokens;
};

// Chunks of sequences whose pages lie in any order, full of numbers also where nothing is stored.
struct Pages {
  Pages(std::vector<Chunk> given, uint32_t query_group, uint32_t dim, uint32_t seen)
      : chunks(std::move(given)),
        geometry{.layers = 1, .kv_heads = kHeads, .head_dim = static_cast<int>(dim)},
        group(query_group),
        window(seen) {
    for (const Chunk& chunk : chunks) {
      begins.push_back(static_cast<uint32_t>(tables.size()));
      rows.push_back(tokens);
      tables.resize(tables.size() + (chunk.position + chunk.tokens + 15) / 16);
      tokens += chunk.tokens;
    }
    std::iota(tables.begin(), tables.end(), 0u);
    std::shuffle(tables.begin(), tables.end(), std::mt19937_64(dim));
    cache = engine::AlignedArray<uint16_t>(geometry.cache_bytes(tables.size()) / 2);
    const std::vector<float> numbers = normal(cache.size(), dim + group);
    for (size_t i = 0; i < cache.size(); ++i) cache[i] = engine::bf16_from_float(numbers[i]);
    q = normal(size_t{tokens} * kHeads * group * dim, 5);
    for (float& value : q) value /= std::sqrt(static_cast<float>(dim));
    forget_what_is_past_the_ends();
  }

  // NaN, so that whoever computes with it shows.
  void forget_what_is_past_the_ends() {
    const engine::KvCache view(geometry, cache.data(), tables.size());
    const auto dim = static_cast<uint32_t>(geometry.head_dim);
    for (size_t c = 0; c < chunks.size(); ++c) {
      const uint32_t end = chunks[c].position + chunks[c].tokens;
      for (uint32_t at = end; at % 16 != 0; ++at) {
        for (int head = 0; head < geometry.kv_heads; ++head) {
          uint16_t* const key = view.key(0, tables[begins[c] + at / 16], head);
          uint16_t* const value = view.value(0, tables[begins[c] + at / 16], head);
          for (uint32_t d = 0; d < dim; ++d)
            key[d * 16 + at % 16] = value[at % 16 * dim + d] = 0x7fc0;
        }
      }
    }
  }

  std::vector<float> ours(uint32_t blocks, uint64_t seed) const {
    const auto dim = static_cast<uint32_t>(geometry.head_dim);
    std::vector<AttentionTask> tasks;
    uint32_t stride = 32;
    for (size_t c = 0; c < chunks.size(); ++c) {
      stride = std::max(stride, (chunks[c].position + chunks[c].tokens + 15) / 16 * 16);
      const uint32_t pairs = chunks[c].tokens * group;
      for (uint32_t first = 0; first < pairs; first += kTaskQueries) {
        tasks.push_back(
            {begins[c], chunks[c].position, rows[c], first, std::min(kTaskQueries, pairs - first)});
      }
    }
    std::vector<float> out(q.size()), scores(size_t{blocks} * kTaskQueries * stride);
    std::vector<uint16_t> pages(cache.data(), cache.data() + cache.size());
    EmulatedMemory memory;
    memory.allow(q);
    memory.allow(tables);
    memory.allow(tasks);
    memory.allow(pages);
    memory.allow(scores, true);
    memory.allow(out, true);
    const PageAttention arguments{.q = q.data(),
                                  .out = out.data(),
                                  .block_tables = tables.data(),
                                  .tasks = tasks.data(),
                                  .scores = scores.data(),
                                  .cache = {pages.data(), kHeads, dim},
                                  .task_count = static_cast<uint32_t>(tasks.size()),
                                  .group = group,
                                  .window = window,
                                  .stride = stride};
    EXPECT_EQ(run_kernel("baton_attend_pages", arguments, blocks, memory, seed), std::nullopt);
    return out;
  }

  std::vector<float> engines() {
    const engine::KvCache view(geometry, cache.data(), tables.size());
    const size_t width = size_t{group} * static_cast<size_t>(geometry.head_dim);
    std::vector<float> out(q.size()), scratch(engine::attention_scratch_size(4096));
    for (size_t c = 0; c < chunks.size(); ++c) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        const size_t at = rows[c] * kHeads * width + head * width;
        engine::paged_attention({.cache = &view,
                                 .kv_head = static_cast<int>(head),
                                 .block_table = std::span(tables).subspan(begins[c]),
                                 .position = static_cast<int>(chunks[c].position),
                                 .tokens = static_cast<int>(chunks[c].tokens),
                                 .window = static_cast<int>(window),
                                 .group = static_cast<int>(group),
                                 .q = q.data() + at,
                                 .q_stride = kHeads * width,
                                 .out = out.data() + at,
                                 .out_stride = kHeads * width},
                                scratch.data());
      }
    }
    return out;
  }

  std::vector<Chunk> chunks;
  engine::KvGeometry geometry;
  uint32_t group, window, tokens = 0;
  std::vector<uint32_t> tables, begins, rows;
  engine::AlignedArray<uint16_t> cache;
  std::vector<float> q;
};

void expect_the_engines(Pages&& pages) {
  const std::vector<float> ours = pages.ours(3, 1), wanted = pages.engines();
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i], wanted[i]) << "dim " << pages.geometry.head_dim << ", group " << pages.group
                                  << ", window " << pages.window << " at " << i;
  }
}

TEST(Pages, IsTheEnginesAttention) {
  for (const uint32_t dim : {16u, 48u, 64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 3u, 8u}) {
      expect_the_engines(Pages({{0, 20}, {37, 1}, {5, 30}, {0, 1}, {143, 2}}, group, dim, 0));
    }
  }
  expect_the_engines(Pages({{0, 3}, {300, 1}}, 16, 32, 0));  // heads of a token in two tasks
}

TEST(Pages, SeesAWindow) {
  for (const uint32_t window : {1u, 16u, 23u, 100u}) {
    expect_the_engines(Pages({{0, 40}, {150, 1}, {60, 9}}, 2, 32, window));
  }
}

TEST(Pages, AnyNumberOfBlocksMakesTheSame) {
  const Pages pages({{0, 40}, {70, 1}, {33, 5}}, 4, 32, 0);
  const std::vector<float> one = pages.ours(1, 1);
  EXPECT_EQ(pages.ours(64, 2), one);
  EXPECT_EQ(pages.ours(7, 3), one);
}

// ---- a prompt in pieces has the bits of one at once: each token sees what is before it ----
TEST(Pages, ATokenHasTheSameBitsInEveryChunk) {
  Pages whole({{0, 48}}, 2, 32, 0);
  const std::vector<float> at_once = whole.ours(4, 1);
  const size_t width = size_t{kHeads} * 2 * 32;
  for (const uint32_t cut : {1u, 7u, 16u, 31u, 47u}) {
    Pages rest = {{{cut, 48 - cut}}, 2, 32, 0};
    rest.tables = whole.tables;
    std::copy_n(whole.cache.data(), whole.cache.size(), rest.cache.data());
    rest.q.assign(whole.q.begin() + static_cast<ptrdiff_t>(cut * width), whole.q.end());
    const std::vector<float> behind = rest.ours(2, 3);
    EXPECT_TRUE(std::equal(behind.begin(), behind.end(),
                           at_once.begin() + static_cast<ptrdiff_t>(cut * width)))
        << cut;
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
