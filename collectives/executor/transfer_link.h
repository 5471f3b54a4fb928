// A link over any provider: a message is a transfer into a slot at the receiver, and a counter of
// that slot says that it is there.
//
// The sender needs no order between transfers, nor between rails: every slot has a counter of its
// own, and holds one message at a time. The first message of a call carries the call's descriptor,
// so that a peer that called something else is found out, and with it the slots of its lane that
// have been read. Where nothing goes back, the receiver gives slots back by raising a counter of
// the sender's, for every other message. A point-to-point message is taken only once its descriptor
// is here and fits, and the sender hears of that through the same counter.
//
// A small message is copied when it is sent: its call need not wait until it has arrived. Whoever
// leaves does (unsettled()).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

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

  // Messages of up to so many bytes are copied when they are sent.
  static constexpr size_t kEagerBytes = 4096;

  // What the first message of a call says beside its bytes.
  struct Announcement {
    CallDescriptor call;
    uint32_t lane = 0;
    uint32_t given_back = 0;  // messages of the other side's in this lane that have been read since
  };
  static_assert(sizeof(Announcement) == sizeof(CallDescriptor) + 8);

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

  // Allocates the slots for `peer`. `group`: its id, which announcements begin with.
  static absl::StatusOr<std::unique_ptr<TransferLink>> create(Worker& worker, Memory& memory,
                                                              PeerId peer, size_t slot_bytes,
                                                              uint64_t group = 0);
  ~TransferLink() override;
  absl::StatusOr<Offer> offer() const;
  void set_offer(const Offer& theirs) { theirs_ = theirs; }
  // The peer's first message of a call to us.
  void announced(const Announcement& theirs);
  // Whether anything was submitted since the last question, and waits for the worker to advance.
  bool take_submitted() { return std::exchange(submitted_, false); }
  // Whether anything is on its way: a small message may be, though its call has ended.
  bool unsettled() const { return open_.load(std::memory_order_acquire) != 0; }

  uint64_t send(uint32_t lane, const Segments& source, const CallTag& tag) override;
  bool delivered(uint32_t lane, uint64_t number) override;
  bool peek(uint32_t lane, size_t expected, const CallTag& tag, Segments& message,
            absl::Status& error) override;
  bool consume(uint32_t lane) override;
  std::string route() const override;

  absl::Status status() const override;

  // Asks for the end of all transfers under way but those of small messages, which may be of calls
  // that have ended.
  void begin_cancel();
  // No byte is read from what was sent any more, though some may still land at the peer.
  bool sources_free() const;
  // Ends them; returns when no byte moves any more.
  void cancel();

 private:
  // A message on its way. Its transfer's end is told on whatever thread drives the worker.
  struct Outgoing {
    std::atomic<uint64_t> done{0};  // number of the last message of this slot that has ended
    uint64_t number = 0;
    bool copied = false;  // its source may be written again
    TransferId id;
    Block eager;    // a part of the link's
    Block staging;  // made when first needed
    TransferLink* link = nullptr;
  };

  TransferLink(Worker& worker, Memory& memory, PeerId peer, size_t slot_bytes, uint64_t group)
      : worker_(worker), memory_(memory), peer_(peer), slot_bytes_(slot_bytes), group_(group) {}
  static void on_end(void* context, TransferId id, const absl::Status& status);
  bool choose_source(uint32_t lane, uint64_t number, const Segments& source,
                     TransferRequest& request);
  uint64_t room(uint32_t lane) const {
    return worker_.counter_value(room_[lane]) + announced_room_[lane];
  }
  size_t slot_offset(uint32_t lane, uint64_t number) const {
    return (lane * kSlots + number % kSlots) * slot_bytes_;
  }

  Worker& worker_;
  Memory& memory_;
  const PeerId peer_;
  const size_t slot_bytes_;
  const uint64_t group_;
  Block slots_;
  Block eager_;  // kEagerBytes for each slot of each lane
  std::array<std::array<CounterId, kSlots>, kAllLanes> arrived_{};
  std::array<CounterId, kAllLanes> room_{};
  Offer theirs_;
  std::array<uint64_t, kAllLanes> announced_room_{};  // given back by announcements
  bool submitted_ = false;

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
