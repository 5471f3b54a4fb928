// What another engine has cached, by names that a prompt's tokens give.
//
// An engine's own hashes mean nothing elsewhere, but its events tell the tokens of each block and
// the block before it: so each block's name can be computed as for our own blocks
// (engine/serve/cache/cache_events.h), over blocks of that engine's size. What comes out is the
// same news as a Baton worker tells of itself, and whoever picks workers sees no difference.
//
// The index never has a block that the events do not vouch for. Left out are blocks whose KV
// depends on more than tokens (adapters, salts, pictures), blocks behind one that is not known,
// blocks in another machine, and all groups of layers but one with full attention. Of two copies of
// a block the removal of one counts for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/kernels/kv_cache.h"
#include "engine/kv_events/batch.h"
#include "engine/serve/cache/cache_events.h"

namespace baton::engine::kv_events {

// What chains of blocks begin with whose model is not said: a router's engines all serve one.
serve::BlockHash tokens_root();

class TokenIndex {
 public:
  // More blocks than this are not kept: the index begins anew.
  explicit TokenIndex(size_t max_blocks = size_t{1} << 22) : max_blocks_(max_blocks) {}

  void apply(const EventBatch& batch);
  // Nothing is known.
  void clear();
  // What news() says next is a snapshot.
  void tell_all() {
    snapshot_ = true;
    noted_.clear();
  }

  // What has changed since it was last called; after clear(), or where blocks turn out to have
  // another size, a snapshot. `changes` never goes back.
  serve::CacheNews news();
  bool has_news() const { return snapshot_ || !noted_.empty(); }

  size_t blocks() const { return held_.size(); }
  int block_tokens() const { return block_tokens_; }
  // Blocks that were told of and left out.
  uint64_t left_out() const { return left_out_; }

 private:
  struct Known {
    serve::BlockHash name;
    uint32_t media = 0;  // a bit for each that holds it
  };
  void store(const BlockStored& stored);
  void remove(const BlockRemoved& removed);
  bool is_ours(const BlockStored& stored);
  void forget_blocks();
  uint32_t medium_bit(const std::string& medium, const std::string& ownership);
  void note(const serve::BlockHash& name, bool held);

  const size_t max_blocks_;
  int block_tokens_ = kBlockTokens;
  std::optional<int64_t> group_;  // that is followed, once one was told of
  bool group_known_ = false;
  absl::flat_hash_map<serve::BlockHash, Known> known_;    // by what was sent
  absl::flat_hash_map<serve::BlockHash, uint32_t> held_;  // names, and how many sent hashes have it
  std::vector<std::pair<std::string, std::string>> media_;  // and whose
  absl::flat_hash_map<serve::BlockHash, bool> noted_;       // whether it is there now
  bool snapshot_ = true;
  uint64_t changes_ = 0;
  uint64_t left_out_ = 0;
};

}  // namespace baton::engine::kv_events
