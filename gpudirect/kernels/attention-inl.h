// Attention of single new tokens over their pages, split by split: a block of threads for each
// split and KV head, so that one long context fills a GPU, and all query heads that share a KV head
// together, so that each byte of K and V is read once. The bits of the engine's attention and of
// attend_pages (pages-inl.h, which is plain).
//
// K and V come to shared memory by asynchronous copies of 16 bytes, a stage ahead of what computes:
// stages of K are 32 dimensions of all 256 tokens, stages of V all dimensions of 64 tokens.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/splits-inl.h"

namespace baton::gpudirect::kernels {

inline constexpr uint32_t kSplitPages = kSplitTokens / kBlockTokens;
inline constexpr uint32_t kStageDims = 32;    // of K
inline constexpr uint32_t kStageTokens = 64;  // of V
// Elements of a page's part of a stage of K, and of what lies between two of them: 64 bytes apart
// in the banks of shared memory, since a warp reads two pages at a time.
inline constexpr uint32_t kKeyPage = kStageDims * kBlockTokens + 32;
inline constexpr uint32_t kStageElements = kSplitPages * kKeyPage;
static_assert(kStageElements >= kStageTokens * kMaxHeadDim);

struct alignas(8) TwoFloats {
  float of[2];
};
struct alignas(16) FourFloats {
  float of[4];
};

// The sums of a thread: of K those of two tokens, of V those of two dimensions.
template <uint32_t kQueries>
struct PairSums {
  TwoFloats of[kQueries];
};

struct SplitMemory {
  uint16_t* both_stages;
  float* queries;          // [kMaxHeadDim][kTaskQueries]
  float* weights;          // [kTaskQueries][kSplitTokens]: scores, then exponentials
  float* most;             // [kTaskQueries]
  float* sums;             // [kTaskQueries][16]
  const uint16_t** pages;  // [kSplitPages]: K of each
  BATON_DEVICE uint16_t* stage(uint32_t number) const {
    return both_stages + number % 2 * kStageElements;
  }
};

// A split of a task, and what its token sees of it: positions [begin, end) from its first.
struct SplitPlace {
  SplitTask task;
  uint32_t kv_head;
  uint32_t split;
  uint32_t begin;
  uint32_t end;
  bool alone;  // the token sees no other split
};
BATON_DEVICE SplitPlace split_place(const SplitAttention& a, const SplitTask& task,
                                    uint32_t kv_head, uint32_t split) {
  const uint32_t from = split * kSplitTokens, last = task.queries.position;
  const uint32_t first = first_seen_from(last, a.window);
  SplitPlace at = {task, kv_head, split, 0, 0, first / kSplitTokens == last / kSplitTokens};
  if (first >= from + kSplitTokens || last < from) return at;  // nothing
  at.begin = larger(first, from) - from;
  at.end = smaller(last + 1, from + kSplitTokens) - from;
  return at;
}
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

BATON_DEVICE uint32_t key_stages(const SplitAttention& a) {
  return pieces_of(a.cache.head_dim, kStageDims);
}
BATON_DEVICE uint32_t stages_of(const SplitAttention& a, const SplitPlace& at) {
  return key_stages(a) + pieces_of(at.end, kStageTokens) - at.begin / kStageTokens;
}
BATON_DEVICE uint32_t first_value_token(const SplitAttention& a, const SplitPlace& at,
                                        uint32_t stage) {
  return (at.begin / kStageTokens + stage - key_stages(a)) * kStageTokens;
}

// This thread's copies of a stage; all of it is one group of copies.
template <class Block>
BATON_DEVICE void fetch_stage(Block& block, const SplitAttention& a, const SplitPlace& at,
                              const SplitMemory& memory, uint32_t stage, uint32_t thread) {
  constexpr uint32_t kPieces = kStageDims * kBlockTokens / 8;  // of 16 bytes, of a page of K
  const uint32_t dims = a.cache.head_dim;
  uint16_t* const to = memory.stage(stage);
  const uint32_t end = pieces_of(at.end, kBlockTokens);
  if (stage < key_stages(a)) {
    const uint32_t piece = thread % kPieces * 8, first = stage * kStageDims * kBlockTokens;
    if (first + piece < dims * kBlockTokens) {
      for (uint32_t page = at.begin / kBlockTokens + thread / kPieces; page < end;
           page += block.threads() / kPieces) {
        block.copy_16(to + page * kKeyPage + piece, memory.pages[page] + first + piece);
      }
    }
  } else {
    constexpr uint32_t kPages = kStageTokens / kBlockTokens;
    const uint32_t first = first_value_token(a, at, stage) / kBlockTokens;
    const uint32_t elements = dims * kBlockTokens;  // of a page, one behind the other
    for (uint32_t page = larger(first, at.begin / kBlockTokens);
         page < smaller(first + kPages, end); ++page) {
      for (uint32_t piece = thread * 8; piece < elements; piece += block.threads() * 8) {
        block.copy_16(to + (page - first) * elements + piece,
                      memory.pages[page] + elements + piece);
      }
    }
  }
  block.end_copies();
}

// q . k of two tokens, of the even or of the odd dimensions of a stage.
template <uint32_t kQueries>
BATON_DEVICE void add_scores(const SplitAttention& a, const SplitMemory& memory, uint32_t stage,
                             uint32_t thread, PairSums<kQueries>& sums) {
  const uint32_t page = thread / 16, odd = thread / 8 % 2, pair = thread % 8;
  const uint32_t first = stage * kStageDims;
  const uint32_t count = smaller(kStageDims, a.cache.head_dim - first);
  const uint16_t* const keys = memory.stage(stage) + page * kKeyPage + 2 * pair;
  BATON_UNROLL_BY_4
  for (uint32_t d = odd; d < count; d += 2) {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(keys + d * kBlockTokens);
    const float low = from_bf16(two & 0xffffu), high = from_bf16(two >> 16);
    const float* const q = memory.queries + (first + d) * kTaskQueries;
    BATON_UNROLL
    for (uint32_t g = 0; g < kQueries; g += 4) {
      const FourFloats four = *reinterpret_cast<const FourFloats*>(q + g);
      BATON_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        sums.of[g + i].of[0] = fmaf(four.of[i], low, sums.of[g + i].of[0]);
        sums.of[g + i].of[1] = fmaf(four.of[i], high, sums.of[g + i].of[1]);
      }
    }
  }
}

