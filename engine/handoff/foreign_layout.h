// How an engine of any make lays out a block of its KV cache, as engines tell each other.
//
// A block holds the tokens of a layer, of all its KV heads, in one run of bytes, packed as
// kvtransfer/kv_packing.h says; `layers` are the model's numbers of the cache's rows:
//
//   {"block_tokens": 128, "heads": 2, "head_size": 64, "dtype": "bfloat16", "bytes": 65536,
//    "layers": [0, 1, 2, 3], "key": {...}, "value": {...}}
//
// Baton's own blocks (engine/kernels/kv_cache.h) are one of these. An engine whose blocks cannot be
// said so says why, as a text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/kv_packing.h"
#include "kvtransfer/kv_plan.h"

namespace baton::engine::handoff {

// Its numbers are bfloat16 or float32; it is never `whole`.
struct ForeignLayout : kvtransfer::KvPacking {
  std::vector<uint32_t> layers;  // the model's numbers, in the order of the cache's rows

  // That of a cache of this engine's make, of rank `rank` of `ranks`.
  static ForeignLayout own(const KvGeometry& geometry, uint32_t ranks = 1, uint32_t rank = 0);
  // InvalidArgument: what is missing, out of range, or would put two numbers into one place.
  static absl::StatusOr<ForeignLayout> parse(const nlohmann::json& said);
  nlohmann::json say() const;
  // FailedPrecondition where blocks like these, of rank `rank` of `ranks` of an engine, cannot hold
  // the KV of a model with these layers and `total` heads, and why. Else their heads' numbers are
  // known, where they were not said.
  absl::Status place(const KvGeometry& geometry, uint32_t total, uint32_t ranks, uint32_t rank);
  kvtransfer::KvHeads held() const { return {first_head, first_head + heads}; }
  // The same blocks, of which these heads alone are looked at. FailedPrecondition where they follow
  // each other in no row.
  absl::StatusOr<ForeignLayout> part(kvtransfer::KvHeads some) const;

  bool operator==(const ForeignLayout&) const = default;
};

// KV between this engine's blocks of 16 tokens and blocks of another make.
//
// A plan (kvtransfer/kv_plan.h) moves bytes from one engine's memory to another's, and an axis has
// one stride in it. Here an axis may be tiled, a checksum has to be taken of the bytes that were
// moved, and numbers may be rounded: so a block lies in memory of its own in between, and these two
// functions are between that and the cache. To bfloat16 numbers are rounded as this engine rounds
// its own (to nearest, ties to even); to float32 they are widened.

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
