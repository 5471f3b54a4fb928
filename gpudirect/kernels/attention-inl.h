// Attention of single new tokens over their pages, split by split: a block of threads for each
// split and KV head, so that one long context fills a GPU, and all query heads that share a KV head
// together. The bits of the engine's attention and of attend_pages.
//
// For groups of up to kNarrowGroup queries K and V come to shared memory as they lie, some whole
// pages of a KV head at a time, which is a step: first those of K, then those of V. Steps of the
// block's next split are on their way before this one is done. Of K a thread takes two tokens' even
// or odd dimensions, of V a few dimensions next to each other, token by token.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
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

// A block's tile of up to kRowCount queries, of at most kMostDims dimensions.
template <uint32_t kRowCount, uint32_t kMostDims>
struct SplitShape : TileShape<1, kRowCount, kMostDims <= 128 ? 2 : 4> {
  using Tile = TileShape<1, kRowCount, kMostDims <= 128 ? 2 : 4>;
  static constexpr uint32_t kDims = kMostDims;
  static constexpr uint32_t kStepPages = kMostDims <= 128 ? 4 : 2;
  static constexpr uint32_t kStepTokens = kStepPages * kBlockTokens;
  // Of V: so many threads have all dimensions of a token, and share its queries with others.
  static constexpr uint32_t kValueThreads = kMostDims / Tile::kLaneDims;
  static constexpr uint32_t kValueRows = kRowCount / (kGroupThreads / kValueThreads);
  // A page of K is 32 bytes for each dimension. A warp reads two pages at once, for which the
  // second of them lies half of the banks further.
  static constexpr uint32_t kPageBytes = kMostDims * kBlockTokens * 2;
  static constexpr uint32_t kStepBytes = kStepPages * kPageBytes + kStepPages / 2 * 64;
  static constexpr uint32_t kMostSteps = 8;
  static constexpr uint32_t kOtherBytes = kMostSteps * 8 + 2 * kSplitPages * 8 +
                                          (kRowCount * (kMostDims + 16 + 2) + Tile::kWeights) * 4;
  static constexpr uint32_t kSteps = smaller(kMostSteps, (kSplitBytes - kOtherBytes) / kStepBytes);
  static_assert(kSteps >= 2);
};
BATON_DEVICE uint32_t place_in_step(uint32_t page, uint32_t page_bytes) {
  return page * page_bytes + (page + 1) / 2 * 64;
}

template <class Shape>
struct StepSums {
  Floats<Shape::kRows> of[2];  // tokens
};
template <class Shape>
struct StepScores {
  Floats<Shape::kRows> of[1];
};
template <class Shape>
struct SplitSums {
  Floats<Shape::kLaneDims> of[Shape::kValueRows];
};

struct SplitMemory {
  TileMemory tile;  // queries, weights, most and sums
  std::byte* steps;
  uint64_t* arrivals;      // of each step
  const uint16_t** pages;  // [2][kSplitPages]: K of each, of this split and of the next one
};
template <class Shape>
BATON_DEVICE SplitMemory split_memory(std::byte* at) {
  auto* const weights = reinterpret_cast<float*>(at + Shape::kSteps * Shape::kStepBytes);
  float* const queries = weights + Shape::kWeights;
  float* const sums = queries + Shape::kRows * Shape::kDims;
  auto* const arrivals = reinterpret_cast<uint64_t*>(sums + Shape::kRows * 16);
  auto** const pages = reinterpret_cast<const uint16_t**>(arrivals + Shape::kMostSteps);
  auto* const most = reinterpret_cast<uint32_t*>(pages + 2 * kSplitPages);
  return {{nullptr, queries, weights, most, sums, nullptr, nullptr}, at, arrivals, pages};
}

