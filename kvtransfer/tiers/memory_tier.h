// Records in host memory, the one that was used longest ago leaving first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "absl/container/flat_hash_map.h"
#include "kvtransfer/tiers/tier_record.h"

namespace baton::kvtransfer::tiers {

// Any thread may call. A record that a reader still reads lives until the reader lets go of it.
// Where the machine or a memory cgroup has little left, the tier does not grow to its capacity:
// records leave before.
class MemoryTier {
 public:
  explicit MemoryTier(size_t capacity) : capacity_(capacity) {}

  void put(std::shared_ptr<const TierRecord> record);  // sealed
  // Null: a miss. A hit is the last to leave.
  std::shared_ptr<const TierRecord> get(const TierKey& key);
  bool contains(const TierKey& key) const;
  void erase(const TierKey& key);

  size_t bytes() const;
  size_t records() const;
  uint64_t evicted() const;

 private:
  using Order = std::list<std::shared_ptr<const TierRecord>>;
  void drop(Order::iterator entry);
  bool may_grow(size_t bytes);

  const size_t capacity_;
  mutable std::mutex mutex_;
  Order order_;  // the front leaves first
  absl::flat_hash_map<TierKey, Order::iterator> index_;
  size_t bytes_ = 0;
  size_t granted_ = 0;  // for so many there was memory left
  uint64_t evicted_ = 0;
};

}  // namespace baton::kvtransfer::tiers
