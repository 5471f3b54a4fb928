// Attention of a tile of queries with a common KV head over one split of their context: what
// attend_pages (pages-inl.h) is made of, and in part attend_splits (attention-inl.h). Each byte of
// K and V is read once for all queries of a tile.
//
// K and V come to shared memory by asynchronous copies of 16 bytes, in stages of 4 KiB, some stages
// ahead of what computes. Of K a stage is 8 dimensions of all 256 tokens, of V the dimensions of up
// to 16 tokens. 64 threads take the scores of up to 8 queries: each has 8 tokens of either the even
// or the odd dimensions, so that a number of K is widened once for all of the queries, and a
// query's is read once for 8 tokens. A warp takes the sums over V of some queries: each thread a
// few dimensions next to each other, token by token.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// How the splits of a context are added, one after the other: what the engine's attention does
// (engine/kernels/attention.h), to the bit.

// Factors for adding a split: the result so far times `keep`, plus the split's own times `add`.
struct SplitFactors {
  float keep;
  float add;
};
// The factors of a split whose largest score is `own`, after others with `before` (-inf: none).
BATON_DEVICE SplitFactors split_factors(float before, float own) {
  const float now = larger(before, own);
  return {exponential(before - now), exponential(own - now)};
}
BATON_DEVICE float add_split(const SplitFactors& factors, float before, float own) {
  return fmaf(factors.add, own, factors.keep * before);
}

// A token at `position` attends to [first, position].
BATON_DEVICE uint32_t first_seen_from(uint32_t position, uint32_t window) {
  return window == 0 || position + 1 <= window ? 0 : position + 1 - window;
}

// K of a page, which a block's table names; V of it lies head_dim * kBlockTokens elements behind.
BATON_DEVICE const uint16_t* page_at(const CacheLayer& cache, uint32_t number, uint32_t kv_head) {
  return cache.base +
         (uint64_t{number} * cache.kv_heads + kv_head) * 2 * cache.head_dim * kBlockTokens;
}

inline constexpr uint32_t kSplitPages = kSplitTokens / kBlockTokens;
inline constexpr uint32_t kTileStages = 4;  // that shared memory holds
inline constexpr uint32_t kStageDims = 8;
inline constexpr uint32_t kStageElements = kStageDims * kSplitTokens;
inline constexpr uint32_t kGroupThreads = 64;
inline constexpr uint32_t kKeyTokens = 8;  // of a thread
inline constexpr uint32_t kOwnTokens = 4;  // once its neighbour has taken the others

template <uint32_t kCount>
struct alignas(kCount % 4 == 0   ? 16
               : kCount % 2 == 0 ? 8
                                 : 4) Floats {
  float of[kCount];
};

// A tile has kRows queries: kGroups times kGroupRows, for 64 threads each. A thread sums kLaneDims
// dimensions of V.
template <uint32_t kGroupCount, uint32_t kGroupRowCount, uint32_t kLaneDimCount>
struct TileShape {
  static constexpr uint32_t kGroups = kGroupCount;
  static constexpr uint32_t kGroupRows = kGroupRowCount;
  static constexpr uint32_t kLaneDims = kLaneDimCount;
  static constexpr uint32_t kRows = kGroups * kGroupRows;
  static constexpr uint32_t kThreads = kGroups * kGroupThreads;
  static constexpr uint32_t kWarpRows = kRows / (kThreads / 32);
  static constexpr uint32_t kValueRow = 32 * kLaneDims;  // elements of a token in a stage of V
  static constexpr uint32_t kStageTokens = kLaneDims <= 4 ? kBlockTokens : kBlockTokens / 2;
  static_assert(kStageTokens * kValueRow <= kStageElements);
  // With gaps, so that threads next to each other store to different banks.
  static constexpr uint32_t kWeights = kSplitTokens * kRows + kSplitTokens / kOwnTokens * 4;
};
template <class Shape>
struct KeySums {
  Floats<Shape::kGroupRows> of[kKeyTokens];
};
template <class Shape>
struct OwnScores {
  Floats<Shape::kGroupRows> of[kOwnTokens];
};
template <class Shape>
struct ValueSums {
  Floats<Shape::kLaneDims> of[Shape::kWarpRows];
};

// Tokens [begin, end) of a split.
struct Seen {
  uint32_t begin;
  uint32_t end;
};

