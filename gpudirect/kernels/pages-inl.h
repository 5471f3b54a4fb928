// Attention of new tokens over their sequence's pages, in the order of the engine's on the CPU: a
// block of threads takes one split of the context after the other (tiles-inl.h), for up to
// kPageQueries queries of a KV head. So prompts that a GPU computed have the bits of those that a
// CPU did, and KV may come from either.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/tiles-inl.h"

namespace baton::gpudirect::kernels {

// The state of one query after all splits so far.
struct SplitState {
  float most;
  float sum;
  SplitFactors last;  // of the last one
};

// A task, and what its queries see. Rows of a tile that are no query's see what the last one does.
struct PageTask {
  AttentionTask task;
  uint32_t kv_head;
};
BATON_DEVICE uint32_t last_seen(const PageAttention& a, const PageTask& at, uint32_t row) {
  return at.task.position + (at.task.first + smaller(row, at.task.count - 1)) / a.group;
}
BATON_DEVICE Seen seen_by(const PageAttention& a, const PageTask& at, uint32_t from, uint32_t row) {
  const uint32_t last = last_seen(a, at, row);
  return seen_of_split(from, first_seen_from(last, a.window), last);
}
// The offset of its first element in q and out.
BATON_DEVICE uint64_t query_place(const PageAttention& a, const PageTask& at, uint32_t query) {
  const uint32_t pair = at.task.first + query;
  const uint64_t row = uint64_t{at.task.row} + pair / a.group;
  return ((row * a.cache.kv_heads + at.kv_head) * a.group + pair % a.group) * a.cache.head_dim;
}

// The split from position `from` on, added to those before it.
template <class Shape, class Block, class Mixed>
BATON_DEVICE void add_pages(Block& block, const PageAttention& a, const PageTask& at,
                            const TileMemory& memory, SplitState* states, uint32_t from,
                            Mixed& mixed) {
  // Rows see later and later tokens.
  const Seen low = seen_by(a, at, from, 0), high = seen_by(a, at, from, at.task.count - 1);
  const bool all = low.end != 0 && high.end != 0;
  TileSplit split = {{0, 0}, {0, 0}, a.cache.head_dim};
  split.any = {low.end != 0 ? low.begin : 0, high.end != 0 ? high.end : kSplitTokens};
  if (all) split.every = {high.begin, low.end};
  block.each([&](uint32_t thread) {
    if (thread >= split.first_page() && thread < split.end_page()) {
      const uint32_t* const table = a.block_tables + at.task.table + from / kBlockTokens;
      memory.pages[thread] = page_at(a.cache, block.load(table + thread), at.kv_head);
    }
    if (thread < Shape::kRows) memory.seen[thread] = seen_by(a, at, from, thread);
    load_queries<Shape>(block, memory, split.dims, thread, [&](uint32_t row) {
      return row < at.task.count ? a.q + query_place(a, at, row) : nullptr;
    });
  });
  auto values = block.template per_thread<ValueSums<Shape>>();
  attend_tile<Shape>(block, memory, split, values);
  block.each([&](uint32_t row) {
    if (row >= Shape::kRows) return;
    SplitState& state = states[row];
    const float most = most_of<Shape>(memory, row);
    state.last = {1, 0};
    if (most == -INFINITY) return;  // it sees nothing of this split
    state.last = split_factors(state.most, most);
    state.sum = add_split(state.last, state.sum, sum_of(memory, row));
    state.most = larger(state.most, most);
  });
  block.each_warp([&](uint32_t thread) {
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kWarpRows; ++r) {
      const SplitFactors factors = states[value_row<Shape>(thread) + r].last;
      if (factors.add == 0 && factors.keep == 1) continue;
      BATON_UNROLL
      for (uint32_t i = 0; i < Shape::kLaneDims; ++i) {
        float& sum = mixed[thread].of[r].of[i];
        sum = add_split(factors, sum, values[thread].of[r].of[i]);
      }
    }
  });
}

template <class Shape, class Block>
BATON_DEVICE void attend_task(Block& block, const PageAttention& a, const PageTask& at,
                              const TileMemory& memory, SplitState* states) {
  auto mixed = block.template per_thread<ValueSums<Shape>>();
  block.each([&](uint32_t thread) {
    if (thread < Shape::kRows) states[thread] = {-INFINITY, 0, {1, 0}};
    mixed[thread] = {};
  });
  const uint32_t first = first_seen_from(last_seen(a, at, 0), a.window);
  const uint32_t last = last_seen(a, at, at.task.count - 1);
  for (uint32_t split = first / kSplitTokens; split <= last / kSplitTokens; ++split) {
    add_pages<Shape>(block, a, at, memory, states, split * kSplitTokens, mixed);
  }
  block.each([&](uint32_t thread) {
    const uint32_t dim = value_dim<Shape>(thread), row = value_row<Shape>(thread);
    if (dim >= a.cache.head_dim) return;
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kWarpRows; ++r) {
      if (row + r >= at.task.count) break;
      const float inverse = 1.0f / states[row + r].sum;
      Floats<Shape::kLaneDims> own = mixed[thread].of[r];
      BATON_UNROLL
      for (uint32_t i = 0; i < Shape::kLaneDims; ++i) own.of[i] = own.of[i] * inverse;
      block.store(
          reinterpret_cast<Floats<Shape::kLaneDims>*>(a.out + query_place(a, at, row + r) + dim),
          own);
    }
  });
}

template <class Block>
BATON_DEVICE void attend_pages(Block& block, const PageAttention& a) {
  constexpr uint32_t kGroups = kPageQueries / 8;
  using Largest = TileShape<kGroups, 8, 8>;
  auto* const weights =
      reinterpret_cast<float*>(block.template shared<Floats<4>, Largest::kWeights / 4>());
  const TileMemory memory = {
      reinterpret_cast<uint16_t*>(
          block.template shared<Vector16, kTileStages * kStageElements / 8>()),
      weights,
      weights,
      block.template shared<uint32_t, 2 * kPageQueries>(),
      block.template shared<float, kPageQueries * 16>(),
      block.template shared<Seen, kPageQueries>(),
      block.template shared<const uint16_t*, kSplitPages>()};
  auto* const states = block.template shared<SplitState, kPageQueries>();
  const uint32_t items = a.task_count * a.cache.kv_heads;
  for (uint32_t item = block.index(); item < items; item += block.blocks()) {
    const uint32_t number = items - 1 - item;  // later tokens see more: first of all they
    const PageTask at = {block.load(a.tasks + number / a.cache.kv_heads),
                         number % a.cache.kv_heads};
    with_shape<kGroups, 8>(a.cache.head_dim, [&](auto shape) {
      attend_task<decltype(shape)>(block, a, at, memory, states);
    });
  }
}

}  // namespace baton::gpudirect::kernels