// Which steps read of a split what is seen of it: so many of K, and as many of V.
template <class Shape>
BATON_DEVICE uint32_t first_step(const Seen& seen) {
  return seen.begin / Shape::kStepTokens;
}
template <class Shape>
BATON_DEVICE uint32_t steps_of(const Seen& seen) {
  return pieces_of(seen.end, Shape::kStepTokens) - first_step<Shape>(seen);
}

// What a block does of a split: nothing where `seen` is empty.
struct SplitWork {
  SplitPlace at;
  Seen seen;
  BATON_DEVICE bool any() const { return seen.end != 0; }
};
BATON_DEVICE SplitWork work_of(const SplitAttention& a, const SplitItem& place,
                               const SplitTask& task, uint32_t kv_head) {
  const uint32_t last = task.queries.position, first = first_seen_from(last, a.window);
  return {{task, kv_head, place.split, first / kSplitTokens == last / kSplitTokens},
          seen_of_split(place.split * kSplitTokens, first, last)};
}
template <class Block>
BATON_DEVICE const uint16_t* page_of_work(Block& block, const SplitAttention& a,
                                          const SplitWork& work, uint32_t page) {
  if (page * kBlockTokens >= work.seen.end || (page + 1) * kBlockTokens <= work.seen.begin) {
    return nullptr;
  }
  const uint32_t* const table =
      a.block_tables + work.at.task.queries.table + work.at.split * kSplitPages;
  return page_at(a.cache, block.load(table + page), work.at.kv_head);
}

// The copies of a step of a split, whose pages these are; the number'th of all of the block.
template <class Shape, class Block>
BATON_DEVICE void start_step(Block& block, const SplitAttention& a, const SplitMemory& memory,
                             const Seen& seen, const uint16_t* const* pages, uint32_t step,
                             uint32_t number) {
  const uint32_t steps = steps_of<Shape>(seen), slot = number % Shape::kSteps;
  const bool values = step >= steps;
  const uint32_t first =
      (first_step<Shape>(seen) + (values ? step - steps : step)) * Shape::kStepPages;
  const uint32_t from = larger(first, seen.begin / kBlockTokens);
  const uint32_t to = smaller(first + Shape::kStepPages, pieces_of(seen.end, kBlockTokens));
  const uint32_t bytes = a.cache.head_dim * kBlockTokens * 2;
  block.each_free([&](uint32_t thread) {
    if (thread >= 32) return;
    const uint32_t page = first + thread;
    const uint16_t* run = nullptr;
    if (page >= from && page < to) run = pages[page] + (values ? bytes / 2 : 0);
    block.copy_runs(memory.arrivals + slot, (to - from) * bytes,
                    memory.steps + slot * Shape::kStepBytes + place_in_step(thread, bytes), run,
                    bytes);
  });
}

// q . k of two tokens' even or odd dimensions.
template <class Shape>
BATON_DEVICE void add_step_keys(const SplitMemory& memory, const std::byte* step, uint32_t dims,
                                uint32_t thread, StepSums<Shape>& sums) {
  using Row = Floats<Shape::kRows>;
  const uint32_t page = thread / 16, pair = thread % 16 / 2, odd = thread % 2;
  sums = {};
  if (page >= Shape::kStepPages) return;
  const std::byte* keys = step + place_in_step(page, dims * kBlockTokens * 2) +
                          odd * (kBlockTokens * 2) + pair * sizeof(uint32_t);
  const float* q = memory.tile.queries + odd * Shape::kRows;
  BATON_NO_UNROLL
  for (uint32_t dim = 0; dim < dims; dim += 16) {
    BATON_UNROLL
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(keys + i * (4 * kBlockTokens));
      const Row factors = *reinterpret_cast<const Row*>(q + i * 2 * Shape::kRows);
      BATON_UNROLL
      for (uint32_t t = 0; t < 2; ++t) {
        BATON_UNROLL
        for (uint32_t r = 0; r < Shape::kRows; ++r) {
          sums.of[t].of[r] = fmaf(factors.of[r], from_pair(two, t), sums.of[t].of[r]);
        }
      }
    }
    keys += 16 * kBlockTokens * 2;
    q += 16 * Shape::kRows;
  }
}

