// The rendezvous without a thread of its own: a launcher that forks serves it in its own loop.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/launch/gathering.h"
#include "transport/base/unique_fd.h"
#include "transport/identity.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake_connection.h"
#include "transport/net/poller.h"

namespace baton::launch {

class RankConnection;

// One thread at a time.
class RendezvousService {
 public:
  // Arguments as of RendezvousServer::start.
  static absl::StatusOr<std::unique_ptr<RendezvousService>> listen(const ClusterKey& key,
                                                                   const std::string& host,
                                                                   uint16_t port, uint32_t ranks);
  ~RendezvousService();
  // "host:port", or several of them with commas between.
  const std::string& address() const { return address_; }
  uint64_t next_generation() const { return gathering_.next_generation(); }

  // Waits until there is something to do here or on `others` (as poll(2), which fills their
  // `revents`), or until `until`, and does what is to be done here.
  void run_once(absl::Span<pollfd> others, Time until);
  // A rank has not taken its answer yet (no rank may need more than a few seconds for that).
  bool answering() const;
  // Closes the rendezvous: ranks that wait and ranks that come later get Cancelled and `why`.
  void close(const std::string& why);
  // In a forked child, before destroying it: the parent's connections stay as they are.
  void leave_to_parent();

 private:
  // Has called, and not proved itself yet.
  struct Caller {
    std::unique_ptr<net::HandshakeConnection> handshake;
    net::Endpoint from;
  };

  RendezvousService(const ClusterKey& key, int listener, std::unique_ptr<net::Poller> poller,
                    uint32_t ranks);
  void accept_callers(Time now);
  void drop_a_caller();
  void advance_callers(Time now);
  void advance_ranks(Time now);
  void on_join(uint64_t id, RankConnection& rank, Time now);
  void deliver(std::vector<Gathering::Answer>& answers, Time now);
  void drop(uint64_t id);

  const ClusterKey key_;
  const std::unique_ptr<net::Poller> poller_;
  const base::UniqueFd listener_;
  net::Watched listener_watch_;
  std::string address_;
  const size_t most_ranks_;
  const std::string no_answer_;  // for peers that take this for a worker
  Gathering gathering_;
  std::vector<Caller> callers_;                                // the oldest first
  std::map<uint64_t, std::unique_ptr<RankConnection>> ranks_;  // by number, the oldest first
  uint64_t next_rank_ = 1;
  Time look_again_ = kNever;  // at the listener: there were no descriptors left
  std::vector<pollfd> polled_;
};

}  // namespace baton::launch
