// What a prefix cache tells of itself: what it holds, then what changes, as lines of JSON.
//
//   {"block_tokens":16,"root":"00...","model":"...","changes":7,"blocks":["d4b9...",...]}
//   {"changes":9,"removed":["41f3..."],"stored":["ed82..."]}
//
// An empty line says nothing; one comes every second. The first other is a snapshot; in the others,
// what was removed comes before what was stored. "changes" counts blocks stored and removed since
// the server began and never goes back. A block's name is its BlockHash in 32 hexadecimal digits,
// the bytes in memory order; "root" is what the first block of every chain is chained to, "model"
// the weights' fingerprint, of which the root is made (model_root() in block_hash.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kernels/kv_cache.h"
#include "engine/serve/cache/block_hash.h"

namespace baton::engine::serve {

struct CacheNews {
  bool snapshot = false;  // `stored` is all there is
  BlockHash root;         // of a snapshot that was parsed: of its chains
  std::string model;      // likewise
  // For a snapshot: how many tokens a block has, and whether `root` is of a model that the worker
  // reported. Other engines do not report which (engine/kv_events/token_index.h).
  int block_tokens = kBlockTokens;
  bool names_a_model = true;
  uint64_t changes = 0;
  std::vector<BlockHash> removed, stored;  // in this order; a block is in one of them
};

// What became of one block, where every step is told (BlockManager::record()).
struct CacheEvent {
  bool stored = false;  // else removed
  BlockHash hash;
  // For a stored block: the one before it (none for a prompt's first) and its tokens.
  std::optional<BlockHash> parent;
  std::vector<int32_t> tokens;
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
