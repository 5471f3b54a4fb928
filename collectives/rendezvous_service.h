// The rendezvous as an event loop's guest: sockets without a thread of their own, so that a
// launcher that forks can serve it too.
#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/gathering.h"
#include "collectives/rendezvous_socket.h"
#include "transport/handshake.h"

namespace baton::collectives {

// One thread at a time. Its destructor only closes descriptors: a forked child may run it too.
class RendezvousService {
 public:
  // Arguments as of RendezvousServer::start.
  static absl::StatusOr<std::unique_ptr<RendezvousService>> listen(const ClusterKey& key,
                                                                   const std::string& host,
                                                                   uint16_t port, uint32_t ranks);
  ~RendezvousService();
  const std::string& address() const { return address_; }
  uint64_t next_generation() const { return gathering_.next_generation(); }

  // Waits until there is something to do here or on `others` (as poll(2), which fills their
  // `revents`), or until `until`, and does what is to be done here.
  void run_once(absl::Span<pollfd> others, Time until);
  // Somebody has not taken its answer yet (nobody may need more than a few seconds for that).
  bool answering() const;

 private:
  class Guest;
  RendezvousService(const ClusterKey& key, Descriptor listener, uint32_t ranks);
  void accept_guests();
  bool drop_a_stranger();  // the one that has said nothing useful for longest
  void on_join(uint64_t id, Guest& guest);
  void deliver(std::vector<Gathering::Answer>& answers);
  void drop(uint64_t id);

  const ClusterKey key_;
  const Descriptor listener_;
  const std::string address_;
  const size_t most_guests_;
  Gathering gathering_;
  std::map<uint64_t, std::unique_ptr<Guest>> guests_;  // by number, the oldest first
  uint64_t next_guest_ = 1;
  Time deaf_until_{};  // no descriptors left: do not spin on the listener
  std::vector<pollfd> polled_;
};

}  // namespace baton::collectives