// The scores of a step's tokens, where their weights will be; `first`: its first token. Of two
// neighbours one takes the first token of both, the other the second.
template <class Shape, class Block>
BATON_DEVICE void score_step(Block& block, const SplitMemory& memory, const std::byte* step,
                             uint32_t dims, const Seen& seen, uint32_t first) {
  auto sums = block.template per_thread<StepSums<Shape>>();
  auto others = block.template per_thread<StepScores<Shape>>();
  block.each_warp([&](uint32_t thread) {
    add_step_keys<Shape>(memory, step, dims, thread, sums[thread]);
    const bool odd = thread % 2 != 0;
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kRows; ++r) {
      const float low = sums[thread].of[0].of[r], high = sums[thread].of[1].of[r];
      sums[thread].of[0].of[r] = odd ? high : low;
      others[thread].of[0].of[r] = odd ? low : high;
    }
  });
  block.swap_neighbours(others);
  block.each([&](uint32_t thread) {
    if (thread / 16 >= Shape::kStepPages) return;
    const uint32_t token = first + thread;
    const bool sees = token >= seen.begin && token < seen.end;
    Floats<Shape::kRows> scores;
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kRows; ++r) {
      scores.of[r] = sees ? sums[thread].of[0].of[r] + others[thread].of[0].of[r] : -INFINITY;
    }
    *reinterpret_cast<Floats<Shape::kRows>*>(weights_at<typename Shape::Tile>(memory.tile, token)) =
        scores;
  });
}

// The first of a thread's dimensions, and of its queries.
template <class Shape>
BATON_DEVICE uint32_t split_dim(uint32_t thread) {
  return thread % Shape::kValueThreads * Shape::kLaneDims;
}
template <class Shape>
BATON_DEVICE uint32_t split_row(uint32_t thread) {
  return thread / Shape::kValueThreads * Shape::kValueRows;
}

// kDims: of a token, or 0: as many as `dims` says.
template <class Shape, uint32_t kDims>
BATON_DEVICE void add_step_values(const SplitMemory& memory, const std::byte* step, uint32_t dims,
                                  const Seen& seen, uint32_t first, uint32_t thread,
                                  SplitSums<Shape>& sums) {
  const uint32_t dim = split_dim<Shape>(thread), row = split_row<Shape>(thread);
  const uint32_t token_dims = kDims != 0 ? kDims : dims;
  if (dim >= token_dims) return;
  const auto add = [&](const std::byte* values, const float* weights) {
    const auto pairs = *reinterpret_cast<const Words<Shape::kLaneDims / 2>*>(values);
    const auto factors = *reinterpret_cast<const Floats<Shape::kValueRows>*>(weights);
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kValueRows; ++r) {
      BATON_UNROLL
      for (uint32_t d = 0; d < Shape::kLaneDims; ++d) {
        sums.of[r].of[d] = fmaf(factors.of[r], from_pair(pairs.word[d / 2], d), sums.of[r].of[d]);
      }
    }
  };
  const bool whole = first >= seen.begin && first + Shape::kStepTokens <= seen.end;
  BATON_NO_UNROLL
  for (uint32_t page = 0; page < Shape::kStepPages; ++page) {
    const std::byte* const values =
        step + place_in_step(page, token_dims * kBlockTokens * 2) + dim * sizeof(uint16_t);
    const uint32_t begin = first + page * kBlockTokens;
    const float* const weights = weights_at<typename Shape::Tile>(memory.tile, begin) + row;
    if (whole) {
      BATON_UNROLL
      for (uint32_t t = 0; t < kBlockTokens; ++t) {
        add(values + t * token_dims * 2, weights + t * Shape::kRows + t / kOwnTokens * 4);
      }
      continue;
    }
    // Values that a query must not see may be NaN.
    for (uint32_t t = 0; t < kBlockTokens; ++t) {
      if (begin + t < seen.begin || begin + t >= seen.end) continue;
      add(values + t * token_dims * 2, weights + t * Shape::kRows + t / kOwnTokens * 4);
    }
  }
}

