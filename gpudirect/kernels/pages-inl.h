// Attention of new tokens over their sequence's pages, in the order of the engine's on the CPU: a
// block of threads takes one split of the context after the other, of it all scores, their exact
// maximum, exponentials, then the sum over V position by position. So prompts that a GPU computed
// have the bits of those that a CPU did, and KV may come from either.
//
// The plain kernel, for any task and head. Single tokens of the usual heads are attend_splits'
// (attention-inl.h), which makes the same bits.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/splits-inl.h"

namespace baton::gpudirect::kernels {

// One number for each query of a task, read from shared memory at once.
struct alignas(16) QueryValues {
  float of[kTaskQueries];
};

// Of one query, when all splits so far are added.
struct SplitState {
  float most;
  float sum;
  SplitFactors last;  // of the last one
};

struct PageMemory {
  QueryValues* queries;  // [kMaxPageDim]
  QueryValues* weights;  // [kSplitTokens]: scores of a split's positions, then their exponentials
  float* lanes;          // [256]: maxima of 32 threads for each query
  float* sums;           // [256]: of every 16th exponential
  SplitState* states;    // [kTaskQueries]
};

// A task and what its queries see: positions [begin, end) together.
struct PageTask {
  AttentionTask task;
  uint32_t kv_head;
  uint32_t begin;
  uint32_t end;
};
BATON_DEVICE uint32_t last_seen(const PageAttention& a, const PageTask& at, uint32_t query) {
  return at.task.position + (at.task.first + query) / a.group;
}
BATON_DEVICE uint32_t first_seen(const PageAttention& a, const PageTask& at, uint32_t query) {
  return first_seen_from(last_seen(a, at, query), a.window);
}
BATON_DEVICE bool sees(const PageAttention& a, const PageTask& at, uint32_t query,
                       uint32_t position) {
  return position >= first_seen(a, at, query) && position <= last_seen(a, at, query);
}
// Of its first element in q and out.
BATON_DEVICE uint64_t query_place(const PageAttention& a, const PageTask& at, uint32_t query) {
  const uint32_t pair = at.task.first + query;
  const uint64_t row = uint64_t{at.task.row} + pair / a.group;
  return ((row * a.cache.kv_heads + at.kv_head) * a.group + pair % a.group) * a.cache.head_dim;
}
template <class Block>
BATON_DEVICE const uint16_t* page_of(Block& block, const PageAttention& a, const PageTask& at,
                                     uint32_t position) {
  return page_at(a.cache, block.load(a.block_tables + at.task.table + position / kBlockTokens),
                 at.kv_head);
}

// Of this thread's position q . k of all queries, two chains each, of even and of odd dimensions;
// -inf where a query does not see it.
template <class Block>
BATON_DEVICE void score_position(Block& block, const PageAttention& a, const PageTask& at,
                                 const PageMemory& memory, uint32_t split, uint32_t thread) {
  const uint32_t position = split * kSplitTokens + thread;
  QueryValues scores;
  for (uint32_t r = 0; r < kTaskQueries; ++r) scores.of[r] = -INFINITY;
  if (position >= at.begin && position < at.end) {
    const uint16_t* const key = page_of(block, a, at, position) + position % kBlockTokens;
    QueryValues even = {}, odd = {};
    BATON_UNROLL_BY_4
    for (uint32_t d = 0; d < a.cache.head_dim; d += 2) {
      const float low = from_bf16(block.load(key + d * kBlockTokens));
      const float high = from_bf16(block.load(key + (d + 1) * kBlockTokens));
      const QueryValues q_low = memory.queries[d], q_high = memory.queries[d + 1];
      for (uint32_t r = 0; r < kTaskQueries; ++r) even.of[r] = fmaf(q_low.of[r], low, even.of[r]);
      for (uint32_t r = 0; r < kTaskQueries; ++r) odd.of[r] = fmaf(q_high.of[r], high, odd.of[r]);
    }
    for (uint32_t r = 0; r < kTaskQueries; ++r) {
      if (r < at.task.count && sees(a, at, r, position)) scores.of[r] = even.of[r] + odd.of[r];
    }
  }
  memory.weights[thread] = scores;
}

// Scores to exponentials, their sums, and the splits so far.
template <class Block>
BATON_DEVICE void weigh_positions(Block& block, const PageTask& at, const PageMemory& memory) {
  // 32 threads for each query: its largest score.
  block.each([&](uint32_t thread) {
    float most = -INFINITY;
    for (uint32_t place = thread % 32; place < kSplitTokens; place += 32) {
      most = larger(most, memory.weights[place].of[thread / 32]);
    }
    memory.lanes[thread] = most;
  });
  const auto largest = [&](uint32_t query) {
    float most = memory.lanes[query * 32];
    for (uint32_t lane = 1; lane < 32; ++lane) most = larger(most, memory.lanes[query * 32 + lane]);
    return most;
  };
  block.each([&](uint32_t thread) {
    const uint32_t query = thread / 32;
    const float most = largest(query);
    for (uint32_t place = thread % 32; place < kSplitTokens; place += 32) {
      float& weight = memory.weights[place].of[query];
      weight = most == -INFINITY ? 0.0f : exponential(weight - most);
    }
  });
  block.each([&](uint32_t thread) {
    const uint32_t query = thread / 16;
    if (query >= at.task.count) return;
    float sum = 0;
    for (uint32_t place = thread % 16; place < kSplitTokens; place += 16) {
      sum = sum + memory.weights[place].of[query];
    }
    memory.sums[thread] = sum;
  });
  block.each([&](uint32_t query) {
    if (query >= at.task.count) return;
    const float most = largest(query);
    SplitState& state = memory.states[query];
    state.last = {1, 0};
    if (most == -INFINITY) return;  // it sees nothing of this split
    float sum = 0;
    for (uint32_t lane = 0; lane < 16; ++lane) sum = sum + memory.sums[query * 16 + lane];
    state.last = split_factors(state.most, most);
    state.sum = add_split(state.last, state.sum, sum);
    state.most = larger(state.most, most);
  });
}

// A thread has one dimension of V, and of `shares` that have it every so many queries.
template <class Block, class Sums>
BATON_DEVICE void mix_positions(Block& block, const PageAttention& a, const PageTask& at,
                                const PageMemory& memory, uint32_t split, uint32_t thread,
                                Sums& mixed) {
  const uint32_t dims = a.cache.head_dim;
  const uint32_t shares = smaller(block.threads() / dims, kTaskQueries);
  const uint32_t dim = thread % dims, share = thread / dims;
  if (share >= shares) return;
  QueryValues sums = {};
  const uint32_t from = larger(at.begin, split * kSplitTokens);
  const uint32_t to = smaller(at.end, (split + 1) * kSplitTokens);
  for (uint32_t position = from; position < to; ++position) {
    const uint16_t* const page = page_of(block, a, at, position);
    const float value =
        from_bf16(block.load(page + (kBlockTokens + position % kBlockTokens) * dims + dim));
    for (uint32_t j = 0; j < kTaskQueries; ++j) {
      const uint32_t query = share + j * shares;
      if (query >= at.task.count) break;
      // What a query does not see weighs nothing, and may be no number.
      const float weight = memory.weights[position % kSplitTokens].of[query];
      sums.of[j] = weight != 0 ? fmaf(weight, value, sums.of[j]) : sums.of[j];
    }
  }
  for (uint32_t j = 0; j < kTaskQueries; ++j) {
    const uint32_t query = share + j * shares;
    if (query >= at.task.count) break;
    const SplitFactors factors = memory.states[query].last;
    if (factors.add == 0 && factors.keep == 1) continue;
    mixed.of[j] = add_split(factors, mixed.of[j], sums.of[j]);
  }
}

template <class Block>
BATON_DEVICE void attend_pages(Block& block, const PageAttention& a) {
  const PageMemory memory = {
      block.template shared<QueryValues, kMaxPageDim>(),
      block.template shared<QueryValues, kSplitTokens + 1>(), block.template shared<float, 256>(),
      block.template shared<float, 257>(), block.template shared<SplitState, kTaskQueries>()};
  auto mixed = block.template per_thread<QueryValues>();
  for (uint32_t item = block.index(); item < a.task_count * a.cache.kv_heads;
       item += block.blocks()) {
    PageTask at = {block.load(a.tasks + item / a.cache.kv_heads), item % a.cache.kv_heads, 0, 0};
    at.begin = first_seen(a, at, 0);
    at.end = last_seen(a, at, at.task.count - 1) + 1;
    const uint32_t dims = a.cache.head_dim;
    block.each([&](uint32_t thread) {
      for (uint32_t i = thread; i < kTaskQueries * dims; i += block.threads()) {
        const uint32_t query = i / dims;
        memory.queries[i % dims].of[query] =
            query < at.task.count ? block.load(a.q + query_place(a, at, query) + i % dims) : 0.0f;
      }
      if (thread < kTaskQueries) memory.states[thread] = {-INFINITY, 0, {1, 0}};
      mixed[thread] = {};
    });
    for (uint32_t split = at.begin / kSplitTokens; split * kSplitTokens < at.end; ++split) {
      block.each([&](uint32_t thread) { score_position(block, a, at, memory, split, thread); });
      weigh_positions(block, at, memory);
      block.each([&](uint32_t thread) {
        mix_positions(block, a, at, memory, split, thread, mixed[thread]);
      });
    }
    block.each([&](uint32_t thread) {
      const uint32_t shares = smaller(block.threads() / dims, kTaskQueries);
      const uint32_t dim = thread % dims, share = thread / dims;
      if (share >= shares) return;
      for (uint32_t j = 0; j < kTaskQueries; ++j) {
        const uint32_t query = share + j * shares;
        if (query >= at.task.count) break;
        const float inverse = 1.0f / memory.states[query].sum;
        block.store(a.out + query_place(a, at, query) + dim, mixed[thread].of[j] * inverse);
      }
    });
  }
}

}  // namespace baton::gpudirect::kernels
