// What a prefix cache tells of itself: what it holds, then what changes, as lines of JSON.
//
//   {"block_tokens":16,"root":"00...","model":"...","changes":7,"blocks":["d4b9...",...]}
//   {"changes":9,"removed":["41f3..."],"stored":["ed82..."]}
//
// An empty line says nothing; one comes every second. The first other is a snapshot; in the others,
// what was removed comes before what was stored. "changes" counts blocks stored and removed since
// the server began and never goes back. A block's name is its BlockHash in 32 hexadecimal digits,
// the bytes in memory order; "root" is what the first block of every chain is chained to, "model"
// the weights' fingerprint, of which the root is made (model_root()).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kernels/kv_cache.h"

namespace baton::engine::serve {

// Hash chains over blocks of tokens: the names under which the prefix cache knows KV blocks.
//
// 128 bits that stand for a block's tokens, all tokens before it and the model. The same in every
// process and on every machine, so that prefill, decode and router mean the same block by the same
// name.
struct BlockHash {
  uint64_t low = 0;
  uint64_t high = 0;

  friend bool operator==(const BlockHash&, const BlockHash&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const BlockHash& hash) {
    return H::combine(std::move(state), hash.low, hash.high);
  }
};

// The first half of SHA-256(parent, bytes): a prompt cannot be crafted to collide with another's.
BlockHash chain_hash(const BlockHash& parent, std::string_view bytes);
BlockHash chain_hash(const BlockHash& parent, std::span<const int32_t> tokens);

// What the first block of every chain is chained to: KV is of no use to another model, so blocks of
// two have no names in common. `fingerprint`: Model::fingerprint().
BlockHash model_root(std::string_view fingerprint);

// Appends the hashes of the full blocks of `tokens` that `chain` does not have yet.
void extend_chain(std::span<const int32_t> tokens, int block_tokens, const BlockHash& root,
                  std::vector<BlockHash>* chain);

struct CacheNews {
  bool snapshot = false;  // `stored` is all there is
  BlockHash root;         // of a snapshot that was parsed: of its chains
  std::string model;      // likewise
  uint64_t changes = 0;
  std::vector<BlockHash> removed, stored;  // in this order; a block is in one of them
};

std::string block_name(const BlockHash& hash);
// Nothing if `text` is not 32 hexadecimal digits.
std::optional<BlockHash> parse_block_name(std::string_view text);

// One line, with its end. `model` is said with a snapshot only.
std::string cache_line(const CacheNews& news, std::string_view model);
// InvalidArgument for what cache_line() does not write, and for blocks of another size than ours:
// their names mean nothing here. `line` is without its end. Any root will do: names of two models
// do not meet.
absl::StatusOr<CacheNews> parse_cache_line(std::string_view line);

}  // namespace baton::engine::serve