// Writes the result of this split for some dimensions of a query: a partial result, or the final
// one if there is only one split.
template <class Shape, class Block>
BATON_DEVICE void store_split(Block& block, const SplitAttention& a, const SplitPlace& at,
                              const TileMemory& memory, uint32_t query, uint32_t dim,
                              Floats<Shape::kLaneDims> own) {
  using Row = Floats<Shape::kLaneDims>;
  const float most = most_of<Shape>(memory, query);
  if (at.alone) {
    const SplitFactors factors = split_factors(-INFINITY, most);
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
  block.store(reinterpret_cast<Floats<2>*>(partial), Floats<2>{{most, sum_of(memory, query)}});
}

template <class Shape>
BATON_DEVICE void forget_other_tokens(const SplitMemory& memory, const Seen& seen,
                                      uint32_t thread) {
  const uint32_t begin = first_step<Shape>(seen) * Shape::kStepTokens;
  const uint32_t end = begin + steps_of<Shape>(seen) * Shape::kStepTokens;
  for (uint32_t token = thread; token < kSplitTokens; token += Shape::kThreads) {
    if (token >= begin && token < end) continue;
    float* const scores = weights_at<typename Shape::Tile>(memory.tile, token);
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kRows; ++r) scores[r] = -INFINITY;
  }
}

