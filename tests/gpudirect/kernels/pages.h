// Chunks of sequences over pages that lie anywhere, and attention over them: by the emulated
// kernels and by the engine's on the CPU.
#pragma once

#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {

inline constexpr uint32_t kHeads = 2;  // of K and V

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
    for (size_t c = 0; c < chunks.size(); ++c) {
      const uint32_t pairs = chunks[c].tokens * group;
      for (uint32_t first = 0; first < pairs; first += kPageQueries) {
        tasks.push_back(
            {begins[c], chunks[c].position, rows[c], first, std::min(kPageQueries, pairs - first)});
      }
    }
    std::vector<float> out(q.size());
    std::vector<uint16_t> pages(cache.data(), cache.data() + cache.size());
    EmulatedMemory memory;
    memory.allow(pages);
    const PageAttention arguments{.q = memory.read(q),
                                  .out = memory.write(out),
                                  .block_tables = memory.read(tables),
                                  .tasks = memory.read(tasks),
                                  .cache = {pages.data(), kHeads, dim},
                                  .task_count = static_cast<uint32_t>(tasks.size()),
                                  .group = group,
                                  .window = window};
    EXPECT_EQ(run_kernel("baton_attend_pages", arguments, blocks, memory, seed), std::nullopt);
    return out;
  }

  // By attend_splits and join_splits, of some of the chunks, which have one token each: rows that
  // are no chunk's are left 0.
  std::vector<float> of_splits(const std::vector<size_t>& which, uint32_t blocks,
                               uint64_t seed) const {
    const auto dim = static_cast<uint32_t>(geometry.head_dim);
    std::vector<SplitTask> tasks;
    std::vector<SplitItem> items;
    for (const size_t c : which) {
      for (uint32_t first = 0; first < group; first += kTaskQueries) {
        tasks.push_back(
            {{begins[c], chunks[c].position, rows[c], first, std::min(kTaskQueries, group - first)},
             static_cast<uint32_t>(items.size())});
        const auto task = static_cast<uint32_t>(tasks.size() - 1);
        for (uint32_t s = 0; s <= chunks[c].position / kSplitTokens; ++s)
          items.push_back({task, s});
      }
    }
    std::vector<uint32_t> counts = {static_cast<uint32_t>(items.size()),
                                    static_cast<uint32_t>(tasks.size())};
    std::vector<float> out(q.size()),
        partial(partial_floats(items.size(), kHeads, group, dim), std::nanf(""));
    std::vector<uint16_t> pages(cache.data(), cache.data() + cache.size());
    std::shuffle(items.begin(), items.end(), std::mt19937_64(seed));
    EmulatedMemory memory;
    memory.allow(pages);
    const SplitAttention arguments{.q = memory.read(q),
                                   .out = memory.write(out),
                                   .block_tables = memory.read(tables),
                                   .tasks = memory.read(tasks),
                                   .items = memory.read(items),
                                   .counts = memory.read(counts),
                                   .partial = memory.write(partial),
                                   .cache = {pages.data(), kHeads, dim},
                                   .group = group,
                                   .window = window};
    const auto* const name =
        group <= kNarrowGroup ? "baton_attend_splits" : "baton_attend_wide_splits";
    EXPECT_EQ(run_kernel(name, arguments, blocks, memory, seed), std::nullopt);
    EXPECT_EQ(run_kernel("baton_join_splits", arguments, blocks, memory, seed), std::nullopt);
    return out;
  }

  std::vector<float> engines() {
    const engine::KvCache view(geometry, cache.data(), tables.size());
    const size_t width = size_t{group} * static_cast<size_t>(geometry.head_dim);
    std::vector<float> out(q.size()), scratch(engine::kAttentionScratch);
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

}  // namespace baton::gpudirect::kernels
