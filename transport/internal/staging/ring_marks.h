// Marks in a staging ring, one for each of its pages: who may copy straight from there.
//
// A ring that peers have mapped can be read where it lies: their device's engine takes the bytes
// from it, and no processor copies them. The ring's owner lends a run of pages by the mark of the
// first one; the borrower takes the mark before its engine may read, and says by it when that has
// ended. Whichever of the two goes away, the owner knows whether the pages can be used again:
//
//   owner:     free -> lent (with a turn)          before it tells the borrower
//   borrower:  lent -> read (with its process)     else it reads nothing
//              read -> free                        when no engine reads any more
//   owner:     lent -> free                        takes it back: no peer will read
//
// Each lending is another turn, of which the borrower is told: whoever comes late, with words of an
// earlier one, does not get what lies there now. Pages that are being read stay out of use until
// the mark is free, or its process has ended.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace baton::internal {

// Room in a staging ring: runs of pages, taken and given back in any order.
//
// Each is taken for a peer. One that has some leaves room for a chunk to those that have none: it
// may stand still with what it has.

// The last eighth is kept for what is urgent: it never waits for bulk. Allocates nothing.
class RingSpace {
 public:
  static constexpr size_t kPage = 64 << 10;

  // `bytes` from `offset` of the ring on, both multiples of kPage.
  RingSpace(size_t offset, size_t bytes) : offset_(offset), taken_(bytes / kPage) {}

  // A place for `bytes` > 0 for this peer; nothing if there is no room now.
  std::optional<size_t> take(size_t bytes, bool urgent, uint32_t peer) {
    const size_t pages = (bytes + kPage - 1) / kPage;
    const size_t end = urgent ? taken_.size() : bulk();
    if (!urgent && has_any(peer) && free_for_bulk() < pages + std::min(kLeft, end / 4)) {
      return std::nullopt;
    }
    size_t run = 0;
    for (size_t i = 0; i < end; ++i) {
      run = taken_[i] != 0 ? 0 : run + 1;
      if (run < pages) continue;
      const size_t first = i + 1 - pages;
      for (size_t k = first; k <= i; ++k) taken_[k] = peer + 1;
      used_ += pages * kPage;
      return offset_ + first * kPage;
    }
    return std::nullopt;
  }
  void give_back(size_t offset, size_t bytes) {
    const size_t first = (offset - offset_) / kPage;
    const size_t pages = (bytes + kPage - 1) / kPage;
    for (size_t k = first; k < first + pages; ++k) taken_[k] = 0;
    used_ -= pages * kPage;
  }

  // Whether something of the peer's has room here.
  bool has_any(uint32_t peer) const {
    return std::find(taken_.begin(), taken_.end(), peer + 1) != taken_.end();
  }

  size_t used() const { return used_; }
  size_t size() const { return taken_.size() * kPage; }
  // The longest piece that bulk can have when nothing is taken.
  size_t longest() const { return bulk() * kPage; }

 private:
  static constexpr size_t kLeft = 64;  // pages: the longest chunk

  size_t bulk() const { return taken_.size() - taken_.size() / 8; }
  size_t free_for_bulk() const {
    return static_cast<size_t>(
        std::count(taken_.begin(), taken_.begin() + static_cast<ptrdiff_t>(bulk()), 0u));
  }

  const size_t offset_;
  std::vector<uint32_t> taken_;  // one more than the peer; 0: free
  size_t used_ = 0;
};

class RingMarks {
 public:
  static constexpr size_t kMark = sizeof(uint64_t);

  // So many bytes at the end of a ring of `ring` bytes are marks.
  static constexpr size_t bytes_for(size_t ring) {
    const size_t marks = ring / RingSpace::kPage * kMark;
    return (marks + RingSpace::kPage - 1) / RingSpace::kPage * RingSpace::kPage;
  }

  // The ring that has so much room.
  static constexpr size_t with_room(size_t room) {
    size_t ring = room;
    while (ring - bytes_for(ring) < room) ring += RingSpace::kPage;
    return ring;
  }

  RingMarks() = default;
  // Memory that cannot be a ring gives marks without room.
  RingMarks(std::byte* ring, size_t bytes)
      : ring_(ring), room_(is_ring(ring, bytes) ? bytes - bytes_for(bytes) : 0) {}

  std::byte* ring() const { return ring_; }
  // Bytes before the marks.
  size_t room() const { return room_; }
  // In whole pages.
  size_t half() const { return room_ / 2 / RingSpace::kPage * RingSpace::kPage; }
  // Whether [offset, offset + bytes) is room, from the beginning of a page on.
  bool covers(uint64_t offset, uint64_t bytes) const {
    return offset % RingSpace::kPage == 0 && bytes <= room_ && offset <= room_ - bytes;
  }

  // For the owner.
  void lend(size_t offset, uint32_t turn) const {
    mark(offset).store(lent(turn), std::memory_order_seq_cst);
  }
  // Whether no peer reads there, nor will. Else ask again, or ask for the reader.
  bool take_back(size_t offset) const {
    uint64_t seen = mark(offset).load(std::memory_order_acquire);
    if (seen % kKinds != kLent) return seen == kFree;
    return mark(offset).compare_exchange_strong(seen, kFree) || seen == kFree;
  }
  // The process that reads there; 0: none.
  uint32_t reader(size_t offset) const {
    return static_cast<uint32_t>(mark(offset).load(std::memory_order_acquire) / kKinds);
  }

  // For the borrower. False: it is no longer lent, or for another turn.
  bool borrow(size_t offset, uint32_t turn, uint32_t process) const {
    uint64_t seen = lent(turn);
    return mark(offset).compare_exchange_strong(seen, process * kKinds + kRead);
  }
  void give_back(size_t offset) const { mark(offset).store(kFree, std::memory_order_release); }

 private:
  static constexpr uint64_t kFree = 0;
  static constexpr uint64_t kLent = 1;
  static constexpr uint64_t kRead = 2;
  static constexpr uint64_t kKinds = 256;

  static constexpr uint64_t lent(uint32_t turn) { return uint64_t{turn} << 32 | kLent; }
  static bool is_ring(const std::byte* ring, size_t bytes) {
    return bytes >= 2 * RingSpace::kPage && bytes % RingSpace::kPage == 0 &&
           reinterpret_cast<uintptr_t>(ring) % kMark == 0;
  }

  std::atomic_ref<uint64_t> mark(size_t offset) const {
    return std::atomic_ref(
        *reinterpret_cast<uint64_t*>(ring_ + room_ + offset / RingSpace::kPage * kMark));
  }

  std::byte* ring_ = nullptr;
  size_t room_ = 0;
};

}  // namespace baton::internal