template <class Shape, class Block>
BATON_DEVICE void attend_items(Block& block, const SplitAttention& a, uint32_t items) {
  using Tile = typename Shape::Tile;
  const SplitMemory memory = split_memory<Shape>(block.large_shared());
  const uint32_t heads = a.cache.kv_heads, dims = a.cache.head_dim;
  block.each([&](uint32_t thread) {
    if (thread < Shape::kSteps) block.make_arrival(memory.arrivals + thread);
  });
  auto scores = block.template per_thread<OwnScores<Tile>>();
  auto values = block.template per_thread<SplitSums<Shape>>();
  auto pages_ahead = block.template per_thread<const uint16_t*>();
  SplitWork work = {}, ahead = {};
  bool known = false;  // of this split what it is, and its pages
  uint32_t started = 0, taken = 0, which = 0;
  for (uint32_t item = block.index(); item < items; item += block.blocks()) {
    if (known) {
      work = ahead;
      which ^= 1;
    } else {
      const SplitItem place = block.load(a.items + item / heads);
      work = work_of(a, place, block.load(a.tasks + place.task), item % heads);
      if (!work.any()) continue;
      block.each([&](uint32_t thread) {
        if (thread >= kSplitPages) return;
        memory.pages[which * kSplitPages + thread] = page_of_work(block, a, work, thread);
      });
    }
    // Loads the next item while this one is computed.
    const uint32_t next = item + block.blocks();
    const bool more = next < items;
    SplitItem place_ahead = {};
    if (more) place_ahead = block.load(a.items + next / heads);
    known = false;
    const uint32_t steps = steps_of<Shape>(work.seen), first = taken;
    const auto start_more = [&] {
      // Steps of this split, and then of the next one.
      const uint32_t own = 2 * steps, all = own + (known ? 2 * steps_of<Shape>(ahead.seen) : 0);
      BATON_NO_UNROLL
      for (; started < smaller(taken + Shape::kSteps, first + all); ++started) {
        const uint32_t step = started - first;
        const bool next_split = step >= own;
        start_step<Shape>(block, a, memory, next_split ? ahead.seen : work.seen,
                          memory.pages + (next_split ? which ^ 1 : which) * kSplitPages,
                          next_split ? step - own : step, started);
      }
    };
    const auto step_there = [&] {
      block.await_arrival(memory.arrivals + taken % Shape::kSteps, taken / Shape::kSteps);
      return memory.steps + taken % Shape::kSteps * Shape::kStepBytes;
    };
    start_more();
    block.each([&](uint32_t thread) {
      load_queries<Tile>(block, memory.tile, dims, thread, [&](uint32_t row) {
        return row < work.at.task.queries.count
                   ? a.q + head_place(a, work.at.task, work.at.kv_head, row)
                   : nullptr;
      });
      forget_other_tokens<Shape>(memory, work.seen, thread);
    });
    const uint32_t token = first_step<Shape>(work.seen) * Shape::kStepTokens;
    SplitTask task_ahead = {};
    for (uint32_t step = 0; step < steps; ++step) {
      const std::byte* const keys = step_there();
      score_step<Shape>(block, memory, keys, dims, work.seen, token + step * Shape::kStepTokens);
      ++taken;
      start_more();
      if (step == 0 && more) task_ahead = block.load(a.tasks + place_ahead.task);
    }
    ahead = {};
    if (more) ahead = work_of(a, place_ahead, task_ahead, next % heads);
    block.each_warp([&](uint32_t thread) {
      pages_ahead[thread] = ahead.any() ? page_of_work(block, a, ahead, thread) : nullptr;
      BATON_UNROLL
      for (uint32_t t = 0; t < kOwnTokens; ++t) {
        scores[thread].of[t] = *reinterpret_cast<const Floats<Shape::kRows>*>(
            weights_at<Tile>(memory.tile, thread * kOwnTokens + t));
      }
    });
    weigh_scores<Tile>(block, memory.tile, scores);
    block.each([&](uint32_t thread) {
      if (thread < kSplitPages) {
        memory.pages[(which ^ 1) * kSplitPages + thread] = pages_ahead[thread];
      }
      values[thread] = {};
    });
    known = ahead.any();
    for (uint32_t step = 0; step < steps; ++step) {
      const std::byte* const from = step_there();
      block.each([&](uint32_t thread) {
        if (Shape::kDims == 128 && dims == Shape::kDims) {
          add_step_values<Shape, Shape::kDims>(memory, from, dims, work.seen,
                                               token + step * Shape::kStepTokens, thread,
                                               values[thread]);
        } else {
          add_step_values<Shape, 0>(memory, from, dims, work.seen,
                                    token + step * Shape::kStepTokens, thread, values[thread]);
        }
      });
      ++taken;
      start_more();
    }
    block.each_free([&](uint32_t thread) {
      const uint32_t dim = split_dim<Shape>(thread), row = split_row<Shape>(thread);
      if (dim >= dims) return;
      BATON_UNROLL
      for (uint32_t r = 0; r < Shape::kValueRows; ++r) {
        if (row + r >= work.at.task.queries.count) break;
        store_split<Tile>(block, a, work.at, memory.tile, row + r, dim, values[thread].of[r]);
      }
    });
  }
}

template <class Block>
BATON_DEVICE void attend_splits(Block& block, const SplitAttention& a) {
  const uint32_t items = block.load(a.counts) * a.cache.kv_heads;
  if (a.cache.head_dim <= 64) {
    attend_items<SplitShape<kNarrowGroup, 64>>(block, a, items);
  } else if (a.cache.head_dim <= 128) {
    attend_items<SplitShape<kNarrowGroup, 128>>(block, a, items);
  } else {
    attend_items<SplitShape<kNarrowGroup, kMaxHeadDim>>(block, a, items);
  }
}

// The same for larger groups, whose arithmetic holds them up and not what they read: a thread has
// more tokens of K, and twice as many blocks are on a multiprocessor (tiles-inl.h).
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
BATON_DEVICE void attend_wide_splits(Block& block, const SplitAttention& a) {
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
    with_shape<1, kTaskQueries>(split.dims, attend);
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