BATON_DEVICE TwoFloats& weights_of_pair(const SplitMemory& memory, uint32_t query,
                                        uint32_t thread) {
  const uint32_t token = thread / 16 * kBlockTokens + thread % 8 * 2;
  return *reinterpret_cast<TwoFloats*>(memory.weights + query * kSplitTokens + token);
}

// Both chains of each score added; -inf where the token sees nothing.
template <uint32_t kQueries, class Block, class Sums>
BATON_DEVICE void join_scores(Block& block, const SplitPlace& at, const SplitMemory& memory,
                              Sums& sums) {
  block.each([&](uint32_t thread) {
    if (thread / 8 % 2 == 0) return;
    BATON_UNROLL
    for (uint32_t g = 0; g < kQueries; ++g) {
      weights_of_pair(memory, g, thread) = sums[thread].of[g];
    }
  });
  block.each([&](uint32_t thread) {
    if (thread / 8 % 2 != 0) return;
    const uint32_t token = thread / 16 * kBlockTokens + thread % 8 * 2;
    BATON_UNROLL
    for (uint32_t g = 0; g < kQueries; ++g) {
      TwoFloats& pair = weights_of_pair(memory, g, thread);
      for (uint32_t i = 0; i < 2; ++i) {
        const bool seen = token + i >= at.begin && token + i < at.end;
        pair.of[i] = seen ? sums[thread].of[g].of[i] + pair.of[i] : -INFINITY;
      }
    }
  });
}

