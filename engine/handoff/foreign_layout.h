// How an engine of any make lays out a block of its KV cache, as engines tell each other.
//
// A block holds `block_tokens` tokens of a layer, of all its KV heads, in one run of bytes. Where a
// number lies is a sum: of what its head, its token and its element each add. An axis is counted in
// levels, as a number is in digits: {count, stride}, the innermost first, strides in numbers. Rows
// of a cache by heads have one level, K transposed too; tiles as matrix units read them have two.
//
//   {"block_tokens": 128, "heads": 2, "head_size": 64, "dtype": "bfloat16", "bytes": 65536,
//    "layers": [0, 1, 2, 3],                         the model's number of each of its rows
//    "key":   {"start": 0, "heads": [[2, 16384]], "tokens": [[16, 2], [8, 1024]],
//              "elements": [[2, 1], [32, 32]]},      groups of 16 tokens, pairs of elements
//    "value": {"start": 8192, ...}}
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
