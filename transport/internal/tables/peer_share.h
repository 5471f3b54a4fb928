// What one peer's transfers may take of a worker's slots: those of a peer that does not read, or is
// not reached, must leave some for all others.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace baton::internal {

// The share of one peer. All calls from any thread.
class PeerShare {
 public:
  // Transfers that have begun and not ended.
  struct Open {
    uint32_t all = 0;
    uint32_t notifying = 0;  // of them, those with a notification
  };

  // Counts another one; what was there before it.
  Open take(bool notifies) { return split(word_.fetch_add(one(notifies), kOrder)); }
  // One has ended, or did not begin after all.
  void give_back(bool notifies) { word_.fetch_sub(one(notifies), kOrder); }
  Open open() const { return split(word_.load(kOrder)); }

  // Whether a peer with so many may have another one while so many of all slots are free: no more
  // than are free, so that one peer has half of all at most. When less than half is free it is less
  // than that, in proportion: of many peers that take all they may, one after the other, k leave
  // about all / 2k. Half as many with notifications: those that wait for credit must not keep the
  // peer's other transfers out. The first is not refused: who is refused has something to wait for.
  static bool leaves_room(Open open, bool notifies, uint32_t free, uint32_t all) {
    if (free == 0) return false;
    const uint64_t room = uint64_t{free} * std::min<uint64_t>(all, 2 * uint64_t{free});
    if (open.all > 0 && uint64_t{open.all} * all >= room) return false;
    return !notifies || open.notifying == 0 || 2 * uint64_t{open.notifying} * all < room;
  }

 private:
  // A number by which nothing else is made visible.
  static constexpr auto kOrder = std::memory_order_relaxed;
  static constexpr uint64_t one(bool notifies) { return uint64_t{notifies} << 32 | 1; }
  static constexpr Open split(uint64_t word) {
    return {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
  }
  std::atomic<uint64_t> word_{0};  // notifying << 32 | all
};

}  // namespace baton::internal
