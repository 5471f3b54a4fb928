// KV between this engine's blocks of 16 tokens and blocks of another make.
//
// A plan (kvtransfer/kv_plan.h) moves bytes from one engine's memory to another's, and an axis has
// one stride in it. Here an axis may be tiled, a checksum has to be taken of the bytes that were
// moved, and numbers may be rounded: so a block lies in memory of its own in between, and these two
// functions are between that and the cache. To bfloat16 numbers are rounded as this engine rounds
// its own (to nearest, ties to even); to float32 they are widened.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "engine/handoff/foreign_layout.h"
#include "engine/kernels/kv_cache.h"

namespace baton::engine::handoff {

// Tokens [begin, end) of a sequence whose block i of this engine is blocks[i - first_block].
struct OwnTokens {
  size_t begin = 0;
  size_t end = 0;
  size_t first_block = 0;
  absl::Span<const uint32_t> blocks;
  uint32_t first_head = 0;  // the model's number of the cache's first
};

// `foreign`: block number `number` of the same sequence, of a layout that fits the cache's
// geometry. Of `tokens` those that lie in it are written into the cache's `layer`: the heads that
// both have.
void read_block(const ForeignLayout& layout, const std::byte* foreign, size_t number,
                const KvCache& cache, int layer, const OwnTokens& tokens);

// The other way. Places of the block that none of `tokens` has become zero.
void write_block(const ForeignLayout& layout, std::byte* foreign, size_t number,
                 const KvCache& cache, int layer, const OwnTokens& tokens);

}  // namespace baton::engine::handoff
