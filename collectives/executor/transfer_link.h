// A link over any provider: a message is a transfer to the receiver, and a counter says that it is
// there. A small one goes into a slot. A large one waits until its receiver has granted a place,
// which is where the message is wanted if that can be reached, and memory from the pool if not;
// then nothing is kept for it.
//
// Slots, and what else a direction needs, are made when the sender first asks for them: a pair of
// ranks that sends nothing to each other has a counter for each lane and no memory.
//
// The sender needs no order between transfers, nor between rails: every slot has a counter of its
// own, and holds one message at a time; a granted message uses the counter alone. The first message
// of a call carries the call's descriptor, so that a peer that called something else is found out,
// and with it the slots of its lane that have been read. Where nothing goes back, the receiver
// gives slots back by raising a counter of the sender's, for every other message.
//
// Packets of sends and receives are notifications. A piece of a large send is a write to where the
// receiver has granted it, which takes a packet along.
//
// A small message is copied when it is sent: its call need not wait until it has arrived. Whoever
// leaves does (unsettled()).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

  // Messages of up to so many bytes, and half of the largest, go through slots. Fewer in large
  // groups: the slots of a rank together stay below kSlotBudget, were all its links used.
  static constexpr size_t kMostSlotBytes = 64 << 10;
  // The slots of links of further groups to the same process, which are many: a longer message
  // waits for a grant there.
  static constexpr size_t kFurtherSlotBytes = 8 << 10;
  static constexpr size_t kSlotBudget = 16 << 20;
  // Messages of up to so many bytes are copied when they are sent.
  static constexpr size_t kEagerBytes = 4096;
  // Sends of up to so many bytes go with their first packet.
  static constexpr size_t kMostBehind = 16 << 10;
  // Writes to grants at a time: of two windows, for one may be there and not acknowledged yet.
  static constexpr uint32_t kWrites = 16;

  // A packet travels as a notification: the group's id, this, and then the packet.
  static constexpr char kPacket = 'p';

  // The header of the first message of a call.
  struct Announcement {
    CallDescriptor call;
    uint32_t lane = 0;
    uint32_t given_back = 0;  // messages of the other side's in this lane that have been read since
  };
  static_assert(sizeof(Announcement) == sizeof(CallDescriptor) + 8);

  // Both sides exchange this before either may send.
  struct Offer {
    std::array<RemoteCounter, kLanes> room;  // for the other to raise: our slots at its side

    std::string encode() const;
    static absl::StatusOr<Offer> decode(std::string_view bytes);
  };
  // A place for one message, behind a packet and the region that it lies in.
  struct Grant {
    uint64_t offset = 0;
    uint32_t bytes = 0;
    uint16_t number = 0;  // of the message in its lane, the low bits
    uint16_t lane = 0;
  };
  static_assert(sizeof(Grant) == 16);
  // The memory that the other side may write to. Sent once, on request.
  struct Slots {
    RemoteRegion region;
    std::array<std::array<RemoteCounter, kSlots>, kLanes> arrived;
    uint64_t offset = 0;  // of the first slot in the region
    uint64_t slot_bytes = 0;

    std::string encode() const;
    static absl::StatusOr<Slots> decode(std::string_view bytes);
  };

  // `most`: bytes of the largest message. `group`: its id, which all that is told to the peer
  // begins with. `ranks`: of the group. `further`: this process has a link to the peer's already.
  // The peer may have slots of another size.
  static absl::StatusOr<std::unique_ptr<TransferLink>> create(Worker& worker, Memory& memory,
                                                              PeerId peer, size_t most,
                                                              uint64_t group = 0,
                                                              uint32_t ranks = 2,
                                                              bool further = false);
  ~TransferLink() override;
  Offer offer() const;
  void set_offer(const Offer& theirs) { theirs_ = theirs; }
  // The peer's first message of a call to us.
  void announced(const Announcement& theirs);
  // A packet of the peer's came, as it was sent. The call that it tells of if that is a message of
  // an all_to_all_v: all that is known of it.
  std::optional<CallDescriptor> came(std::string_view packet);
  // Whether anything was submitted since the last question, and waits for the worker to advance.
  bool take_submitted() { return std::exchange(submitted_, false); }
  // True while a transfer is under way. A small message may be, though its call has ended.
  bool unsettled() const { return open_.load(std::memory_order_acquire) != 0; }

  // Bytes received that came straight to where they were wanted.
  uint64_t in_place_bytes() const { return in_place_bytes_; }
  // Memory that messages wait in, at this side.
  size_t held_bytes() const { return slots_.size + staged_bytes_; }

  uint64_t send(uint32_t lane, const Segments& source, const CallTag& tag) override;
  bool delivered(uint32_t lane, uint64_t number) override;
  bool peek(uint32_t lane, size_t expected, const CallTag& tag, Segments& message,
            absl::Status& error) override;
  bool waits_for_grant(size_t most) const override { return most > slot_bytes_; }
  void grant_next(uint32_t lane, uint32_t ahead, const Segments& place) override;
  bool consume(uint32_t lane) override;
  void flush() override { tell_grants(); }
  size_t most_behind() const override { return kMostBehind; }
  bool tell(const Packet& packet, absl::Span<const std::byte> behind) override;
  bool hear(Packet& packet, absl::Span<const std::byte>& behind) override;
  void heard() override;
  bool reads() const override { return false; }
  bool grant(std::byte* data, size_t bytes, Place& place) override;
  bool can_write(const std::byte* data, size_t bytes) const override;
  uint32_t write(const std::byte* source, size_t bytes, const Place& place,
                 const Packet& packet) override;
  bool written(uint32_t number) override;
  std::string route() const override;

  absl::Status status() const override;

  // Revokes what was granted, and asks for the end of all transfers under way but those of small
  // messages, which may be of calls that have ended.
  void begin_cancel();
  // No byte is read from what was sent any more, though some may still land at the peer.
  bool sources_free() const { return held().generation == 0; }
  // Makes it so, whatever the wire does: the worker closes paths that hold them.
  void withdraw();
  // Ends them; returns when no byte moves any more.
  void cancel();

 private:
  // A message on its way. Its transfer's end is told on whatever thread drives the worker.
  struct Outgoing {
    std::atomic<uint64_t> done{0};  // number of the last message of this slot that has ended
    uint64_t number = 0;
    bool copied = false;  // its source may be written again
    TransferId id;
    Block staging;  // at least until it has arrived; data null: none
    TransferLink* link = nullptr;
  };

  // A message that the peer may send to a place of ours.
  struct Granted {
    uint64_t number = 0;  // 0: none
    std::byte* data = nullptr;
    size_t bytes = 0;
    Block staging;  // where `data` is memory of the link's
  };
  // A place of the peer's that one of our messages goes to.
  struct TheirPlace {
    uint64_t number = 0;
    RemoteRegion region;
    uint64_t offset = 0;
    size_t bytes = 0;
  };
  // A write to a grant.
  struct Write {
    std::atomic<bool> under_way{false};  // of one that failed: for ever
    bool used = false;
    TransferId id;
    TransferLink* link = nullptr;
  };
  static constexpr size_t kHead = sizeof(uint64_t) + 1 + sizeof(Packet);  // of a notification

  TransferLink(Worker& worker, Memory& memory, PeerId peer, size_t slot_bytes, uint64_t group)
      : worker_(worker), memory_(memory), peer_(peer), slot_bytes_(slot_bytes), group_(group) {}
  static void on_end(void* context, TransferId id, const absl::Status& status);
  static void on_written(void* context, TransferId id, const absl::Status& status);
  void fail(const absl::Status& why);
  TransferId held() const;  // one that holds memory of callers; generation 0: none does
  absl::Status make_slots();
  void answer();
  // Raises the peer's counter for what has been read, if that is due. Where there was no transfer
  // left for it, again whenever this side looks for a message or has no room to send one.
  void give_back(uint32_t lane);
  void write_head(char* to, const Packet& packet) const;
  // `place` null: a slot.
  bool choose_source(uint32_t lane, uint64_t number, const Segments& source,
                     const TheirPlace* place, TransferRequest& request);
  bool is_announced(uint32_t lane, uint64_t call) const;
  // Writes the header of a call's first message to `text`.
  std::string_view announce(uint32_t lane, const CallTag& tag, absl::Span<char> text);
  // Tells the peer of what was granted; what there is no room for, when it is called again.
  void tell_grants();
  absl::Status on_grants(std::string_view bytes);
  absl::Status stage(Block& staging, size_t bytes);
  void unstage(Block& staging);
  // Messages of ours in this lane that have been read, as far as we know.
  uint64_t room(uint32_t lane) const {
    return std::max(worker_.counter_value(room_[lane]) + announced_room_[lane],
                    granted_room_[lane]);
  }
  static size_t slot_offset(uint32_t lane, uint64_t number, size_t slot_bytes) {
    return (lane * kSlots + number % kSlots) * slot_bytes;
  }

  Worker& worker_;
  Memory& memory_;
  const PeerId peer_;
  const size_t slot_bytes_;
  const uint64_t group_;
  Block slots_;  // data null: the peer has not asked
  std::array<std::array<CounterId, kSlots>, kLanes> arrived_{};
  std::array<CounterId, kLanes> room_{};
  Offer theirs_;
  std::optional<Slots> their_slots_;
  bool asked_ = false;
  bool answer_due_ = false;
  std::array<uint64_t, kLanes> announced_room_{};  // given back by announcements
  std::array<uint64_t, kLanes> granted_room_{};    // implied by grants
  bool submitted_ = false;

  std::array<uint64_t, kLanes> sent_{};
  std::array<uint64_t, kLanes> taken_{};
  std::array<uint64_t, kLanes> given_back_{};
  std::array<std::array<Outgoing, kSlots>, kLanes> outgoing_;
  std::array<std::array<Granted, kSlots>, kLanes> granted_;
  std::vector<std::pair<uint32_t, uint64_t>> untold_;  // of these, by lane and number
  std::array<std::array<TheirPlace, kSlots>, kLanes> their_places_;
  size_t staged_bytes_ = 0;
  uint64_t in_place_bytes_ = 0;
  // The sequence of the last call that each lane has announced: several calls that wait for places
  // are announced once each.
  std::array<uint64_t, kLanes> announced_call_{};
  std::array<Write, kWrites> writes_;
  std::vector<std::byte> came_;    // packets, each behind its size
  size_t next_came_ = 0;           // where the next one begins
  std::atomic<uint32_t> open_{0};  // transfers that have not ended
  mutable std::mutex mutex_;       // guards failure_
  absl::Status failure_;
};

}  // namespace baton::collectives::executor