// The positions of [first, last] that lie in the split beginning at `from`; {0, 0} if there are
// none.
BATON_DEVICE Seen seen_of_split(uint32_t from, uint32_t first, uint32_t last) {
  if (first >= from + kSplitTokens || last < from) return {0, 0};
  return {larger(first, from) - from, smaller(last + 1, from + kSplitTokens) - from};
}

struct TileMemory {
  uint16_t* stages;
  float* queries;          // [head_dim][kRows]; may be where the weights are, which come later
  float* weights;          // [kSplitTokens][kRows], see weights_at()
  uint32_t* most;          // [2 kGroups][kGroupRows]: as ordered words, of each warp's tokens
  float* sums;             // [kRows][16]: of every 16th weight
  Seen* seen;              // [kRows]
  const uint16_t** pages;  // [kSplitPages]: K of each
};

// What any query, and what every query, of the tile sees of a split.
struct TileSplit {
  Seen any;
  Seen every;
  uint32_t dims;
  BATON_DEVICE uint32_t first_page() const { return any.begin / kBlockTokens; }
  BATON_DEVICE uint32_t end_page() const { return pieces_of(any.end, kBlockTokens); }
  BATON_DEVICE uint32_t key_stages() const { return dims / kStageDims; }
  template <class Shape>
  BATON_DEVICE uint32_t stages() const {
    return key_stages() + pieces_of(any.end, Shape::kStageTokens) - any.begin / Shape::kStageTokens;
  }
  template <class Shape>
  BATON_DEVICE uint32_t first_token(uint32_t stage) const {
    return (any.begin / Shape::kStageTokens + stage - key_stages()) * Shape::kStageTokens;
  }
};

BATON_DEVICE uint16_t* stage_at(const TileMemory& memory, uint32_t stage) {
  return memory.stages + stage % kTileStages * kStageElements;
}
template <class Shape>
BATON_DEVICE float* weights_at(const TileMemory& memory, uint32_t token) {
  return memory.weights + token * Shape::kRows + token / kOwnTokens * 4;
}
// A thread's group, and its place there: of K it has page place / 4, half a page's tokens, and the
// even or the odd dimensions.
template <class Shape>
BATON_DEVICE uint32_t group_of(uint32_t thread) {
  return Shape::kGroups == 1 ? 0 : thread / kGroupThreads;
}
template <class Shape>
BATON_DEVICE uint32_t place_of(uint32_t thread) {
  return Shape::kGroups == 1 ? thread : thread % kGroupThreads;
}

