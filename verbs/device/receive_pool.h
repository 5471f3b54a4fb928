// The receives of a device, shared by its queue pairs (a shared receive queue), so that memory for
// messages grows with the traffic and not with the number of peers.
//
// Every message takes one receive from whatever queue pair it comes, so peers may send only as many
// as they have credits for, and there are never more credits than receives: grant() says how many
// more a peer may have, take_back() that it has lost some. The pool grows in slabs up to
// `verbs.shared_receives`; nothing is posted that is not backed by memory here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "verbs/device/tuning.h"
#include "verbs/device/verbs_api.h"

namespace baton::verbs {

class Device;

// In the wr_id of every receive, shared or not, beside the number of its slot.
inline constexpr uint64_t kReceiveId = uint64_t{1} << 63;

class ReceivePool {
 public:
  // The least number of receives of a queue pair: with fewer it would always wait for credits.
  static constexpr uint32_t kLeast = 16;
  static constexpr uint32_t kSlab = 128;  // receives that are made at a time

  static absl::StatusOr<std::unique_ptr<ReceivePool>> create(const Device& device,
                                                             const Tuning& tuning);
  ~ReceivePool();
  ReceivePool(const ReceivePool&) = delete;
  ReceivePool& operator=(const ReceivePool&) = delete;

  ibv_srq* handle() const { return queue_; }

  // Up to `wish` credits, for which receives are posted when it returns; fewer, or none, when the
  // pool is at its limit or memory is short.
  uint32_t grant(uint32_t wish);
  void take_back(uint32_t credits) { granted_ -= credits; }
  // The number of receives for a new queue pair: a sixteenth of what is left.
  uint32_t share() const { return std::max(kLeast, (limit_ - granted_) / 16); }
  // Little is left: queue pairs that have more than kLeast should give some back.
  bool scarce() const { return limit_ - granted_ < limit_ / 8; }

  std::byte* slot(uint32_t index) const;
  // Receives that have been used, into the queue again.
  void post(const uint32_t* slots, size_t count);

  uint32_t granted() const { return granted_; }
  uint32_t capacity() const { return static_cast<uint32_t>(slabs_.size()) * kSlab; }

 private:
  struct Slab {
    std::byte* memory = nullptr;
    ibv_mr* registration = nullptr;
  };

  explicit ReceivePool(const Device& device) : device_(device) {}
  bool grow();

  const Device& device_;
  ibv_srq* queue_ = nullptr;
  uint32_t limit_ = 0;
  uint32_t granted_ = 0;
  std::vector<Slab> slabs_;
};

}  // namespace baton::verbs
