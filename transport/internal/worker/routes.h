// Routes: how a worker reaches a peer. What was asked for, which routes there are, in what order
// they are tried, and what became of each.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "transport/internal/tables/peer_table.h"
#include "transport/provider.h"
#include "transport/worker.h"

namespace baton::internal {

class WorkerCore;

class Routes {
 public:
  explicit Routes(WorkerCore& core) : core_(core) {}
  void start(const WorkerUid& uid);

  static bool is_address(std::string_view target);                          // and not host:port
  absl::StatusOr<std::string> look_up(const std::string& host_port) const;  // lock-free; may block
  // `found`: what look_up() said of host:port.
  absl::StatusOr<PeerId> connect(std::string_view target, const std::string& found,
                                 std::string_view need);
  void note_missing(std::string why) { provider_notes_.push_back(std::move(why)); }
  const std::vector<std::string>& missing() const { return provider_notes_; }

  // The providers that both sides have, the best first, with their ranks; and why the others are
  // out.
  std::vector<std::pair<int, std::string>> rank_routes(const Peer& peer, const std::string& require,
                                                       std::vector<std::string>& notes) const;
  void plan_routes(Peer& peer);
  void dial(Peer& peer, const std::string& by, Resume resume);
  // By the number that we gave out.
  Peer* peer_of_session(uint64_t session);
  void forget_session(uint64_t session) { sessions_.erase(session); }

  void resolved(uint64_t session, absl::StatusOr<std::string> encoded, std::string_view at);
  void connect_failed(uint64_t session, const absl::Status& why);

 private:
  void try_next_route(Peer& peer);
  void note_called(const Peer& peer, const std::string& at);
  std::string called_at(const Peer& peer, std::string_view provider) const;

  WorkerCore& core_;
  std::vector<std::string> provider_notes_;         // why others are missing
  absl::flat_hash_map<uint64_t, PeerId> sessions_;  // ours, by the number we gave out
  uint64_t next_session_ = 0;  // from anywhere: the other side of a session has numbers of its own
  struct Called {
    std::string provider;  // whose peer
    std::string at;        // answered there
  };
  std::map<std::array<uint8_t, 16>, Called> called_;  // workers that were asked for their address
};

}  // namespace baton::internal
