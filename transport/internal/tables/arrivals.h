// Arrivals: the target's side of a write. Adds up the slices of each transfer, over all rails and
// repeats, and says once that the last byte is here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "transport/provider.h"

namespace baton::internal {

// One per peer. A slice that arrives twice (its acknowledgement was lost with a rail) counts once.
class Arrivals {
 public:
  // The most slices one transfer may be cut into, and the most transfers that may be under way: one
  // per slot of the sender.
  static constexpr uint32_t kMaxSlices = 4096;
  static constexpr uint32_t kMaxSlots = 1 << 16;
  // So many transfers of one slot may be under way here, one after the other at their sender. Where
  // an adapter tells the sender that all is written, the slot's next transfer can be told of on
  // another rail before this one's rail is looked at.
  static constexpr uint32_t kOpenPerSlot = 4;
  // How many generations of a slot before the newest are remembered as completed or not.
  static constexpr uint32_t kRemembered = 32;
  // Bytes of notifications whose transfers have not all arrived. A correct peer has credit for
  // less.
  static constexpr size_t kMaxText = 16 << 20;
  static constexpr size_t kMostSpare = 1024;
  static constexpr size_t kMaxOpen = size_t{kMaxSlots} * kOpenPerSlot;

  struct Complete {
    bool now = false;         // this slice was the last one
    std::string_view notify;  // valid until the next call
  };
  // InvalidArgument when the peer contradicts itself.
  absl::StatusOr<Complete> add(const Arrival& arrival);

  // Whether the slice has arrived; also of a transfer that was completed.
  bool has(TransferId transfer, uint32_t slice) const;

  size_t open() const { return open_.size(); }
  size_t text() const { return text_; }

 private:
  struct Partial {
    uint32_t generation = 0;
    uint64_t bytes = 0;
    uint64_t total = 0;
    std::vector<uint64_t> seen;  // one bit per slice
    std::string notify;
  };
  // A slot's completed transfers, by generation.
  struct Completed {
    uint32_t newest = 0;  // 0: none
    // Bit i: newest - 1 - i. What is older is taken for new: nothing is sent twice without asking
    // whether it had arrived, and one that many others of its slot overtook must not be lost.
    uint32_t before = 0;
    bool holds(uint32_t generation) const;
    void add(uint32_t generation);
  };
  static uint32_t place_of(TransferId transfer) {
    return transfer.slot * kOpenPerSlot + transfer.generation % kOpenPerSlot;
  }
  // By slot and generation modulo kOpenPerSlot. One that was cancelled half way stays until a new
  // transfer takes its place.
  absl::flat_hash_map<uint32_t, Partial> open_;
  std::vector<Partial> spare_;  // emptied, their memory kept
  // By slot: a repeated slice cannot open its transfer again.
  std::vector<Completed> completed_;
  std::string notify_;
  size_t text_ = 0;  // bytes of Partial::notify
};

}  // namespace baton::internal
