// Blocks of any size in one range of memory: where there is room, and who leaves to make some.
//
// A block is filled by whoever took its space, then published under a key, and never changed again.
// Its space is used anew when it has left the index, its lease is over and no reader holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "kvtransfer/tiers/tier_record.h"
#include "transport/base/free_ranges.h"
#include "transport/clock.h"

namespace baton::kvtransfer::store {

struct ArenaStats {
  uint64_t blocks = 0;  // that can be found
  uint64_t bytes = 0;   // in use, also by those that are being filled
  uint64_t evicted = 0;
  uint64_t refused = 0;  // for want of room
};

// Any thread may call. The memory must outlive the arena, and the arena its blocks.
class BlockArena {
 public:
  BlockArena(std::span<std::byte> memory, size_t granule);

  class Space {
   public:
    Space(BlockArena& arena, size_t offset, size_t taken, size_t bytes)
        : arena_(arena), offset_(offset), taken_(taken), bytes_(bytes) {}
    ~Space() { arena_.give_back(offset_, taken_); }
    Space(const Space&) = delete;
    Space& operator=(const Space&) = delete;
    size_t offset() const { return offset_; }
    std::span<std::byte> bytes() const { return {arena_.memory_.data() + offset_, bytes_}; }

   private:
    BlockArena& arena_;
    size_t offset_, taken_, bytes_;
  };
  using SpacePtr = std::shared_ptr<Space>;

  // Room for a block, from those that were used longest ago where there is no other. Null: there is
  // none, for what is here is leased, held, or being filled.
  SpacePtr take(size_t bytes, Time now);
  // Another block of this key is found no more. `tag`: 36 bytes of the caller's, or fewer.
  void publish(const tiers::TierKey& key, SpacePtr space, std::string_view tag = {});

  struct Found {
    SpacePtr space;
    std::string_view tag() const { return {tag_bytes, tag_size}; }
    char tag_bytes[36] = {};
    uint8_t tag_size = 0;
  };
  // Null space: a miss. A hit is the last to leave, and does not before `lease`.
  Found find(const tiers::TierKey& key, Time lease = {});
  bool contains(const tiers::TierKey& key) const;

  // Those that were used last come first, until `visit` returns false. It must not call the arena.
  void each_from_the_newest(const std::function<bool(const Found& block)>& visit) const;

  ArenaStats stats() const;
  size_t capacity() const { return memory_.size(); }

 private:
  struct Entry {
    tiers::TierKey key;
    Time lease{};
    Found block;
  };
  using Order = std::list<Entry>;
  void give_back(size_t offset, size_t bytes);
  bool evict_one(Time now, SpacePtr* out);

  const std::span<std::byte> memory_;
  const size_t granule_;
  mutable std::mutex free_mutex_;  // taken after mutex_
  base::FreeRanges free_;
  mutable std::mutex mutex_;
  Order order_;  // the front leaves first
  absl::flat_hash_map<tiers::TierKey, Order::iterator> index_;
  uint64_t evicted_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace baton::kvtransfer::store
