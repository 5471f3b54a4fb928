// Attention of new tokens over their sequence's pages, in the order of the engine's on the CPU:
// scores of all positions, their exact maximum, exponentials, then the sum over V position by
// position. So prompts that a GPU computed have the bits of those that a CPU did, and KV may come
// from either.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// One number for each query of a task, read from shared memory at once.
struct alignas(16) QueryValues {
  float of[kTaskQueries];
};

struct PageMemory {
  QueryValues* queries;  // [kMaxPageDim]
  QueryValues* most;     // [256]: of each thread's scores; then weights, kStagedTokens at a time
  float* lanes;          // [256]
  float* sums;           // [256]: of every 16th exponential
};
inline constexpr uint32_t kStagedTokens = 128;

// A task and what its queries see: positions [begin, end) together, begin a multiple of 16.
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
  const uint32_t after = last_seen(a, at, query) + 1;
  return a.window == 0 || after <= a.window ? 0 : after - a.window;
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
  const uint32_t number = block.load(a.block_tables + at.task.table + position / kBlockTokens);
  return a.cache.base +
         (uint64_t{number} * a.cache.kv_heads + at.kv_head) * 2 * a.cache.head_dim * kBlockTokens;
}

// This thread's positions: q . k of all queries, two chains each, of even and of odd dimensions;
// -inf where a query does not see the position. The largest go to memory.most.
template <class Block>
BATON_DEVICE void score_pages(Block& block, const PageAttention& a, const PageTask& at,
                              const PageMemory& memory, float* scores, uint32_t thread) {
  QueryValues most;
  for (uint32_t r = 0; r < kTaskQueries; ++r) most.of[r] = -INFINITY;
  for (uint32_t position = at.begin + thread; position < at.end; position += block.threads()) {
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
      if (r >= at.task.count) break;
      const bool seen = position >= first_seen(a, at, r) && position <= last_seen(a, at, r);
      const float score = seen ? even.of[r] + odd.of[r] : -INFINITY;
      most.of[r] = larger(most.of[r], score);
      block.store(scores + uint64_t{r} * a.stride + (position - at.begin), score);
    }
  }
  memory.most[thread] = most;
}

// Scores to exponentials, and for each query the sums of every 16th of them in order.
template <class Block>
BATON_DEVICE void exponentiate_pages(Block& block, const PageAttention& a, const PageTask& at,
                                     const PageMemory& memory, float* scores) {
  const uint32_t count = at.end - at.begin;
  // 32 threads for each query: its largest score.
  block.each([&](uint32_t thread) {
    float most = -INFINITY;
    for (uint32_t other = thread % 32; other < block.threads(); other += 32) {
      most = larger(most, memory.most[other].of[thread / 32]);
    }
    memory.lanes[thread] = most;
  });
  block.each([&](uint32_t thread) {
    const uint32_t query = thread / 32;
    if (query >= at.task.count) return;
    float most = memory.lanes[query * 32];
    for (uint32_t lane = 1; lane < 32; ++lane) most = larger(most, memory.lanes[query * 32 + lane]);
    float* const of_query = scores + uint64_t{query} * a.stride;
    for (uint32_t i = thread % 32; i < count; i += 32) {
      block.store(of_query + i, exponential(block.load(of_query + i) - most));
    }
  });
  block.each([&](uint32_t thread) {
    const uint32_t query = thread / 16;
    if (query >= at.task.count) return;
    const float* const of_query = scores + uint64_t{query} * a.stride;
    float sum = 0;
    for (uint32_t i = thread % 16; i < count; i += 16) sum = sum + block.load(of_query + i);
    memory.sums[thread] = sum;
  });
}

// A thread has one dimension of V, and of `shares` that have it every so many queries.
template <class Block>
BATON_DEVICE void mix_pages(Block& block, const PageAttention& a, const PageTask& at,
                            const PageMemory& memory, const float* scores) {
  const uint32_t dims = a.cache.head_dim;
  const uint32_t shares = smaller(block.threads() / dims, kTaskQueries);
  auto sums = block.template per_thread<QueryValues>();
  block.each([&](uint32_t thread) { sums[thread] = {}; });
  for (uint32_t from = at.begin; from < at.end; from += kStagedTokens) {
    const uint32_t some = smaller(kStagedTokens, at.end - from);
    block.each([&](uint32_t thread) {
      for (uint32_t i = thread; i < kTaskQueries * kStagedTokens; i += block.threads()) {
        const uint32_t query = i / kStagedTokens, token = i % kStagedTokens;
        if (query >= at.task.count || token >= some) continue;
        memory.most[token].of[query] =
            block.load(scores + uint64_t{query} * a.stride + (from - at.begin) + token);
      }
    });
    block.each([&](uint32_t thread) {
      const uint32_t dim = thread % dims, share = thread / dims;
      if (share >= shares) return;
      QueryValues own = sums[thread];
      for (uint32_t token = 0; token < some; ++token) {
        const uint32_t position = from + token;
        const uint16_t* const page = page_of(block, a, at, position);
        const float value =
            from_bf16(block.load(page + (kBlockTokens + position % kBlockTokens) * dims + dim));
        for (uint32_t j = 0; j < kTaskQueries; ++j) {
          const uint32_t query = share + j * shares;
          if (query >= at.task.count) break;
          // What a query does not see weighs nothing, and may be no number.
          const float weight = memory.most[token].of[query];
          own.of[j] = weight != 0 ? fmaf(weight, value, own.of[j]) : own.of[j];
        }
      }
      sums[thread] = own;
    });
  }
  block.each([&](uint32_t thread) {
    const uint32_t dim = thread % dims, share = thread / dims;
    if (share >= shares) return;
    for (uint32_t j = 0; j < kTaskQueries; ++j) {
      const uint32_t query = share + j * shares;
      if (query >= at.task.count) break;
      float total = 0;
      for (uint32_t lane = 0; lane < 16; ++lane) total = total + memory.sums[query * 16 + lane];
      const float inverse = 1.0f / total;
      block.store(a.out + query_place(a, at, query) + dim, sums[thread].of[j] * inverse);
    }
  });
}

template <class Block>
BATON_DEVICE void attend_pages(Block& block, const PageAttention& a) {
  const PageMemory memory = {
      block.template shared<QueryValues, kMaxPageDim>(), block.template shared<QueryValues, 257>(),
      block.template shared<float, 256>(), block.template shared<float, 257>()};
  float* const scores = a.scores + uint64_t{block.index()} * kTaskQueries * a.stride;
  for (uint32_t item = block.index(); item < a.task_count * a.cache.kv_heads;
       item += block.blocks()) {
    PageTask at = {block.load(a.tasks + item / a.cache.kv_heads), item % a.cache.kv_heads, 0, 0};
    at.begin = first_seen(a, at, 0) / kBlockTokens * kBlockTokens;
    // Whole pages: sums of every 16th are over as many for all.
    at.end = (last_seen(a, at, at.task.count - 1) / kBlockTokens + 1) * kBlockTokens;
    block.each([&](uint32_t thread) {
      const uint32_t dims = a.cache.head_dim;
      for (uint32_t i = thread; i < kTaskQueries * dims; i += block.threads()) {
        const uint32_t query = i / dims;
        memory.queries[i % dims].of[query] =
            query < at.task.count ? block.load(a.q + query_place(a, at, query) + i % dims) : 0.0f;
      }
    });
    block.each([&](uint32_t thread) { score_pages(block, a, at, memory, scores, thread); });
    exponentiate_pages(block, a, at, memory, scores);
    mix_pages(block, a, at, memory, scores);
  }
}

}  // namespace baton::gpudirect::kernels
