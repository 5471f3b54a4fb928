// Outgoing messages of the worker itself: control messages, and credit for notifications that the
// application has read. Both travel as transfers of zero bytes, and wait here for a slot.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "transport/internal/messages/control_message.h"
#include "transport/internal/tables/peer_table.h"

namespace baton::internal {

class WorkerCore;

class ControlOutbox {
 public:
  explicit ControlOutbox(WorkerCore& core);

  // Queues a message, unless it is queued already.
  void say(Peer& peer, const ControlMessage& message);
  // Queues the peer's credit (Peer::untold), once it is a quarter of the window. A peer that is
  // lost gets it when it is back.
  void owe(Peer& peer);
  void credit_failed(Peer& peer, uint64_t amount);  // it did not arrive
  void drop_messages(Peer& peer);

  bool due() const { return credits_due_ || messages_due_; }
  void slot_freed();  // those that found no slot try again
  // The slot of the next message, filled and ready to activate; kNone: none, or no free slot.
  uint32_t next();

 private:
  uint32_t next_credit();
  uint32_t next_message();

  WorkerCore& core_;
  std::deque<std::pair<PeerId, std::string>> messages_;
  bool messages_due_ = false;     // there are some, and perhaps a slot
  std::vector<Peer*> creditors_;  // those that are owed credit
  bool credits_due_ = false;
};

}  // namespace baton::internal
