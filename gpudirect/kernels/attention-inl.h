// Attention of one new token of each sequence over its pages, split by split.
//
// The steps of a split depend on its own tokens alone, and splits are joined in their order: a
// sequence has the same bits in any batch.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// One number for each query head of a group, read from shared memory at once.
struct alignas(16) GroupValues {
  float of[kMaxGroup];
};

struct SplitPlace {
  uint32_t sequence;
  uint32_t kv_head;
  uint32_t split;
};
BATON_DEVICE SplitPlace split_place(const Attention& a, uint32_t item) {
  return {item / a.splits / a.cache.kv_heads, item / a.splits % a.cache.kv_heads, item % a.splits};
}
BATON_DEVICE float* partial_of(const Attention& a, const SplitPlace& at, uint32_t head) {
  const uint64_t row =
      ((uint64_t{at.sequence} * a.cache.kv_heads + at.kv_head) * a.splits + at.split) * a.group +
      head;
  return a.partial + row * (2 + a.cache.head_dim);
}

// K of a token: element d is kBlockTokens * d further. V of it: head_dim elements.
template <class Block>
BATON_DEVICE const uint16_t* head_of_token(Block& block, const Attention& a, const SplitPlace& at,
                                           uint32_t token) {
  const uint32_t number =
      block.load(a.block_tables + uint64_t{at.sequence} * a.table_stride + token / kBlockTokens);
  return a.cache.base +
         (uint64_t{number} * a.cache.kv_heads + at.kv_head) * 2 * a.cache.head_dim * kBlockTokens;
}

// What the threads of a block share; one of each array.
struct SplitMemory {
  GroupValues* queries;  // [head_dim]
  GroupValues* weights;  // [kSplitTokens]: scores, then their exponentials
  float* lanes;          // [256]: maxima of 32 threads for each head
  float* sums;           // [256]: the same of sums
  GroupValues* mixed;    // [512]: sums over V of each dimension, by each share of the tokens
};

// weights[token] = q . k for this thread's token.
template <class Block>
BATON_DEVICE void score(Block& block, const Attention& a, const SplitPlace& at,
                        const SplitMemory& memory, uint32_t token, uint32_t place) {
  const uint16_t* const key = head_of_token(block, a, at, token) + token % kBlockTokens;
  GroupValues sums = {};
  for (uint32_t d = 0; d < a.cache.head_dim; ++d) {
    const float k = from_bf16(block.load(key + d * kBlockTokens));
    const GroupValues q = memory.queries[d];
    for (uint32_t g = 0; g < kMaxGroup; ++g) sums.of[g] = fmaf(q.of[g], k, sums.of[g]);
  }
  memory.weights[place] = sums;
}

// This thread's sums over V: of two dimensions, and of every `shares`-th token.
template <class Block>
BATON_DEVICE void mix(Block& block, const Attention& a, const SplitPlace& at,
                      const SplitMemory& memory, uint32_t first, uint32_t count, uint32_t thread) {
  const uint32_t pairs = a.cache.head_dim / 2, shares = block.threads() / pairs;
  const uint32_t pair = thread % pairs, share = thread / pairs;
  if (share >= shares) return;
  GroupValues low = {}, high = {};
  for (uint32_t place = share; place < count; place += shares) {
    const uint32_t token = first + place;
    const uint16_t* const value = head_of_token(block, a, at, token) +
                                  a.cache.head_dim * kBlockTokens +
                                  token % kBlockTokens * a.cache.head_dim + 2 * pair;
    const uint32_t two = block.load(reinterpret_cast<const uint32_t*>(value));
    const GroupValues weight = memory.weights[place];
    for (uint32_t g = 0; g < kMaxGroup; ++g) {
      low.of[g] = fmaf(weight.of[g], from_bf16(two & 0xffffu), low.of[g]);
      high.of[g] = fmaf(weight.of[g], from_bf16(two >> 16), high.of[g]);
    }
  }
  memory.mixed[share * a.cache.head_dim + 2 * pair] = low;
  memory.mixed[share * a.cache.head_dim + 2 * pair + 1] = high;
}

