// The host memory's records: a list in order of use, and an index over it.
#include "kvtransfer/tiers/memory_tier.h"

#include <algorithm>
#include <utility>

#include "transport/base/limits/memory_left.h"

namespace baton::kvtransfer::tiers {

void MemoryTier::drop(Order::iterator entry) {
  bytes_ -= (*entry)->bytes().size();
  index_.erase((*entry)->header().key);
  order_.erase(entry);
}

// Asks for some more than is needed now, since that reads files of the kernel's; so much is left
// for others.
bool MemoryTier::may_grow(size_t bytes) {
  constexpr size_t kStep = 64 << 20;
  if (bytes <= granted_) return true;
  const size_t wanted = std::min(capacity_, bytes + kStep);
  if (base::memory_left().bytes < wanted - bytes_ + kStep) return false;
  granted_ = wanted;
  return true;
}

void MemoryTier::put(std::shared_ptr<const TierRecord> record) {
  const size_t size = record->bytes().size();
  if (size > capacity_) return;
  const TierKey key = record->header().key;
  const std::lock_guard lock(mutex_);
  if (const auto it = index_.find(key); it != index_.end()) drop(it->second);
  while (bytes_ + size > capacity_ || !may_grow(bytes_ + size)) {
    if (order_.empty()) return;
    drop(order_.begin());
    ++evicted_;
  }
  order_.push_back(std::move(record));
  index_.emplace(key, std::prev(order_.end()));
  bytes_ += size;
}

std::shared_ptr<const TierRecord> MemoryTier::get(const TierKey& key) {
  const std::lock_guard lock(mutex_);
  const auto it = index_.find(key);
  if (it == index_.end()) return nullptr;
  order_.splice(order_.end(), order_, it->second);
  return *it->second;
}

bool MemoryTier::contains(const TierKey& key) const {
  const std::lock_guard lock(mutex_);
  return index_.contains(key);
}

void MemoryTier::erase(const TierKey& key) {
  const std::lock_guard lock(mutex_);
  if (const auto it = index_.find(key); it != index_.end()) drop(it->second);
}

size_t MemoryTier::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

size_t MemoryTier::records() const {
  const std::lock_guard lock(mutex_);
  return index_.size();
}

uint64_t MemoryTier::evicted() const {
  const std::lock_guard lock(mutex_);
  return evicted_;
}

}  // namespace baton::kvtransfer::tiers
