// Memory in which blocks lie between two engines: of prefill, until decode has read them; of
// decode, until they are checked. One range, registered once.
//
// Pieces are handed out at multiples of their own size from the beginning, so that to a peer all
// pieces of a size are one row of descriptors, and a piece is a number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "transport/base/free_ranges.h"

namespace baton::engine::handoff {

// Not thread-safe.
class Staging {
 public:
  // ResourceExhausted: there is not so much memory. It is faulted in as it is used.
  static absl::StatusOr<std::unique_ptr<Staging>> make(size_t bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  // How many pieces of `size` bytes there may be.
  size_t pieces(size_t size) const { return bytes_ / size; }
  std::byte* piece(size_t size, uint32_t number) const { return base_ + size * number; }
  // The number of a piece that no transfer has; none while there is no room.
  std::optional<uint32_t> allocate(size_t size) {
    const std::optional<size_t> begin = free_.take(size, size);
    if (!begin.has_value()) return std::nullopt;
    return static_cast<uint32_t>(*begin / size);
  }
  void release(size_t size, uint32_t number) { free_.give_back(size * number, size); }
  size_t used() const { return bytes_ - free_.free_bytes(); }

 private:
  Staging(std::byte* base, size_t bytes) : base_(base), bytes_(bytes), free_(bytes) {}

  std::byte* const base_;
  const size_t bytes_;
  base::FreeRanges free_;
};

}  // namespace baton::engine::handoff
