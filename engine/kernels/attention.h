// Attention over the paged KV cache, for prefill and decode alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/kernels/kv_cache.h"

namespace baton::engine {

// Rounds K and V of `tokens` new tokens to bf16 and stores them in their blocks, all KV heads.
// k and v are [tokens][kv_heads][head_dim] with `stride` floats between tokens.
void store_kv(const KvCache& cache, int layer, std::span<const uint32_t> block_table, int position,
              int tokens, const float* k, const float* v, size_t stride);

// One KV head of one sequence. Token i attends to positions [0, position + i], or to the last
// `window` of them.
struct AttentionCall {
  const KvCache* cache = nullptr;
  int layer = 0;
  int kv_head = 0;
  std::span<const uint32_t> block_table;
  int position = 0;
  int tokens = 0;
  int window = 0;            // 0: no limit
  int group = 1;             // query heads that share this KV head
  const float* q = nullptr;  // [tokens][group][head_dim], already scaled by 1 / sqrt(head_dim)
  size_t q_stride = 0;       // floats between tokens
  float* out = nullptr;      // like q
  size_t out_stride = 0;
};

// Queries (token, head) computed together, at most: what the registers of the widest vectors hold.
inline constexpr int kQueryTile = 12;

// A context is cut into splits of this many positions, [0, 256), [256, 512) and so on, whatever
// else is in the batch. A query's result from a split depends on that split's tokens alone, so on a
// device several thread blocks may share a context. The number is part of the arithmetic, and so of
// a model's fingerprint.
inline constexpr int kSplitTokens = 256;

// Floats of scratch that paged_attention needs.
inline constexpr size_t kAttentionScratch = size_t{kQueryTile} * kSplitTokens;

// For each split its scores, their exact maximum m', the sum l' of their exponentials in 16 lanes,
// and the sum o' over V in token order. Splits are added in order, from m = -inf, l = o = 0, with
// n = max(m, m'), a = exp(m - n), b = exp(m' - n):
//
//   m = n    l = fma(b, l', a l)    o = fma(b, o', a o)
//
// and the result is o * (1 / l). A split of which the query sees nothing is left out. The steps for
// a query do not depend on how many queries are computed together.
void paged_attention(const AttentionCall& call, float* scratch);

}  // namespace baton::engine
