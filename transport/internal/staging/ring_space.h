// Room in a staging ring: runs of pages, taken and given back in any order.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace baton::internal {

// The last eighth is kept for what is urgent: it never waits for bulk. Allocates nothing.
class RingSpace {
 public:
  static constexpr size_t kPage = 64 << 10;

  // `bytes` from `offset` of the ring on, both multiples of kPage.
  RingSpace(size_t offset, size_t bytes) : offset_(offset), taken_(bytes / kPage) {}

  // Where `bytes` > 0 fit, or none now.
  std::optional<size_t> take(size_t bytes, bool urgent) {
    const size_t pages = (bytes + kPage - 1) / kPage;
    const size_t end = urgent ? taken_.size() : taken_.size() - taken_.size() / 8;
    size_t run = 0;
    for (size_t i = 0; i < end; ++i) {
      run = taken_[i] ? 0 : run + 1;
      if (run < pages) continue;
      const size_t first = i + 1 - pages;
      for (size_t k = first; k <= i; ++k) taken_[k] = true;
      used_ += pages * kPage;
      return offset_ + first * kPage;
    }
    return std::nullopt;
  }
  void give_back(size_t offset, size_t bytes) {
    const size_t first = (offset - offset_) / kPage;
    const size_t pages = (bytes + kPage - 1) / kPage;
    for (size_t k = first; k < first + pages; ++k) taken_[k] = false;
    used_ -= pages * kPage;
  }

  size_t used() const { return used_; }
  size_t size() const { return taken_.size() * kPage; }
  // The longest piece that bulk can have when nothing is taken.
  size_t longest() const { return (taken_.size() - taken_.size() / 8) * kPage; }

 private:
  const size_t offset_;
  std::vector<bool> taken_;
  size_t used_ = 0;
};

}  // namespace baton::internal
