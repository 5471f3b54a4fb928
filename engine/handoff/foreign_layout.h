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
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/kv_cache.h"

namespace baton::engine::handoff {

enum class ForeignDtype : uint8_t { kBfloat16, kFloat32 };
inline size_t bytes_of(ForeignDtype dtype) { return dtype == ForeignDtype::kBfloat16 ? 2 : 4; }

// Where the keys or the values of a block lie: number (head h, token t, element e) is at start +
// heads[h] + tokens[t] + elements[e].
struct ForeignPlaces {
  uint32_t start = 0;
  std::vector<uint32_t> heads;
  std::vector<uint32_t> tokens;
  std::vector<uint32_t> elements;
  bool operator==(const ForeignPlaces&) const = default;
};

struct ForeignLayout {
  uint32_t block_tokens = 0;
  uint32_t heads = 0;
  uint32_t head_size = 0;
  ForeignDtype dtype = ForeignDtype::kBfloat16;
  uint32_t bytes = 0;            // of a block in a layer
  std::vector<uint32_t> layers;  // the model's numbers, in the order of the cache's rows
  ForeignPlaces key;
  ForeignPlaces value;

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
