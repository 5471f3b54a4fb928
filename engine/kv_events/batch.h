// vLLM's KV events as they travel: what an engine's prefix cache has taken and forgotten.
//
// A message has three frames: a topic, a sequence number (8 bytes, big endian) and a batch, which
// is msgpack:
//
//   [ts, [event, ...], data_parallel_rank]
//   {"type": "BlockStored", "block_hashes": [bytes or number, ...], "parent_block_hash": ... or
//   nil,
//    "token_ids": [...], "block_size": 16, "lora_id": nil, "medium": "GPU", "lora_name": nil, ...}
//   {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU", ...}
//   {"type": "AllBlocksCleared"}
//
// That is vLLM 0.32's form. Before it an event was an array, ["BlockStored", hashes, parent,
// tokens, block size, lora_id, medium]; that is read as well. Fields that no parser knows are
// passed over, as msgspec does.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/serve/cache/cache_events.h"

namespace baton::engine::kv_events {

// The bytes of a block's hash. A number (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES) becomes its 8 bytes,
// big endian. They mean something to the engine that sent them alone.
using SentHash = std::string;

// What vLLM calls the memory that its engine computes in, whatever that is.
inline constexpr std::string_view kEngineMedium = "GPU";

struct BlockStored {
  std::vector<SentHash> hashes;
  std::optional<SentHash> parent;  // none: the first block begins a prompt
  std::vector<int32_t> tokens;     // of all blocks; none where a copy in another medium is told of
  int block_size = 0;              // in tokens; 0 like those
  std::string medium;              // "": not said
  std::string ownership;           // of several tiers of one medium which; "": not said
  // The KV depends on the tokens before and in a block and on nothing else, for each block: no
  // adapter, salt or picture. Empty: on all of them.
  std::vector<bool> plain;
  std::optional<int64_t> group;  // of layers
  std::string group_kind;        // "full_attention", ...; "": not said
  bool remote = false;           // not in the engine's own machine

  bool is_plain(size_t block) const { return plain.empty() || plain[block]; }
  friend bool operator==(const BlockStored&, const BlockStored&) = default;
};

struct BlockRemoved {
  std::vector<SentHash> hashes;
  std::string medium;
  std::string ownership;
  std::optional<int64_t> group;
  bool remote = false;
  friend bool operator==(const BlockRemoved&, const BlockRemoved&) = default;
};

struct AllBlocksCleared {
  friend bool operator==(const AllBlocksCleared&, const AllBlocksCleared&) = default;
};

using KvEvent = std::variant<BlockStored, BlockRemoved, AllBlocksCleared>;

struct EventBatch {
  double time = 0;  // seconds since 1970
  std::vector<KvEvent> events;
  std::optional<int64_t> rank;  // data parallel
  friend bool operator==(const EventBatch&, const EventBatch&) = default;
};

// As vLLM 0.32 decodes it. Hashes are sent as bytes; a block that is not plain is sent with an
// extra key "?", for what it depends on is not kept.
std::string encode_batch(const EventBatch& batch);

// InvalidArgument says what is wrong: bytes that are no msgpack, more nesting than a batch has, a
// type of event that is not among these, a field of another type.
absl::StatusOr<EventBatch> parse_batch(std::string_view payload);

// A sequence number's frame, and back; nothing if it has not 8 bytes.
std::string sequence_frame(uint64_t sequence);
std::optional<uint64_t> parse_sequence(std::string_view frame);
// What ends a replay in place of a number: -1.
inline constexpr uint64_t kEndOfReplay = UINT64_MAX;

// What our own prefix cache did, as a batch that vLLM's consumers understand, in order. Blocks that
// follow one another in a prompt become one event, as do removals in a row.
EventBatch batch_of(std::span<const serve::CacheEvent> events);

}  // namespace baton::engine::kv_events
