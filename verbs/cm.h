// Connecting queue pairs by librdmacm (`-R`, verbs.rdma_cm=1): the fabric's own connection manager
// finds the route and agrees on packet numbers, where an administrator wants it to, or where there
// is no other way (iWARP).
//
// It says nothing about who the peer is, so it comes after the handshake over TCP: both ends have
// told each other their queue pairs there, and every request and reply here carries a proof that
// only an owner of the cluster key can make for just these two. The queue pair itself stays ours
// (rdma_cm calls that external): it is moved with the attributes that rdma_cm works out.
//
// Nothing blocks: the event channel is non-blocking, and progress() takes what has come.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/net/poller.h"
#include "verbs/queue_pair.h"

namespace baton::verbs {

class ConnectionManager;

// What one end puts into its request or reply.
struct CmTerms {
  uint32_t queue_pair = 0;
  uint32_t peer_queue_pair = 0;
  uint8_t reads_answered = 1;
  uint8_t reads_asked = 1;
  std::string proof;     // ours
  std::string expected;  // the peer's
};

// In constant time.
bool same_proof(std::string_view expected, std::string_view given);

// One connection, at either end. It lasts as long as its queue pair; its end tells the peer.
class CmLink {
 public:
  enum class State {
    kUnderway,  // resolving, asking
    kAnswered,  // calling side: the peer has accepted; join the queue pair, then establish()
    kUp,
    kFailed,  // never came up
    kClosed,  // by the peer, or by what happened to device or address
  };
  ~CmLink();
  CmLink(const CmLink&) = delete;
  CmLink& operator=(const CmLink&) = delete;

  State state() const { return state_; }
  const absl::Status& why() const { return why_; }  // kFailed, kClosed
  bool device_gone() const { return device_gone_; }

  // What to bring the queue pair to RTR and RTS with: once kAnswered, or of a CmRequest.
  absl::StatusOr<Path> path() const;
  // The last word of the calling side.
  absl::Status establish();

 private:
  friend class ConnectionManager;
  CmLink(ConnectionManager& manager, rdma_cm_id* id, const Port& port)
      : manager_(manager), id_(id), port_(port) {}
  void on_event(rdma_cm_event_type type, int status, uint32_t queue_pair, std::string_view data);
  void fail(absl::Status why);
  void connect();
  rdma_conn_param parameters() const;

  ConnectionManager& manager_;
  rdma_cm_id* const id_;
  const Port& port_;
  CmTerms terms_;
  std::string data_;  // being sent
  std::string to_;
  int timeout_ms_ = 0;
  State state_ = State::kUnderway;
  absl::Status why_;
  bool device_gone_ = false;
};

// A peer's call, which is rejected unless a caller take()s it.
struct CmRequest {
  std::string_view proof;
  uint32_t queue_pair = 0;
  rdma_cm_id* id = nullptr;
};

class ConnectionManager {
 public:
  static constexpr size_t kProofBytes = 32;

  // Unavailable where this machine has no rdma_cm; the remedy is in the message.
  static absl::StatusOr<std::unique_ptr<ConnectionManager>> create(const CmApi& api,
                                                                   net::Poller& poller);
  ~ConnectionManager();
  ConnectionManager(const ConnectionManager&) = delete;
  ConnectionManager& operator=(const ConnectionManager&) = delete;

  // Calls are taken on this port, on all devices, from the first time on that this is asked for.
  absl::StatusOr<uint16_t> listen();
  // Calls the peer at `to`:`port`, from the address `from` of our port. Sooner or later the link is
  // kAnswered or kFailed.
  absl::StatusOr<std::unique_ptr<CmLink>> call(const Port& from_port, const ibv_gid& from,
                                               const ibv_gid& to, uint16_t port, CmTerms terms,
                                               const Tuning& tuning);
  // Takes a request over, for a queue pair on `port`. Join that by the link's path(), then
  // accept().
  absl::StatusOr<std::unique_ptr<CmLink>> take(const CmRequest& request, const Port& port);
  absl::Status accept(CmLink& link, CmTerms terms);
  // Links that ended while this port was down may say goodbye now.
  void port_up(const Port& up);

  // Handles what has come. Requests go to `on_request`: OK when it was taken, otherwise the reason
  // that the peer is told.
  bool progress(const std::function<absl::Status(const CmRequest&)>& on_request);

 private:
  friend class CmLink;
  explicit ConnectionManager(const CmApi& api, net::Poller& poller) : api_(api), poller_(poller) {}

  const CmApi& api_;
  net::Poller& poller_;
  rdma_event_channel* channel_ = nullptr;
  rdma_cm_id* listener_ = nullptr;
  std::vector<std::pair<rdma_cm_id*, const Port*>> parked_;
  net::Watched watch_;
};

}  // namespace baton::verbs