// Numbers as words of the same order.
BATON_DEVICE uint32_t ordered_word(float value) {
  const uint32_t bits = bits_of(value);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
BATON_DEVICE float from_ordered_word(uint32_t word) {
  return float_of(word >> 31 != 0 ? word & 0x7fffffffu : ~word);
}
BATON_DEVICE float from_pair(uint32_t word, uint32_t which) {
  return float_of(which % 2 == 0 ? word << 16 : word & 0xffff0000u);
}

// Where a thread's copies begin: of K in one page, of V in each.
struct TileCopies {
  const uint16_t* keys;  // null: no query sees that page
  uint32_t values;       // from K of a page; 0: it copies nothing of V
};
template <class Shape>
BATON_DEVICE TileCopies copies_of(const TileMemory& memory, const TileSplit& split,
                                  uint32_t thread) {
  constexpr uint32_t kPieces = Shape::kValueRow / 8;  // of 16 bytes, of a token
  TileCopies copies = {nullptr, 0};
  const uint32_t place = place_of<Shape>(thread), page = place / 4;
  if (page >= split.first_page() && page < split.end_page()) {
    copies.keys = memory.pages[page] + (group_of<Shape>(thread) * 2 + place % 2) * kBlockTokens +
                  place / 2 % 2 * kKeyTokens;
  }
  const uint32_t piece = thread % kPieces * 8, token = thread / kPieces;
  if (piece < split.dims) copies.values = (kBlockTokens + token) * split.dims + piece;
  return copies;
}

// This thread's copies of a stage; all of it is one group of copies, of none behind the last stage.
template <class Shape, class Block>
BATON_DEVICE void fetch_stage(Block& block, const TileMemory& memory, const TileSplit& split,
                              uint32_t stage, uint32_t thread, const TileCopies& copies) {
  uint16_t* const to = stage_at(memory, stage) + thread * 8;
  if (stage < split.key_stages()) {
    if (copies.keys != nullptr) {
      const uint16_t* const from = copies.keys + stage * (kStageDims * kBlockTokens);
      BATON_UNROLL
      for (uint32_t pair = 0; pair < kStageDims / 2; pair += Shape::kGroups) {
        block.copy_16_of_line(to + pair * kGroupThreads * 8, from + pair * 2 * kBlockTokens);
      }
    }
  } else if (stage < split.stages<Shape>() && copies.values != 0) {
    constexpr uint32_t kAtOnce = Shape::kThreads * 8 / Shape::kValueRow;  // tokens
    const uint32_t first = split.first_token<Shape>(stage);
    const uint16_t* from = memory.pages[first / kBlockTokens] + copies.values;
    if constexpr (Shape::kStageTokens < kBlockTokens) from += first % kBlockTokens * split.dims;
    BATON_UNROLL
    for (uint32_t token = 0; token < Shape::kStageTokens; token += kAtOnce) {
      block.copy_16_of_line(to + token * Shape::kValueRow, from);
      from += kAtOnce * split.dims;
    }
  }
  block.end_copies();
}

// Behind this a stage is there for all threads, and none reads the one before.
template <class Block>
BATON_DEVICE void await_stage(Block& block) {
  block.each([&](uint32_t) { block.template wait_copies<kTileStages - 2>(); });
}

// q . k of a stage's even or odd dimensions.
template <class Shape>
BATON_DEVICE void add_keys(const TileMemory& memory, uint32_t stage, uint32_t thread,
                           KeySums<Shape>& sums) {
  using Row = Floats<Shape::kGroupRows>;
  const uint32_t place = place_of<Shape>(thread);
  const uint16_t* const keys = stage_at(memory, stage) + place * 8;
  const float* const q = memory.queries + (stage * kStageDims + place % 2) * Shape::kRows +
                         group_of<Shape>(thread) * Shape::kGroupRows;
  BATON_UNROLL
  for (uint32_t pair = 0; pair < kStageDims / 2; ++pair) {
    const Vector16 eight = *reinterpret_cast<const Vector16*>(keys + pair * kGroupThreads * 8);
    const Row factors = *reinterpret_cast<const Row*>(q + pair * 2 * Shape::kRows);
    BATON_UNROLL
    for (uint32_t t = 0; t < kKeyTokens; ++t) {
      const float key = from_pair(eight.word[t / 2], t);
      BATON_UNROLL
      for (uint32_t r = 0; r < Shape::kGroupRows; ++r) {
        sums.of[t].of[r] = fmaf(factors.of[r], key, sums.of[t].of[r]);
      }
    }
  }
}

// Both chains of each score added: of two neighbours one takes the first four tokens of both, the
// other the last. -inf where a query sees nothing.
template <class Shape, class Block, class Sums, class Scores>
BATON_DEVICE void join_chains(Block& block, const TileMemory& memory, const TileSplit& split,
                              Sums& sums, Scores& scores) {
  auto others = block.template per_thread<OwnScores<Shape>>();
  block.each_warp([&](uint32_t thread) {
    const bool odd = thread % 2 != 0;
    BATON_UNROLL
    for (uint32_t t = 0; t < kOwnTokens; ++t) {
      BATON_UNROLL
      for (uint32_t r = 0; r < Shape::kGroupRows; ++r) {
        const float low = sums[thread].of[t].of[r], high = sums[thread].of[t + kOwnTokens].of[r];
        scores[thread].of[t].of[r] = odd ? high : low;
        others[thread].of[t].of[r] = odd ? low : high;
      }
    }
  });
  block.swap_neighbours(others);
  block.each_warp([&](uint32_t thread) {
    const bool whole = split.every.begin == 0 && split.every.end == kSplitTokens;
    const uint32_t token = place_of<Shape>(thread) * kOwnTokens;
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kGroupRows; ++r) {
      Seen seen = split.every;
      if (!whole) seen = memory.seen[group_of<Shape>(thread) * Shape::kGroupRows + r];
      BATON_UNROLL
      for (uint32_t t = 0; t < kOwnTokens; ++t) {
        float& score = scores[thread].of[t].of[r];
        score = score + others[thread].of[t].of[r];
        if (!whole && (token + t < seen.begin || token + t >= seen.end)) score = -INFINITY;
      }
    }
  });
}

