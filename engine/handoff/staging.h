// Memory in which blocks lie between two engines: of prefill, until decode has read them; of
// decode, until they are checked. One range, registered once.
//
// Pieces are handed out at multiples of their own size from the beginning, so that to a peer all
// pieces of a size are one row of descriptors, and a piece is a number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"

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
  std::optional<uint32_t> allocate(size_t size);
  void release(size_t size, uint32_t number);
  size_t used() const { return used_; }

 private:
  Staging(std::byte* base, size_t bytes) : base_(base), bytes_(bytes), free_{{0, bytes}} {}

  std::byte* const base_;
  const size_t bytes_;
  std::map<size_t, size_t> free_;  // where gaps begin, and end
  size_t used_ = 0;
};

}  // namespace baton::engine::handoff