// Numbers as words of the same order.
BATON_DEVICE uint32_t ordered_word(float value) {
  const uint32_t bits = bits_of(value);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
BATON_DEVICE float from_ordered_word(uint32_t word) {
  return float_of(word >> 31 != 0 ? word & 0x7fffffffu : ~word);
}

// Scores to exponentials, a warp for each query, and sums of every 16th of them.
template <class Block>
BATON_DEVICE void weigh_split(Block& block, const SplitPlace& at, const SplitMemory& memory) {
  auto most = block.template per_thread<uint32_t>();
  block.each_warp([&](uint32_t thread) {
    const float* const scores = memory.weights + thread / 32 * kSplitTokens;
    float own = -INFINITY;
    for (uint32_t place = thread % 32; place < kSplitTokens; place += 32) {
      if (thread / 32 < at.task.queries.count) own = larger(own, scores[place]);
    }
    most[thread] = ordered_word(own);
  });
  block.warp_max(most);
  block.each_warp([&](uint32_t thread) {
    const uint32_t query = thread / 32;
    if (query >= at.task.queries.count) return;
    const float largest = from_ordered_word(most[thread]);
    if (thread % 32 == 0) memory.most[query] = largest;
    float* const scores = memory.weights + query * kSplitTokens;
    for (uint32_t place = thread % 32; place < kSplitTokens; place += 32) {
      scores[place] = exponential(scores[place] - largest);
    }
  });
  block.each([&](uint32_t thread) {
    const uint32_t query = thread / 32, lane = thread % 32;
    if (query >= at.task.queries.count || lane >= 16) return;
    const float* const weights = memory.weights + query * kSplitTokens;
    float sum = 0;
    for (uint32_t place = lane; place < kSplitTokens; place += 16) sum = sum + weights[place];
    memory.sums[query * 16 + lane] = sum;
  });
}

// A thread has two dimensions of V, and of `shares` that have them every so many queries.
struct ValuePlace {
  uint32_t pair;
  uint32_t share;
  uint32_t shares;
};
template <uint32_t kQueries>
BATON_DEVICE ValuePlace value_place(const SplitAttention& a, uint32_t threads, uint32_t thread) {
  const uint32_t pairs = a.cache.head_dim / 2;
  return {thread % pairs, thread / pairs, smaller(threads / pairs, kQueries)};
}
// 256 threads have at least 4 for each of up to 64 pairs.
template <uint32_t kQueries>
inline constexpr uint32_t kOwnQueries = kQueries / 4;

template <uint32_t kQueries>
BATON_DEVICE void add_values(const SplitAttention& a, const SplitPlace& at,
                             const SplitMemory& memory, uint32_t stage, const ValuePlace& place,
                             PairSums<kOwnQueries<kQueries>>& sums) {
  if (place.share >= place.shares) return;
  const uint32_t dims = a.cache.head_dim, from = first_value_token(a, at, stage);
  const uint32_t begin = larger(from, at.begin), end = smaller(from + kStageTokens, at.end);
  const uint16_t* const values = memory.stage(stage) + 2 * place.pair;
  const float* const weights = memory.weights + place.share * kSplitTokens;
  const auto add = [&](uint32_t token, uint32_t j, float weight) {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(values + (token - from) * dims);
    TwoFloats& sum = sums.of[j];
    sum.of[0] = fmaf(weight, from_bf16(two & 0xffffu), sum.of[0]);
    sum.of[1] = fmaf(weight, from_bf16(two >> 16), sum.of[1]);
  };
  uint32_t token = begin;
  while (token < end) {
    const bool four = token % 4 == 0 && token + 4 <= end;
    BATON_UNROLL
    for (uint32_t j = 0; j < kOwnQueries<kQueries>; ++j) {
      if (place.share + j * place.shares >= at.task.queries.count) break;
      const float* const at_token = weights + j * place.shares * kSplitTokens + token;
      if (four) {
        const FourFloats weight = *reinterpret_cast<const FourFloats*>(at_token);
        BATON_UNROLL
        for (uint32_t i = 0; i < 4; ++i) add(token + i, j, weight.of[i]);
      } else {
        add(token, j, *at_token);
      }
    }
    token += four ? 4 : 1;
  }
}

// What this split made of its queries: partial results, or the whole one where there is no other.
template <uint32_t kQueries, class Block>
BATON_DEVICE void store_split(Block& block, const SplitAttention& a, const SplitPlace& at,
                              const SplitMemory& memory, const ValuePlace& place,
                              const PairSums<kOwnQueries<kQueries>>& sums) {
  if (place.share >= place.shares) return;
  BATON_UNROLL
  for (uint32_t j = 0; j < kOwnQueries<kQueries>; ++j) {
    const uint32_t query = place.share + j * place.shares;
    if (query >= at.task.queries.count) break;
    float sum = 0;
    for (uint32_t lane = 0; lane < 16; ++lane) sum = sum + memory.sums[query * 16 + lane];
    TwoFloats own = sums.of[j];
    if (at.alone) {
      const SplitFactors factors = split_factors(-INFINITY, memory.most[query]);
      const float inverse = 1.0f / add_split(factors, 0, sum);
      for (uint32_t i = 0; i < 2; ++i) own.of[i] = add_split(factors, 0, own.of[i]) * inverse;
      float* const out = a.out + head_place(a, at.task, at.kv_head, query);
      block.store(reinterpret_cast<TwoFloats*>(out + 2 * place.pair), own);
      continue;
    }
    float* const partial = partial_of(a, at.task, at.kv_head, at.split, query);
    block.store(reinterpret_cast<TwoFloats*>(partial + kPartialExtra + 2 * place.pair), own);
    if (place.pair == 0) {
      block.store(reinterpret_cast<TwoFloats*>(partial), TwoFloats{{memory.most[query], sum}});
    }
  }
}

// Starts the copies of the next stage, and waits for this one's. The memory of the next is free:
// behind the stage that was there stood a barrier.
template <class Block>
BATON_DEVICE void await_stage(Block& block, const SplitAttention& a, const SplitPlace& at,
                              const SplitMemory& memory, uint32_t stage) {
  block.each([&](uint32_t thread) {
    if (stage + 1 < stages_of(a, at)) {
      fetch_stage(block, a, at, memory, stage + 1, thread);
      block.template wait_copies<1>();
    } else {
      block.template wait_copies<0>();
    }
  });
}

// The queries of a task, and where the split's pages lie.
template <uint32_t kQueries, class Block>
BATON_DEVICE void load_queries(Block& block, const SplitAttention& a, const SplitPlace& at,
                               const SplitMemory& memory) {
  const uint32_t dims = a.cache.head_dim;
  block.each([&](uint32_t thread) {
    const uint32_t page = thread;
    if (page >= at.begin / kBlockTokens && page < pieces_of(at.end, kBlockTokens)) {
      const uint32_t* const table = a.block_tables + at.task.queries.table + at.split * kSplitPages;
      memory.pages[page] = page_at(a.cache, block.load(table + page), at.kv_head);
    }
    for (uint32_t i = thread; i < kQueries * dims; i += block.threads()) {
      const uint32_t query = i / dims, d = i % dims;
      memory.queries[d * kTaskQueries + query] =
          query < at.task.queries.count
              ? block.load(a.q + head_place(a, at.task, at.kv_head, query) + d)
              : 0.0f;
    }
  });
}

template <uint32_t kQueries, class Block>
BATON_DEVICE void attend_split(Block& block, const SplitAttention& a, const SplitPlace& at,
                               const SplitMemory& memory) {
  load_queries<kQueries>(block, a, at, memory);
  block.each_warp([&](uint32_t thread) { fetch_stage(block, a, at, memory, 0, thread); });
  uint32_t stage = 0;
  {
    auto scores = block.template per_thread<PairSums<kQueries>>();
    block.each_warp([&](uint32_t thread) { scores[thread] = {}; });
    for (; stage < key_stages(a); ++stage) {
      await_stage(block, a, at, memory, stage);
      block.each(
          [&](uint32_t thread) { add_scores<kQueries>(a, memory, stage, thread, scores[thread]); });
    }
    join_scores<kQueries>(block, at, memory, scores);
  }
  weigh_split(block, at, memory);
  auto values = block.template per_thread<PairSums<kOwnQueries<kQueries>>>();
  block.each_warp([&](uint32_t thread) { values[thread] = {}; });
  for (; stage < stages_of(a, at); ++stage) {
    await_stage(block, a, at, memory, stage);
    block.each([&](uint32_t thread) {
      const ValuePlace place = value_place<kQueries>(a, block.threads(), thread);
      add_values<kQueries>(a, at, memory, stage, place, values[thread]);
    });
  }
  block.each([&](uint32_t thread) {
    const ValuePlace place = value_place<kQueries>(a, block.threads(), thread);
    store_split<kQueries>(block, a, at, memory, place, values[thread]);
  });
}

template <class Block>
BATON_DEVICE void attend_splits(Block& block, const SplitAttention& a) {
  auto* const stages = block.template shared<Vector16, 2 * kStageElements / 8>();
  const SplitMemory memory = {
      reinterpret_cast<uint16_t*>(stages),
      reinterpret_cast<float*>(block.template shared<FourFloats, kMaxHeadDim * kTaskQueries / 4>()),
      reinterpret_cast<float*>(
          block.template shared<FourFloats, kTaskQueries * kSplitTokens / 4>()),
      block.template shared<float, kTaskQueries>(),
      block.template shared<float, kTaskQueries * 16>(),
      block.template shared<const uint16_t*, kSplitPages>()};
  const uint32_t items = block.load(a.counts) * a.cache.kv_heads;
  for (uint32_t item = block.index(); item < items; item += block.blocks()) {
    const SplitItem split = block.load(a.items + item / a.cache.kv_heads);
    const SplitPlace at =
        split_place(a, block.load(a.tasks + split.task), item % a.cache.kv_heads, split.split);
    if (at.end == 0) continue;  // before the window
    if (a.group <= 4) {
      attend_split<4>(block, a, at, memory);
    } else {
      attend_split<8>(block, a, at, memory);
    }
  }
}

// One query of a task and KV head, whose splits several blocks computed: a thread for each
// dimension.
struct JoinState {
  float most;
  float sum;
  float mixed;
};
template <class Block>
BATON_DEVICE void join_splits(Block& block, const SplitAttention& a) {
  constexpr uint32_t kAtOnce = 64;  // splits
  auto* const largest = block.template shared<float, kAtOnce>();
  auto* const factors = block.template shared<SplitFactors, kAtOnce>();
  auto states = block.template per_thread<JoinState>();
  const uint32_t dims = a.cache.head_dim;
  const uint32_t queries = smaller(a.group, kTaskQueries);
  const uint32_t items = block.load(a.counts + 1) * a.cache.kv_heads * queries;
  for (uint32_t item = block.index(); item < items; item += block.blocks()) {
    const uint32_t query = item % queries, kv_head = item / queries % a.cache.kv_heads;
    const SplitTask task = block.load(a.tasks + item / queries / a.cache.kv_heads);
    const uint32_t last = task.queries.position / kSplitTokens;
    const uint32_t first = first_seen_from(task.queries.position, a.window) / kSplitTokens;
    if (first == last || query >= task.queries.count) continue;
    block.each([&](uint32_t thread) { states[thread] = {-INFINITY, 0, 0}; });
    for (uint32_t from = first; from <= last; from += kAtOnce) {
      const uint32_t some = smaller(kAtOnce, last + 1 - from);
      block.each([&](uint32_t thread) {
        if (thread < some) {
          largest[thread] = block.load(partial_of(a, task, kv_head, from + thread, query));
        }
      });
      block.each([&](uint32_t thread) {
        if (thread >= some) return;
        float before = states[thread].most;
        for (uint32_t s = 0; s < thread; ++s) before = larger(before, largest[s]);
        factors[thread] = split_factors(before, largest[thread]);
      });
      block.each([&](uint32_t thread) {
        JoinState state = states[thread];
        for (uint32_t s = 0; s < some; ++s) {
          const float* const partial = partial_of(a, task, kv_head, from + s, query);
          state.most = larger(state.most, largest[s]);
          state.sum = add_split(factors[s], state.sum, block.load(partial + 1));
          if (thread >= dims) continue;
          state.mixed =
              add_split(factors[s], state.mixed, block.load(partial + kPartialExtra + thread));
        }
        states[thread] = state;
      });
    }
    block.each([&](uint32_t thread) {
      if (thread >= dims) return;
      const float inverse = 1.0f / states[thread].sum;
      block.store(a.out + head_place(a, task, kv_head, query) + thread,
                  states[thread].mixed * inverse);
    });
  }
}

}  // namespace baton::gpudirect::kernels