// The largest score of a query: -inf if it sees nothing of the split.
template <class Shape>
BATON_DEVICE float most_of(const TileMemory& memory, uint32_t row) {
  const uint32_t group = row / Shape::kGroupRows, own = row % Shape::kGroupRows;
  const uint32_t* const warps = memory.most + group * 2 * Shape::kGroupRows + own;
  return from_ordered_word(larger(warps[0], warps[Shape::kGroupRows]));
}

// Scores to exponentials in shared memory, and sums of every 16th of them, which a barrier behind
// this shows to all.
template <class Shape, class Block, class Scores>
BATON_DEVICE void weigh_scores(Block& block, const TileMemory& memory, Scores& scores) {
  auto most = block.template per_thread<uint32_t>();
  BATON_UNROLL
  for (uint32_t r = 0; r < Shape::kGroupRows; ++r) {
    block.each_warp([&](uint32_t thread) {
      float own = scores[thread].of[0].of[r];
      BATON_UNROLL
      for (uint32_t t = 1; t < kOwnTokens; ++t) own = larger(own, scores[thread].of[t].of[r]);
      most[thread] = ordered_word(own);
    });
    block.warp_max(most);
    block.each_warp([&](uint32_t thread) {
      if (thread % 32 == 0) memory.most[thread / 32 * Shape::kGroupRows + r] = most[thread];
    });
  }
  block.each([](uint32_t) {});
  block.each([&](uint32_t thread) {
    const uint32_t row = group_of<Shape>(thread) * Shape::kGroupRows;
    const uint32_t token = place_of<Shape>(thread) * kOwnTokens;
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kGroupRows; ++r) {
      const float largest = most_of<Shape>(memory, row + r);
      BATON_UNROLL
      for (uint32_t t = 0; t < kOwnTokens; ++t) {
        float& score = scores[thread].of[t].of[r];
        score = largest == -INFINITY ? 0.0f : exponential(score - largest);
      }
    }
    BATON_UNROLL
    for (uint32_t t = 0; t < kOwnTokens; ++t) {
      float* const to = weights_at<Shape>(memory, token + t) + row;
      *reinterpret_cast<Floats<Shape::kGroupRows>*>(to) = scores[thread].of[t];
    }
  });
  block.each_warp([&](uint32_t thread) {
    for (uint32_t i = thread; i < Shape::kRows * 16; i += Shape::kThreads) {
      const uint32_t row = i % Shape::kRows, lane = i / Shape::kRows;
      float sum = 0;
      BATON_UNROLL
      for (uint32_t page = 0; page < kSplitPages; ++page) {
        sum = sum + weights_at<Shape>(memory, page * kBlockTokens + lane)[row];
      }
      memory.sums[row * 16 + lane] = sum;
    }
  });
}
BATON_DEVICE float sum_of(const TileMemory& memory, uint32_t row) {
  float sum = 0;
  BATON_UNROLL
  for (uint32_t lane = 0; lane < 16; ++lane) sum = sum + memory.sums[row * 16 + lane];
  return sum;
}

// The first of a thread's dimensions, and of its warp's queries.
template <class Shape>
BATON_DEVICE uint32_t value_dim(uint32_t thread) {
  return thread % 32 * Shape::kLaneDims;
}
template <class Shape>
BATON_DEVICE uint32_t value_row(uint32_t thread) {
  return thread / 32 * Shape::kWarpRows;
}