// Scores to exponentials: 32 threads for each head, which add theirs in order.
template <class Block>
BATON_DEVICE void exponentials(Block& block, const SplitMemory& memory, uint32_t count) {
  block.each([&](uint32_t thread) {
    float most = -INFINITY;
    for (uint32_t place = thread % 32; place < count; place += 32) {
      most = larger(most, memory.weights[place].of[thread / 32]);
    }
    memory.lanes[thread] = most;
  });
  block.each([&](uint32_t thread) {
    const uint32_t head = thread / 32;
    float most = memory.lanes[head * 32];
    for (uint32_t lane = 1; lane < 32; ++lane) most = larger(most, memory.lanes[head * 32 + lane]);
    float sum = 0;
    for (uint32_t place = thread % 32; place < count; place += 32) {
      const float weight = exponential(memory.weights[place].of[head] - most);
      memory.weights[place].of[head] = weight;
      sum = sum + weight;
    }
    memory.sums[thread] = sum;
  });
}

template <class Block>
BATON_DEVICE void store_partial(Block& block, const Attention& a, const SplitPlace& at,
                                const SplitMemory& memory, uint32_t thread) {
  const uint32_t dims = a.cache.head_dim, shares = block.threads() / (dims / 2);
  if (thread % 32 == 0 && thread / 32 < a.group) {
    float most = memory.lanes[thread], sum = 0;
    for (uint32_t lane = 1; lane < 32; ++lane) most = larger(most, memory.lanes[thread + lane]);
    for (uint32_t lane = 0; lane < 32; ++lane) sum = sum + memory.sums[thread + lane];
    float* const partial = partial_of(a, at, thread / 32);
    block.store(partial, most);
    block.store(partial + 1, sum);
  }
  for (uint32_t i = thread; i < a.group * dims; i += block.threads()) {
    float sum = 0;
    for (uint32_t share = 0; share < shares; ++share) {
      sum = sum + memory.mixed[share * dims + i % dims].of[i / dims];
    }
    block.store(partial_of(a, at, i / dims) + 2 + i % dims, sum);
  }
}

// head_dim is 32, 64 or 128.
template <class Block>
BATON_DEVICE void attend_splits(Block& block, const Attention& a) {
  const SplitMemory memory = {
      block.template shared<GroupValues, kMaxHeadDim>(),
      block.template shared<GroupValues, kSplitTokens>(), block.template shared<float, 256>(),
      block.template shared<float, 257>(), block.template shared<GroupValues, 512>()};
  const uint32_t dims = a.cache.head_dim;
  for (uint32_t item = block.index(); item < a.sequences * a.cache.kv_heads * a.splits;
       item += block.blocks()) {
    const SplitPlace at = split_place(a, item);
    const uint32_t length = block.load(a.lengths + at.sequence);
    const uint32_t first = at.split * kSplitTokens;
    if (first >= length) continue;
    const uint32_t count = smaller(kSplitTokens, length - first);
    block.each([&](uint32_t thread) {
      const float* const q =
          a.q + (uint64_t{at.sequence} * a.cache.kv_heads + at.kv_head) * a.group * dims;
      for (uint32_t i = thread; i < kMaxGroup * dims; i += block.threads()) {
        const uint32_t head = i / dims;
        memory.queries[i % dims].of[head] = head < a.group ? block.load(q + i) : 0.0f;
      }
    });
    block.each([&](uint32_t thread) {
      if (thread < count) score(block, a, at, memory, first + thread, thread);
    });
    exponentials(block, memory, count);
    block.each([&](uint32_t thread) { mix(block, a, at, memory, first, count, thread); });
    block.each([&](uint32_t thread) { store_partial(block, a, at, memory, thread); });
  }
}

// A thread for each element of the output.
template <class Block>
BATON_DEVICE void join_splits(Block& block, const Attention& a) {
  const uint32_t dims = a.cache.head_dim;
  block.each([&](uint32_t thread) {
    for (uint32_t row = block.index(); row < a.sequences * a.cache.kv_heads;
         row += block.blocks()) {
      const uint32_t sequence = row / a.cache.kv_heads;
      const uint32_t splits = pieces_of(block.load(a.lengths + sequence), kSplitTokens);
      for (uint32_t i = thread; i < a.group * dims; i += block.threads()) {
        const auto partial = [&](uint32_t split) {
          return partial_of(a, {sequence, row % a.cache.kv_heads, split}, i / dims);
        };
        float most = -INFINITY;
        for (uint32_t s = 0; s < splits; ++s) most = larger(most, block.load(partial(s)));
        float total = 0, mixed = 0;
        for (uint32_t s = 0; s < splits; ++s) {
          const float share = exponential(block.load(partial(s)) - most);
          total = fmaf(share, block.load(partial(s) + 1), total);
          mixed = fmaf(share, block.load(partial(s) + 2 + i % dims), mixed);
        }
        block.store(a.out + uint64_t{row} * a.group * dims + i, mixed / total);
      }
    }
  });
}

}  // namespace baton::gpudirect::kernels
