// How the splits of a context are added, one after the other: what the engine's attention does
// (engine/kernels/attention.h), to the bit.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// What a split adds: the result of those before it times `keep`, and its own times `add`.
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

// What a token at `position` sees: [first, position].
BATON_DEVICE uint32_t first_seen_from(uint32_t position, uint32_t window) {
  return window == 0 || position + 1 <= window ? 0 : position + 1 - window;
}

// K of a page, which a block's table names; V of it lies head_dim * kBlockTokens elements behind.
BATON_DEVICE const uint16_t* page_at(const CacheLayer& cache, uint32_t number, uint32_t kv_head) {
  return cache.base +
         (uint64_t{number} * cache.kv_heads + kv_head) * 2 * cache.head_dim * kBlockTokens;
}

}  // namespace baton::gpudirect::kernels