template <class Shape>
BATON_DEVICE void add_values(const TileMemory& memory, const TileSplit& split, uint32_t stage,
                             uint32_t thread, ValueSums<Shape>& sums) {
  const uint32_t dim = value_dim<Shape>(thread), row = value_row<Shape>(thread);
  if (dim >= split.dims) return;
  const uint32_t first = split.first_token<Shape>(stage);
  const uint16_t* const values = stage_at(memory, stage) + dim;
  const float* const weights = weights_at<Shape>(memory, first) + row;
  const auto add = [&](uint32_t t, const auto& sees) {
    const auto pairs =
        *reinterpret_cast<const Floats<Shape::kLaneDims / 2>*>(values + t * Shape::kValueRow);
    const auto factors = *reinterpret_cast<const Floats<Shape::kWarpRows>*>(
        weights + t * Shape::kRows + t / kOwnTokens * 4);
    BATON_UNROLL
    for (uint32_t r = 0; r < Shape::kWarpRows; ++r) {
      if (!sees(t, r)) continue;
      BATON_UNROLL
      for (uint32_t d = 0; d < Shape::kLaneDims; ++d) {
        const float value = from_pair(bits_of(pairs.of[d / 2]), d);
        sums.of[r].of[d] = fmaf(factors.of[r], value, sums.of[r].of[d]);
      }
    }
  };
  if (first >= split.every.begin && first + Shape::kStageTokens <= split.every.end) {
    BATON_UNROLL
    for (uint32_t t = 0; t < Shape::kStageTokens; ++t) {
      add(t, [](uint32_t, uint32_t) { return true; });
    }
    return;
  }
  // Values that a query must not see may be NaN.
  const auto sees = [&](uint32_t t, uint32_t r) {
    const Seen seen = memory.seen[row + r];
    return first + t >= seen.begin && first + t < seen.end;
  };
  for (uint32_t t = 0; t < Shape::kStageTokens; ++t) add(t, sees);
}

// The sums over V of a split, whose queries, pages and seen tokens are in memory; behind a barrier
// also most_of() and sum_of().
template <class Shape, class Block, class Values>
BATON_DEVICE void attend_tile(Block& block, const TileMemory& memory, const TileSplit& split,
                              Values& values) {
  auto copies = block.template per_thread<TileCopies>();
  block.each_warp([&](uint32_t thread) {
    copies[thread] = copies_of<Shape>(memory, split, thread);
    BATON_UNROLL
    for (uint32_t stage = 0; stage + 1 < kTileStages; ++stage) {
      fetch_stage<Shape>(block, memory, split, stage, thread, copies[thread]);
    }
  });
  const auto fetch_behind = [&](uint32_t stage, uint32_t thread) {
    fetch_stage<Shape>(block, memory, split, stage + kTileStages - 1, thread, copies[thread]);
  };
  uint32_t stage = 0;
  auto scores = block.template per_thread<OwnScores<Shape>>();
  {
    auto sums = block.template per_thread<KeySums<Shape>>();
    block.each_warp([&](uint32_t thread) { sums[thread] = {}; });
    for (; stage < split.key_stages(); ++stage) {
      await_stage(block);
      block.each_warp([&](uint32_t thread) {
        fetch_behind(stage, thread);
        add_keys<Shape>(memory, stage, thread, sums[thread]);
      });
    }
    join_chains<Shape>(block, memory, split, sums, scores);
  }
  weigh_scores<Shape>(block, memory, scores);
  block.each_warp([&](uint32_t thread) { values[thread] = {}; });
  for (; stage < split.stages<Shape>(); ++stage) {
    await_stage(block);
    block.each_warp([&](uint32_t thread) {
      fetch_behind(stage, thread);
      add_values<Shape>(memory, split, stage, thread, values[thread]);
    });
  }
}

// Which dimensions a thread has: of the smallest shape that has them all.
template <uint32_t kGroups, uint32_t kGroupRows, class Function>
BATON_DEVICE void with_shape(uint32_t dims, const Function& function) {
  if (dims <= 64) {
    function(TileShape<kGroups, kGroupRows, 2>());
  } else if (dims <= 128) {
    function(TileShape<kGroups, kGroupRows, 4>());
  } else {
    function(TileShape<kGroups, kGroupRows, 8>());
  }
}

// Queries to shared memory: place(row) is the first element of a query's, or of none.
template <class Shape, class Block, class Find>
BATON_DEVICE void load_queries(Block& block, const TileMemory& memory, uint32_t dims,
                               uint32_t thread, const Find& find) {
  for (uint32_t i = thread; i < Shape::kRows * (dims / 4); i += Shape::kThreads) {
    const uint32_t row = i % Shape::kRows, dim = i / Shape::kRows * 4;
    const float* const from = find(row);
    const Floats<4> four =
        from != nullptr ? block.load(reinterpret_cast<const Floats<4>*>(from + dim)) : Floats<4>{};
    for (uint32_t d = 0; d < 4; ++d) memory.queries[(dim + d) * Shape::kRows + row] = four.of[d];
  }
}

}  // namespace baton::gpudirect::kernels
