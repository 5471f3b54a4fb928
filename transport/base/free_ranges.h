// Tracks the free ranges of a memory: first fit, adjacent ranges merge.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>

namespace baton::base {

// Not thread-safe.
class FreeRanges {
 public:
  explicit FreeRanges(size_t bytes) : free_(bytes) {
    if (bytes > 0) ranges_.emplace(0, bytes);
  }
  // The lowest range that is large enough and begins at a multiple of `alignment`.
  std::optional<size_t> take(size_t bytes, size_t alignment = 1) {
    for (auto it = ranges_.begin(); it != ranges_.end(); ++it) {
      const auto [offset, size] = *it;
      const size_t begin = (offset + alignment - 1) / alignment * alignment;
      const size_t skipped = begin - offset;
      if (size < skipped || size - skipped < bytes) continue;
      ranges_.erase(it);
      if (skipped > 0) ranges_.emplace(offset, skipped);
      if (size - skipped > bytes) ranges_.emplace(begin + bytes, size - skipped - bytes);
      free_ -= bytes;
      return begin;
    }
    return std::nullopt;
  }
  void give_back(size_t offset, size_t bytes) {
    free_ += bytes;
    auto next = ranges_.lower_bound(offset);
    if (next != ranges_.end() && offset + bytes == next->first) {
      bytes += next->second;
      next = ranges_.erase(next);
    }
    if (next != ranges_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    ranges_.emplace(offset, bytes);
  }
  size_t free_bytes() const { return free_; }

 private:
  std::map<size_t, size_t> ranges_;  // offset -> bytes, none beside another
  size_t free_ = 0;
};

}  // namespace baton::base
