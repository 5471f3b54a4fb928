// Sessions with peers: they come up with their first rail, lose rails, are called again when the
// last is lost, part in order, and go down.
//
// The session goes on while the peer is called again: transfers, counters and credits are of the
// peer, not of its rails.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/internal/tables/peer_table.h"
#include "transport/worker.h"

namespace baton::internal {

class WorkerCore;

class Sessions {
 public:
  explicit Sessions(WorkerCore& core) : core_(core) {}
  // How long a lost peer is called again, and how long its answers may take.
  void start(Time redial, Time patience);

  Peer* add_peer();  // null: there is no room
  std::string explain(const Peer& peer) const;
  std::shared_ptr<absl::Status> begin_disconnect(Peer& peer, Time timeout);
  void disconnect(Peer& peer, const absl::Status& why);
  void peer_down(Peer& peer, const absl::Status& why);
  void part_asked(Peer& peer);  // the peer asks to part
  void round_over(Peer& peer);  // no route of this round led to the peer

  // --- of a round of progress ---
  Time next_timer() const { return timers_.empty() ? kNever : timers_.front().first; }
  bool any_timers() const { return !timers_.empty(); }
  bool progress_sessions(Time now);
  bool any_partings() const { return !parting_.empty(); }
  bool settle_partings();
  // Call it when due() may have become earlier; later is found out when the time has come.
  void set_timer(Peer& peer);

  // --- EventSink ---
  void connected(uint64_t session, const HelloInfo& info, std::unique_ptr<Rail> rail);
  void accepted(const HelloInfo& info, std::unique_ptr<Rail> rail);
  void handshake_refused(std::string_view caller, const absl::Status& why);
  void rail_down(Rail& rail, absl::Status why);

 private:
  using Timed = std::pair<Time, PeerId>;

  void peer_up(Peer& peer, const HelloInfo& info, std::unique_ptr<Rail> rail);
  void close_rails(Peer& peer, const absl::Status& why);
  void refuse(const HelloInfo& info, std::unique_ptr<Rail> rail, const absl::Status& why);
  // redial.cc
  void peer_lost(Peer& peer, const absl::Status& why);
  void peer_resumed(Peer& peer);
  Time due(const Peer& peer) const;
  void check_answers(Peer& peer, Time now);
  void call_again(Peer& peer, Time now);
  // partings.cc
  void begin_parting(Peer& peer, Time timeout, const absl::Status& why);
  bool tend_partings();
  void give_up_parting(Peer& peer);
  void note_parted(Peer& peer, const absl::Status& why);

  WorkerCore& core_;
  std::vector<Timed> timers_;                // heap, earliest first; some are out of date
  std::vector<PeerId> parting_;              // that one side has asked to part with
  Time redial_{};                            // peer.redial_ms
  Time patience_{};                          // peer.answer_ms
  Time refusals_quiet_until_ = Time::min();  // one warning a second is enough
};

}  // namespace baton::internal
