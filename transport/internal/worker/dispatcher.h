// The dispatcher: queues transfers by peer, cuts them into slices, posts slices to the peer's
// rails, and moves them to another rail when one fails.
//
// A round costs what there is to post, not how many peers there are: those with something to post
// are on a list.
#pragma once

#include <vector>

#include "transport/internal/tables/peer_table.h"
#include "transport/internal/tables/transfer_slots.h"
#include "transport/worker.h"

namespace baton::internal {

class WorkerCore;

// A transfer of at most so many bytes is tiny: on a rail of several, it goes to the first
// (pick_rail()).
inline constexpr size_t kTinyBytes = 256;

class Dispatcher {
 public:
  explicit Dispatcher(WorkerCore& core);

  void enqueue(Peer& peer, uint32_t index);
  void dequeue(Peer& peer, uint32_t index);
  // For pump(). A peer that is not up is made ready when it is.
  void make_ready(Peer& peer);
  // Credit for notifications: from the peer, or back from a notification that did not arrive.
  void take_credit(Peer& peer, uint64_t amount);

  // Posts what can be posted.
  bool pump();
  bool pump_urgent(Peer& peer) { return pump(peer, peer.urgent); }
  bool due() const { return pump_due_ || !ready_peers_.empty(); }
  bool due_now() const { return pump_due_; }  // there are slices that no pump() has seen

  void slice_done(Rail& rail, TransferId transfer, uint32_t slice, absl::Status&& status);

 private:
  static constexpr uint32_t kNone = TransferSlot::kNone;

  bool pump(Peer& peer);
  bool pump(Peer& peer, SlotQueue& queue, bool one = false);
  absl::Status admit(TransferSlot& slot, Peer& peer);
  bool direct(const TransferSlot& slot, const Peer& peer) const;
  absl::Status mapped(const TransferSlot& slot, const Peer& peer) const;
  absl::Status moves(const Rail& rail, const TransferSlot& slot) const;
  absl::Status movable(const TransferSlot& slot, const Peer& peer) const;
  RailState* pick_rail(Peer& peer, const TransferSlot& slot);
  RailState* rail_of_messages(Peer& peer, const TransferSlot& slot, Time now);
  SlotQueue& queue_of(Peer& peer, const TransferSlot& slot);

  WorkerCore& core_;
  std::vector<Peer*> ready_peers_;  // those with slices to post
  bool pump_due_ = false;
};

}  // namespace baton::internal
