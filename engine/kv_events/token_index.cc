// Follows the events of an engine's cache and names its blocks by their tokens.
#include "engine/kv_events/token_index.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

namespace baton::engine::kv_events {

using serve::BlockHash;

namespace {

constexpr size_t kMaxMedia = 32;

// A sent hash in 128 bits: a short one as it is, with its length, a longer one hashed again.
BlockHash key_of(const SentHash& hash) {
  char bytes[sizeof(BlockHash)] = {};
  if (hash.size() >= sizeof(bytes)) return serve::chain_hash({}, hash);
  std::copy(hash.begin(), hash.end(), bytes);
  bytes[sizeof(bytes) - 1] = static_cast<char>(hash.size());
  BlockHash key;
  std::memcpy(&key, bytes, sizeof(key));
  return key;
}

}  // namespace

BlockHash tokens_root() { return serve::model_root(""); }

uint32_t TokenIndex::medium_bit(const std::string& medium, const std::string& ownership) {
  const std::pair key(medium, ownership);
  auto it = std::find(media_.begin(), media_.end(), key);
  if (it == media_.end()) {
    if (media_.size() == kMaxMedia) return 0;
    it = media_.insert(media_.end(), key);
  }
  return uint32_t{1} << (it - media_.begin());
}

void TokenIndex::note(const BlockHash& name, bool held) {
  ++changes_;
  if (!snapshot_) noted_[name] = held;
}

void TokenIndex::forget_blocks() {
  changes_ += held_.size();
  known_.clear();
  held_.clear();
  noted_.clear();
  snapshot_ = true;
}

void TokenIndex::clear() {
  forget_blocks();
  group_known_ = false;
  block_tokens_ = kBlockTokens;
}

bool TokenIndex::is_ours(const BlockStored& stored) {
  const bool full = stored.group_kind.empty() || stored.group_kind == "full_attention" ||
                    stored.group_kind == "mla_attention" ||
                    stored.group_kind == "sink_full_attention";
  if (!full || stored.remote) return false;
  // Media other than the engine's own may say no group.
  if (!stored.group.has_value()) return true;
  if (!group_known_) {
    if (stored.tokens.empty()) return false;  // nor may a copy say of what kind it is
    group_known_ = true;
    group_ = stored.group;
  }
  return group_ == stored.group;
}

void TokenIndex::store(const BlockStored& stored) {
  const size_t blocks = stored.hashes.size();
  if (!is_ours(stored)) {
    left_out_ += blocks;
    return;
  }
  const uint32_t medium = medium_bit(stored.medium, stored.ownership);
  const auto size = static_cast<size_t>(stored.block_size);
  // Events of some blocks, such as half-filled ones, have fewer tokens than a whole block.
  const bool named = size > 0 && stored.tokens.size() == blocks * size && medium != 0;
  const bool larger = stored.block_size > block_tokens_;
  const bool smaller = stored.block_size < block_tokens_ && known_.empty();
  if (named && (larger || smaller)) {
    forget_blocks();
    block_tokens_ = stored.block_size;
  }
  BlockHash parent = tokens_root();
  const bool nameable = named && stored.block_size == block_tokens_;
  bool behind_known = nameable;
  if (behind_known && stored.parent.has_value()) {
    const auto it = known_.find(key_of(*stored.parent));
    behind_known = it != known_.end();
    if (behind_known) parent = it->second.name;
  }
  for (size_t i = 0; i < blocks; ++i) {
    const auto known = known_.find(key_of(stored.hashes[i]));
    if (known != known_.end()) {  // in one more medium, or told of again
      known->second.media |= medium;
      parent = known->second.name;
      behind_known = nameable;
      continue;
    }
    behind_known = behind_known && stored.is_plain(i);
    if (!behind_known) {
      ++left_out_;
      continue;
    }
    parent = serve::chain_hash(parent, std::span(stored.tokens).subspan(i * size, size));
    known_[key_of(stored.hashes[i])] = {parent, medium};
    if (++held_[parent] == 1) note(parent, true);
  }
  if (known_.size() > max_blocks_) forget_blocks();
}

void TokenIndex::remove(const BlockRemoved& removed) {
  if (removed.remote) return;
  if (removed.group.has_value() && group_known_ && removed.group != group_) return;
  const uint32_t medium = medium_bit(removed.medium, removed.ownership);
  for (const SentHash& hash : removed.hashes) {
    const auto known = known_.find(key_of(hash));
    if (known == known_.end()) continue;
    known->second.media &= ~medium;
    if (known->second.media != 0) continue;
    const auto held = held_.find(known->second.name);
    if (--held->second == 0) {
      note(held->first, false);
      held_.erase(held);
    }
    known_.erase(known);
  }
}

void TokenIndex::apply(const EventBatch& batch) {
  for (const KvEvent& event : batch.events) {
    if (const auto* stored = std::get_if<BlockStored>(&event)) {
      store(*stored);
    } else if (const auto* removed = std::get_if<BlockRemoved>(&event)) {
      remove(*removed);
    } else {
      forget_blocks();
    }
  }
}

serve::CacheNews TokenIndex::news() {
  serve::CacheNews news{.snapshot = std::exchange(snapshot_, false),
                        .root = tokens_root(),
                        .block_tokens = block_tokens_,
                        .names_a_model = false,
                        .changes = changes_};
  if (news.snapshot) {
    news.stored.reserve(held_.size());
    for (const auto& [name, count] : held_) news.stored.push_back(name);
  }
  for (const auto& [name, held] : noted_) (held ? news.stored : news.removed).push_back(name);
  noted_.clear();
  return news;
}

}  // namespace baton::engine::kv_events
