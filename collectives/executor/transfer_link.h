// A link over any provider: a message is a transfer into a slot at the receiver, and a counter of
// that slot says that it is there.
//
// The sender needs no order between transfers, nor between rails: every slot has a counter of its
// own, and holds one message at a time. The receiver gives slots back by raising a counter of the
// sender's, for every other message. The first message of a call carries the call's descriptor, so
// that a peer that called something else is found out. A point-to-point message is taken only once
// its descriptor is here and fits, and the sender hears of that through the same counter.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "collectives/executor/control_block.h"
#include "collectives/executor/link.h"
#include "collectives/executor/memory.h"
#include "transport/worker.h"

namespace baton::collectives::executor {

class TransferLink final : public Link {
 public:
  static constexpr uint32_t kSlots = 4;  // of a lane
  static_assert(kSlots >= schedules::kMessagesAhead + 1, "slots come back two by two");

  // What the other side must know before it can send: travels once.
  struct Offer {
    RemoteRegion slots;
    std::array<std::array<RemoteCounter, kSlots>, kAllLanes> arrived;
    std::array<RemoteCounter, kAllLanes> room;  // for it to raise: our slots at its side
    uint64_t offset = 0;                        // of the first slot in the region
    uint64_t slot_bytes = 0;

    std::string encode() const;
    static absl::StatusOr<Offer> decode(std::string_view bytes);
  };

  // Allocates the slots for `peer`.
  static absl::StatusOr<std::unique_ptr<TransferLink>> create(Worker& worker, Memory& memory,
                                                              PeerId peer, size_t slot_bytes);
  ~TransferLink() override;
  absl::StatusOr<Offer> offer() const;
  void set_offer(const Offer& theirs) { theirs_ = theirs; }
  // The peer has begun to send this point-to-point call to us.
  void announced(const CallDescriptor& call) { peer_calls_[call.sequence % kCallsAhead] = call; }

  uint64_t send(uint32_t lane, const Segments& source, const CallTag& tag) override;
  bool delivered(uint32_t lane, uint64_t number) override;
  bool peek(uint32_t lane, size_t expected, const CallTag& tag, Segments& message,
            absl::Status& error) override;
  bool consume(uint32_t lane) override;
  std::string route() const override;

  absl::Status status() const override;

  // Ends all transfers under way; returns when no byte moves any more.
  void cancel();

 private:
  // A message on its way. Its transfer's end is told on whatever thread drives the worker.
  struct Outgoing {
    std::atomic<uint64_t> done{0};  // number of the last message of this slot that has ended
    uint64_t number = 0;
    TransferId id;
    Block staging;
    TransferLink* link = nullptr;
  };

  TransferLink(Worker& worker, Memory& memory, PeerId peer, size_t slot_bytes)
      : worker_(worker), memory_(memory), peer_(peer), slot_bytes_(slot_bytes) {}
  static void on_end(void* context, TransferId id, const absl::Status& status);
  size_t slot_offset(uint32_t lane, uint64_t number) const {
    return (lane * kSlots + number % kSlots) * slot_bytes_;
  }

  Worker& worker_;
  Memory& memory_;
  const PeerId peer_;
  const size_t slot_bytes_;
  Block slots_;
  std::array<std::array<CounterId, kSlots>, kAllLanes> arrived_{};
  std::array<CounterId, kAllLanes> room_{};
  Offer theirs_;

  std::array<uint64_t, kAllLanes> sent_{};
  std::array<uint64_t, kAllLanes> taken_{};
  std::array<uint64_t, kAllLanes> given_back_{};
  std::array<std::array<Outgoing, kSlots>, kAllLanes> outgoing_;
  // Sequences of the last calls whose descriptors were sent: collective, point to point.
  std::array<uint64_t, 2> announced_{};
  // The peer's last point-to-point calls to us, by sequence: it is never more than kSlots ahead.
  static constexpr size_t kCallsAhead = 2 * kSlots;
  std::array<CallDescriptor, kCallsAhead> peer_calls_{};
  std::atomic<uint32_t> open_{0};  // transfers that have not ended
  mutable std::mutex mutex_;       // guards failure_
  absl::Status failure_;
};

}  // namespace baton::collectives::executor
