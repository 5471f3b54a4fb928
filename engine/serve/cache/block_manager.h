// Which requests use which block of the KV cache: reference counts, the prefix cache and
// quarantine.
//
// A block is in exactly one of these states:
//   used         references > 0: sequences, jobs being sent and loads being received hold some
//   free         no reference; on one of two free lists, each in the order of its last use. Its
//                content stays findable under its hash until the block is handed out again.
//
// What no prompt has found yet is handed out before what was found again: prompts that are like no
// other pass through the cache without pushing out what many begin with. Those that were found
// again keep three quarters of the cache at most; the one that was used longest ago has to be found
// anew. Quarantine holds references like any other user: bytes may still arrive in those blocks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

namespace baton::engine::serve {

// Hash chains over blocks of tokens: the names under which the prefix cache and KV stores know
// blocks.

// 128 bits that stand for a block's tokens, all tokens before it and the model. The same in every
// process and on every machine, so that all that share a store mean the same block by the same
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

// All operations take O(blocks named). Not thread-safe: one engine owns it.
class BlockManager {
 public:
  explicit BlockManager(uint32_t num_blocks);

  uint32_t num_blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t free_blocks() const { return free_[0].count + free_[1].count; }
  uint32_t cached_blocks() const { return static_cast<uint32_t>(cached_.size()); }
  // Blocks held by quarantine entries, counted once per entry.
  uint32_t quarantined_blocks() const { return quarantined_; }

  // Appends `count` blocks with one reference each; false, and nothing changed, if there are fewer.
  [[nodiscard]] bool allocate(size_t count, std::vector<uint32_t>* table);
  void add_references(std::span<const uint32_t> blocks);
  // Drops one reference each. The last block named becomes the first to be reused: the end of a
  // sequence is shared by fewer others than its start.
  void release(std::span<const uint32_t> blocks);

  struct Match {
    size_t blocks = 0;       // of the chain's start that are cached
    size_t free_blocks = 0;  // those among them that acquire() takes from the free list
  };
  Match find(std::span<const BlockHash> chain) const;
  // Appends the blocks of find(chain).blocks hashes, with one more reference each.
  void acquire(std::span<const BlockHash> chain, std::vector<uint32_t>* table);
  // The block is used and its content is complete and will not change: others may find it. Where
  // another block has the hash already, nothing happens (tables are append-only, so no merging).
  void publish(uint32_t block, const BlockHash& hash);

  // Whether the block's content can be found under this hash.
  bool holds(uint32_t block, const BlockHash& hash) const {
    return blocks_[block].published && blocks_[block].hash == hash;
  }

  // Takes over one reference of each block until end_quarantine().
  uint64_t quarantine(const std::vector<uint32_t>& blocks);
  void end_quarantine(uint64_t entry);

  // Counts everything again. Internal says what does not add up. `references` (optional) is the
  // number of references that the callers know of, quarantine excluded.
  absl::Status check_integrity(std::optional<uint64_t> references = std::nullopt) const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Block {
    uint32_t references = 0;
    uint32_t previous = kNone;  // neighbours on the free list
    uint32_t next = kNone;
    bool published = false;
    bool found = false;  // by another request than the one that computed it
    BlockHash hash;
  };
  // Intrusive; reused from its head.
  struct FreeList {
    uint32_t head = kNone;
    uint32_t tail = kNone;
    uint32_t count = 0;
  };

  FreeList& list_of(const Block& block) { return free_[block.found ? 1 : 0]; }
  void push_free(uint32_t block, bool reuse_first);
  void remove_free(uint32_t block);
  void age();
  uint32_t next_free() const { return free_[0].head != kNone ? free_[0].head : free_[1].head; }
  void forget(Block& block);

  std::vector<Block> blocks_;
  std::array<FreeList, 2> free_;  // of blocks that no prompt has found, and of those that were
  absl::flat_hash_map<BlockHash, uint32_t> cached_;
  absl::flat_hash_map<uint64_t, std::vector<uint32_t>> quarantine_;
  uint64_t next_entry_ = 1;
  uint32_t quarantined_ = 0;
};

}  // namespace baton::engine::serve
