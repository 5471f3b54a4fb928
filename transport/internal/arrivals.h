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
  static constexpr size_t kMaxOpen = kMaxSlots;

  struct Complete {
    bool now = false;         // this slice was the last one
    std::string_view notify;  // valid until the next call
  };
  // InvalidArgument when the peer contradicts itself.
  absl::StatusOr<Complete> add(const Arrival& arrival);

  size_t open() const { return open_.size(); }

 private:
  struct Partial {
    uint32_t generation = 0;
    uint64_t bytes = 0;
    uint64_t total = 0;
    std::vector<uint64_t> seen;  // one bit per slice
    std::string notify;
  };
  // By slot. One that was cancelled half way stays until its slot has a new transfer.
  absl::flat_hash_map<uint32_t, Partial> open_;
  std::vector<Partial> spare_;  // emptied, their memory kept
  // The generation last completed in each of the sender's slots: a repeated slice cannot open its
  // transfer again.
  std::vector<uint32_t> completed_;
  std::string notify_;
};

}  // namespace baton::internal
