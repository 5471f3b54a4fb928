// Blocks by key; least recently used out.
#include "kvtransfer/store/block_arena.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

namespace baton::kvtransfer::store {

BlockArena::BlockArena(std::span<std::byte> memory, size_t granule)
    : memory_(memory.first(memory.size() / granule * granule)),
      granule_(granule),
      free_(memory_.size()) {}

void BlockArena::give_back(size_t offset, size_t bytes) {
  const std::lock_guard lock(free_mutex_);
  free_.give_back(offset, bytes);
}

// Takes one block out that may leave. Its space is given to the caller, who lets go of it without
// the lock.
bool BlockArena::evict_one(Time now, SpacePtr* out) {
  const std::lock_guard lock(mutex_);
  for (auto it = order_.begin(); it != order_.end(); ++it) {
    if (it->lease > now || it->block.space.use_count() > 1) continue;
    *out = std::move(it->block.space);
    index_.erase(it->key);
    order_.erase(it);
    ++evicted_;
    return true;
  }
  ++refused_;
  return false;
}

BlockArena::SpacePtr BlockArena::take(size_t bytes, Time now) {
  const size_t wanted = (std::max<size_t>(bytes, 1) + granule_ - 1) / granule_ * granule_;
  if (bytes > memory_.size() || wanted > memory_.size()) {
    const std::lock_guard lock(mutex_);
    ++refused_;
    return nullptr;
  }
  for (;;) {
    {
      const std::lock_guard lock(free_mutex_);
      if (const std::optional<size_t> offset = free_.take(wanted); offset.has_value()) {
        return std::make_shared<Space>(*this, *offset, wanted, bytes);
      }
    }
    SpacePtr evicted;
    if (!evict_one(now, &evicted)) return nullptr;
  }
}

void BlockArena::publish(const tiers::TierKey& key, SpacePtr space, std::string_view tag) {
  Entry entry{.key = key};
  entry.block.space = std::move(space);
  entry.block.tag_size = static_cast<uint8_t>(std::min(tag.size(), sizeof(Found::tag_bytes)));
  std::copy_n(tag.data(), entry.block.tag_size, entry.block.tag_bytes);
  SpacePtr older;
  const std::lock_guard lock(mutex_);
  if (const auto it = index_.find(key); it != index_.end()) {
    older = std::move(it->second->block.space);
    order_.erase(it->second);
    index_.erase(it);
  }
  order_.push_back(std::move(entry));
  index_.emplace(key, std::prev(order_.end()));
}

BlockArena::Found BlockArena::find(const tiers::TierKey& key, Time lease) {
  const std::lock_guard lock(mutex_);
  const auto it = index_.find(key);
  if (it == index_.end()) return {};
  Entry& entry = *it->second;
  entry.lease = std::max(entry.lease, lease);
  order_.splice(order_.end(), order_, it->second);
  return entry.block;
}

bool BlockArena::contains(const tiers::TierKey& key) const {
  const std::lock_guard lock(mutex_);
  return index_.contains(key);
}

void BlockArena::each_from_the_newest(const std::function<bool(const Found& block)>& visit) const {
  const std::lock_guard lock(mutex_);
  for (auto it = order_.rbegin(); it != order_.rend(); ++it) {
    if (!visit(it->block)) return;
  }
}

ArenaStats BlockArena::stats() const {
  ArenaStats stats;
  {
    const std::lock_guard lock(free_mutex_);
    stats.bytes = memory_.size() - free_.free_bytes();
  }
  const std::lock_guard lock(mutex_);
  stats.blocks = index_.size();
  stats.evicted = evicted_;
  stats.refused = refused_;
  return stats;
}

}  // namespace baton::kvtransfer::store
