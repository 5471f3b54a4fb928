// Notifications and peer events that wait for the application to read them.
#pragma once

#include <deque>
#include <string_view>
#include <vector>

#include "transport/internal/tables/peer_table.h"
#include "transport/worker.h"

namespace baton::internal {

class WorkerCore;

class Inbox {
 public:
  explicit Inbox(WorkerCore& core) : core_(core) {}

  // Closes the peer's rail instead where the peer had no credit for it.
  void push(Peer& peer, std::string_view payload);
  bool next(Notification& out);
  size_t waiting() const { return count_; }
  // Bytes of notifications from peers that are down.
  uint64_t left_behind() const { return left_behind_; }
  void peer_down(const Peer& peer) { left_behind_ += peer.unread; }

  void push_event(PeerEvent event);
  bool next_event(PeerEvent& out);
  void forget_events(const Peer& peer);  // of the peer that had this one's row before

 private:
  void was_read(const Notification& notification);

  WorkerCore& core_;
  std::vector<Notification> ring_;  // strings keep their memory
  size_t head_ = 0;
  size_t count_ = 0;
  uint64_t left_behind_ = 0;
  std::deque<PeerEvent> events_;
};

}  // namespace baton::internal
