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

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/kv_packing.h"

namespace baton::engine::handoff {

// Its numbers are bfloat16 or float32; it is never `whole`.
struct ForeignLayout : kvtransfer::KvPacking {
  std::vector<uint32_t> layers;  // the model's numbers, in the order of the cache's rows

  // That of this engine's cache.
  static ForeignLayout own(const KvGeometry& geometry);
  // InvalidArgument: what is missing, out of range, or would put two numbers into one place.
  static absl::StatusOr<ForeignLayout> parse(const nlohmann::json& said);
  nlohmann::json say() const;
  // FailedPrecondition where blocks like these cannot hold this model's KV, and why.
  absl::Status fits(const KvGeometry& geometry) const;

  bool operator==(const ForeignLayout&) const = default;
};

}  // namespace baton::engine::handoff
