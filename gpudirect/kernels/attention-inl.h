// Attention of single new tokens over their pages, split by split: a block of threads for each
// split and KV head, so that one long context fills a GPU, and all query heads that share a KV head
// together (tiles-inl.h). The bits of the engine's attention and of attend_pages.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/splits-inl.h"
#include "gpudirect/kernels/tiles-inl.h"

namespace baton::gpudirect::kernels {

// A split of a task.
struct SplitPlace {
  SplitTask task;
  uint32_t kv_head;
  uint32_t split;
  bool alone;  // the token sees no other split
};
BATON_DEVICE uint64_t head_place(const SplitAttention& a, const SplitTask& task, uint32_t kv_head,
                                 uint32_t query) {
  const uint64_t head = uint64_t{task.queries.row} * a.cache.kv_heads + kv_head;
  return (head * a.group + task.queries.first + query) * a.cache.head_dim;
}
// Maximum, sum, and the sums over V.
BATON_DEVICE float* partial_of(const SplitAttention& a, const SplitTask& task, uint32_t kv_head,
                               uint32_t split, uint32_t query) {
  const uint64_t row = (uint64_t{task.partial} + split) * a.cache.kv_heads + kv_head;
  return a.partial +
         (row * smaller(a.group, kTaskQueries) + query) * (kPartialExtra + a.cache.head_dim);
}

// What this split made of a query, of some dimensions: a partial result, or the whole one where
// there is no other.
template <class Shape, class Block>
BATON_DEVICE void store_split(Block& block, const SplitAttention& a, const SplitPlace& at,
                              const TileMemory& memory, uint32_t query, uint32_t dim,
                              Floats<Shape::kLaneDims> own) {
  using Row = Floats<Shape::kLaneDims>;
  if (at.alone) {
    const SplitFactors factors = split_factors(-INFINITY, most_of<Shape>(memory, query));
    const float inverse = 1.0f / add_split(factors, 0, sum_of(memory, query));
    BATON_UNROLL
    for (uint32_t i = 0; i < Shape::kLaneDims; ++i) {
      own.of[i] = add_split(factors, 0, own.of[i]) * inverse;
    }
    block.store(reinterpret_cast<Row*>(a.out + head_place(a, at.task, at.kv_head, query) + dim),
                own);
    return;
  }
  float* const partial = partial_of(a, at.task, at.kv_head, at.split, query);
  block.store(reinterpret_cast<Row*>(partial + kPartialExtra + dim), own);
  if (dim != 0) return;
  block.store(reinterpret_cast<Floats<2>*>(partial),
              Floats<2>{{most_of<Shape>(memory, query), sum_of(memory, query)}});
}

template <class Shape, class Block>
BATON_DEVICE void attend_split(Block& block, const SplitAttention& a, const SplitPlace& at,
                               const TileMemory& memory, const TileSplit& split) {
  block.each([&](uint32_t thread) {
    if (thread >= split.first_page() && thread < split.end_page()) {
      const uint32_t* const table = a.block_tables + at.task.queries.table + at.split * kSplitPages;
      memory.pages[thread] = page_at(a.cache, block.load(table + thread), at.kv_head);
    }
    if (thread < Shape::kRows) memory.seen[thread] = split.any;
    load_queries<Shape>(block, memory, split.dims, thread, [&](uint32_t row) {
      return row < at.task.queries.count ? a.q + head_place(a, at.task, at.kv_head, row) : nullptr;
    });
  });
  auto values = block.template per_thread<ValueSums<Shape>>();
  attend_tile<Shape>(block, memory, split, values);
  block.each([&](uint32_t thread) {
    const uint32_t dim = value_dim<Shape>(thread), row = value_row<Shape>(thread);
    if (dim >= split.dims) return;
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kWarpRows; ++r) {
      if (row + r >= at.task.queries.count) break;
      store_split<Shape>(block, a, at, memory, row + r, dim, values[thread].of[r]);
    }
  });
}

