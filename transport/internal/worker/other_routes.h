// Other routes than the one in use: better ones, and ways around one that does not reach some
// region.
//
// A peer may be up over a worse provider than both sides have: the better one was lost, or did not
// answer when the peer was met. It is called again, by the side that called first, with pauses that
// grow. When it answers, its rails join the session: slices go to them from then on, those that the
// other rails have end there, and those rails stay for when the better one is lost again.
//
// The best rails of a peer may reach most of its memory and not all: shm without CMA reaches pools
// alone. A transfer of such a region goes over the best rail that reaches it. Where none does the
// transfer stands aside, so that others pass, while the peer is called over the worse providers
// that both sides have, one by one.
#pragma once

#include <string>
#include <vector>

#include "transport/internal/tables/peer_table.h"

namespace baton::internal {

class WorkerCore;

class OtherRoutes {
 public:
  explicit OtherRoutes(WorkerCore& core) : core_(core) {}
  void start(Time failback) { failback_ = failback; }

  void add_rail(Peer& peer, RailState state);
  // Call it when rails have come or gone.
  void look_for_better(Peer& peer);
  void call_better(Peer& peer);
  void stand_aside(Peer& peer, uint32_t index);
  void stop_waiting(Peer& peer, const absl::Status& why);  // those that stand aside

  // The result of a call. answered() tells which of our calls it was, failed() whether it was one
  // of ours.
  struct Answer {
    bool better = false;
    bool around = false;
  };
  Answer answered(Peer& peer, const Rail& rail);
  void lost_again(Peer& peer, Answer answer, const absl::Status& why);
  bool failed(Peer& peer, const absl::Status& why);
  void come_around(Peer& peer);
  void around_lost(Peer& peer, const Rail& rail);

 private:
  int rank_of(const Rail& rail) const;
  std::vector<std::string> better_routes(const Peer& peer) const;
  void call_better_later(Peer& peer);
  void better_failed(Peer& peer, const absl::Status& why);
  bool stands_aside(TransferId id);
  void call_around(Peer& peer);
  void around_failed(Peer& peer, const absl::Status& why);
  void give_up_around(Peer& peer);

  WorkerCore& core_;
  Time failback_{};  // peer.failback_ms
};

}  // namespace baton::internal
