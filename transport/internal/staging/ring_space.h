// Room in a staging ring: runs of pages, taken and given back in any order.
//
// Each is taken for a peer. One that has some leaves room for a chunk to those that have none: it
// may stand still with what it has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace baton::internal {

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

}  // namespace baton::internal