template <class Block>
BATON_DEVICE void attend_splits(Block& block, const SplitAttention& a) {
  using Largest = TileShape<1, kTaskQueries, 8>;
  auto* const weights =
      reinterpret_cast<float*>(block.template shared<Floats<4>, Largest::kWeights / 4>());
  const TileMemory memory = {
      reinterpret_cast<uint16_t*>(
          block.template shared<Vector16, kTileStages * kStageElements / 8>()),
      weights,
      weights,
      block.template shared<uint32_t, 2 * kTaskQueries>(),
      block.template shared<float, kTaskQueries * 16>(),
      block.template shared<Seen, kTaskQueries>(),
      block.template shared<const uint16_t*, kSplitPages>()};
  const uint32_t items = block.load(a.counts) * a.cache.kv_heads;
  for (uint32_t item = block.index(); item < items; item += block.blocks()) {
    const SplitItem place = block.load(a.items + item / a.cache.kv_heads);
    const SplitTask task = block.load(a.tasks + place.task);
    const uint32_t from = place.split * kSplitTokens, last = task.queries.position;
    const uint32_t first = first_seen_from(last, a.window);
    const Seen seen = seen_of_split(from, first, last);
    if (seen.end == 0) continue;  // before the window
    const TileSplit split = {seen, seen, a.cache.head_dim};
    const SplitPlace at = {task, item % a.cache.kv_heads, place.split,
                           first / kSplitTokens == last / kSplitTokens};
    const auto attend = [&](auto shape) {
      attend_split<decltype(shape)>(block, a, at, memory, split);
    };
    if (a.group <= 4) {
      with_shape<1, 4>(split.dims, attend);
    } else {
      with_shape<1, kTaskQueries>(split.dims, attend);
    }
  }
}

// One query of a task and KV head, whose splits several blocks computed: a thread for each
// dimension, of up to as many as the block has threads.
struct JoinState {
  float most;
  float sum;
  float mixed;
};
template <class Block>
BATON_DEVICE void join_splits(Block& block, const SplitAttention& a) {
  constexpr uint32_t kAtOnce = 64;                                // splits
  constexpr uint32_t kLoads = 16;                                 // on their way at once
  auto* const own = block.template shared<Floats<2>, kAtOnce>();  // maximum and sum
  auto* const factors = block.template shared<SplitFactors, kAtOnce>();
  auto states = block.template per_thread<JoinState>();
  const uint32_t dims = a.cache.head_dim, parts = pieces_of(dims, block.threads());
  const uint32_t queries = smaller(a.group, kTaskQueries);
  const uint32_t items = block.load(a.counts + 1) * a.cache.kv_heads * queries * parts;
  const uint64_t stride = uint64_t{a.cache.kv_heads} * queries * (kPartialExtra + dims);
  for (uint32_t item = block.index(); item < items; item += block.blocks()) {
    const uint32_t dim = item % parts * block.threads(), head = item / parts;
    const uint32_t query = head % queries, kv_head = head / queries % a.cache.kv_heads;
    const SplitTask task = block.load(a.tasks + head / queries / a.cache.kv_heads);
    const uint32_t last = task.queries.position / kSplitTokens;
    const uint32_t first = first_seen_from(task.queries.position, a.window) / kSplitTokens;
    if (first == last || query >= task.queries.count) continue;
    block.each([&](uint32_t thread) { states[thread] = {-INFINITY, 0, 0}; });
    for (uint32_t from = first; from <= last; from += kAtOnce) {
      const uint32_t some = smaller(kAtOnce, last + 1 - from);
      const float* const partial = partial_of(a, task, kv_head, from, query);
      block.each([&](uint32_t thread) {
        if (thread >= some) return;
        own[thread] = block.load(reinterpret_cast<const Floats<2>*>(partial + thread * stride));
      });
      block.each([&](uint32_t thread) {
        if (thread >= some) return;
        float before = states[thread].most;
        for (uint32_t s = 0; s < thread; ++s) before = larger(before, own[s].of[0]);
        factors[thread] = split_factors(before, own[thread].of[0]);
      });
      block.each([&](uint32_t thread) {
        JoinState state = states[thread];
        const float* const mixed = partial + kPartialExtra + dim + thread;
        for (uint32_t begin = 0; begin < some; begin += kLoads) {
          float values[kLoads];
          BATON_UNROLL
          for (uint32_t i = 0; i < kLoads; ++i) {
            const bool wanted = begin + i < some && dim + thread < dims;
            values[i] = wanted ? block.load(mixed + (begin + i) * stride) : 0.0f;
          }
          BATON_UNROLL
          for (uint32_t i = 0; i < kLoads; ++i) {
            const uint32_t s = begin + i;
            if (s >= some) break;
            state.most = larger(state.most, own[s].of[0]);
            state.sum = add_split(factors[s], state.sum, own[s].of[1]);
            state.mixed = add_split(factors[s], state.mixed, values[i]);
          }
        }
        states[thread] = state;
      });
    }
    block.each([&](uint32_t thread) {
      if (dim + thread >= dims) return;
      const float inverse = 1.0f / states[thread].sum;
      block.store(a.out + head_place(a, task, kv_head, query) + dim + thread,
                  states[thread].mixed * inverse);
    });
  }
}

}  // namespace baton::gpudirect::kernels
