// Connects queue pairs by librdmacm: resolves addresses, calls, answers, and follows the events.
#include "verbs/cm.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>
#include <openssl/crypto.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::verbs {
namespace {

// In front of everything that is ours in a private data field.
constexpr std::string_view kMagic("BCM\x01", 4);
constexpr size_t kMostReason = 100;  // a rejection carries 148 bytes

// Of InfiniBand's connection manager (IBTA 1.4, table 104).
constexpr int kRejectedStale = 10;
constexpr int kRejectedNobodyListens = 8;
constexpr int kRejectedByPeer = 28;

std::string reason_of(int status) { return strerror(status < 0 ? -status : status); }

// The socket address of a GID that is an IP address.
absl::StatusOr<sockaddr_storage> socket_address(const Port& port, const ibv_gid& gid,
                                                uint16_t number) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (port.infiniband()) {
    return absl::UnimplementedError(absl::StrCat(
        port.name(), " is InfiniBand, whose GIDs are not IP addresses: leave rdma_cm (-R) out"));
  }
  sockaddr_storage out{};
  if (std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0) {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(number);
    std::memcpy(&v4.sin_addr, gid.raw + 12, 4);
    std::memcpy(&out, &v4, sizeof v4);
    return out;
  }
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(number);
  std::memcpy(&v6.sin6_addr, gid.raw, 16);
  if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr) && !port.gids.empty()) {
    v6.sin6_scope_id = port.gids.front().ndev_ifindex;
  }
  std::memcpy(&out, &v6, sizeof v6);
  return out;
}

sockaddr* plain(sockaddr_storage& address) { return reinterpret_cast<sockaddr*>(&address); }

// rdma_cm goes by IP routes: do they lead through the port that was meant?
absl::Status check_device(const rdma_cm_id& id, const Port& port) {
  const std::string found = id.verbs == nullptr ? "no device" : id.verbs->device->name;
  if (found == port.device->name() && id.port_num == port.number) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("rdma_cm chose %s:%u instead of %s: give the network interfaces addresses on "
                      "different subnets, or leave rdma_cm (-R) out",
                      found, id.port_num, port.name()));
}

// "" where there is none. What a peer sends comes with zeros behind it.
std::string_view proof_in(std::string_view data) {
  if (data.substr(0, kMagic.size()) != kMagic) return "";
  return data.substr(kMagic.size(), ConnectionManager::kProofBytes);
}

void reject(const CmApi& api, rdma_cm_id* id, std::string_view why) {
  const std::string text =
      absl::StrCat(std::string(kMagic), std::string(why.substr(0, kMostReason)));
  (void)api.rdma_reject(id, text.data(), static_cast<uint8_t>(text.size()));
}

}  // namespace

bool same_proof(std::string_view expected, std::string_view given) {
  return given.size() == expected.size() &&
         CRYPTO_memcmp(given.data(), expected.data(), given.size()) == 0;
}

// --- one connection ---

// Destroying says goodbye to the peer, by the connection manager's own queue pair. When that cannot
// send because the interface is down, rdma_rxe breaks it for good: no call comes through there any
// more, for any caller. So goodbyes wait until the interface is up.
CmLink::~CmLink() {
  Port now = port_;
  const bool down = !port_.device->dead() && port_.device->refresh(now).ok() && !now.up();
  if (!down) {
    manager_.api_.rdma_destroy_id(id_);
    return;
  }
  id_->context = nullptr;
  manager_.parked_.emplace_back(id_, &port_);
}

void CmLink::fail(absl::Status why) {
  if (state_ == State::kFailed || state_ == State::kClosed) return;
  state_ = state_ == State::kUp ? State::kClosed : State::kFailed;
  why_ = std::move(why);
}

rdma_conn_param CmLink::parameters() const {
  rdma_conn_param out{};
  out.private_data = data_.data();
  out.private_data_len = static_cast<uint8_t>(data_.size());
  out.responder_resources = terms_.reads_answered;
  out.initiator_depth = terms_.reads_asked;
  out.retry_count = 7;
  out.rnr_retry_count = 7;
  out.qp_num = terms_.queue_pair;
  return out;
}

void CmLink::connect() {
  data_ = absl::StrCat(std::string(kMagic), terms_.proof);
  rdma_conn_param parameter = parameters();
  if (manager_.api_.rdma_connect(id_, &parameter) != 0) {
    fail(absl::UnavailableError(absl::StrCat("rdma_connect to ", to_, ": ", strerror(errno))));
  }
}

void CmLink::on_event(rdma_cm_event_type type, int status, uint32_t queue_pair,
                      std::string_view data) {
  const CmApi& api = manager_.api_;
  switch (type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      if (absl::Status wrong = check_device(*id_, port_); !wrong.ok())
        return fail(std::move(wrong));
      if (api.rdma_resolve_route(id_, timeout_ms_) != 0) {
        fail(absl::UnavailableError(absl::StrCat("rdma_resolve_route: ", strerror(errno))));
      }
      return;
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      return connect();
    case RDMA_CM_EVENT_CONNECT_RESPONSE: {
      if (queue_pair != terms_.peer_queue_pair || !same_proof(terms_.expected, proof_in(data))) {
        return fail(absl::PermissionDeniedError(
            absl::StrCat("another machine answers rdma_cm calls at ", to_,
                         ": look for another machine with this address")));
      }
      if (state_ == State::kUnderway) state_ = State::kAnswered;
      return;
    }
    case RDMA_CM_EVENT_ESTABLISHED:
      return;  // the first message over the queue pair says so too, and more
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      return fail(absl::UnavailableError(absl::StrFormat(
          "rdma_cm finds no route from %s to %s (%s): check with `ping` that the two network "
          "interfaces reach each other",
          port_.name(), to_, reason_of(status))));
    case RDMA_CM_EVENT_UNREACHABLE:
      return fail(absl::UnavailableError(
          absl::StrFormat("the connection manager at %s does not answer on %s (%s): check the "
                          "link, and that firewalls pass UDP port 4791",
                          to_, port_.name(), reason_of(status))));
    case RDMA_CM_EVENT_REJECTED: {
      std::string why = absl::StrCat("reason ", status);
      if (status == kRejectedByPeer && data.substr(0, kMagic.size()) == kMagic) {
        data.remove_prefix(kMagic.size());
        why = std::string(data.substr(0, std::min(data.find('\0'), kMostReason)));
      } else if (status == kRejectedNobodyListens) {
        why = "no process listens there: is this address the peer's?";
      } else if (status == kRejectedStale) {
        why =
            "it still holds an earlier connection of this queue pair; the next attempt uses "
            "another queue pair";
      }
      return fail(absl::UnavailableError(absl::StrCat(to_, " rejected the rdma_cm call: ", why)));
    }
    case RDMA_CM_EVENT_CONNECT_ERROR:
      return fail(absl::UnavailableError(
          absl::StrCat("the rdma_cm call to ", to_, " failed: ", reason_of(status))));
    case RDMA_CM_EVENT_DISCONNECTED:
      return fail(absl::UnavailableError("the peer's end of the queue pair was disconnected"));
    case RDMA_CM_EVENT_ADDR_CHANGE:
      return fail(absl::UnavailableError(
          absl::StrCat("the network address under ", port_.name(), " moved")));
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      device_gone_ = true;
      return fail(absl::UnavailableError(absl::StrCat(port_.name(), " was removed")));
    default:
      return;  // TIMEWAIT_EXIT, multicast
  }
}

absl::StatusOr<Path> CmLink::path() const {
  Path path;
  for (const ibv_qp_state state : {IBV_QPS_RTR, IBV_QPS_RTS}) {
    ibv_qp_attr attributes{};
    attributes.qp_state = state;
    int mask = 0;
    if (manager_.api_.rdma_init_qp_attr(id_, &attributes, &mask) != 0) {
      return absl::UnavailableError(absl::StrFormat(
          "rdma_cm has no attributes for the queue pair on %s: %s", port_.name(), strerror(errno)));
    }
    if (state == IBV_QPS_RTS) {
      path.own_sequence = attributes.sq_psn;
      continue;
    }
    path.address = attributes.ah_attr;
    path.peer_sequence = attributes.rq_psn;
    path.mtu = attributes.path_mtu;
  }
  return path;
}

absl::Status CmLink::establish() {
  if (manager_.api_.rdma_establish(id_) != 0) {
    return absl::UnavailableError(absl::StrCat("rdma_establish: ", strerror(errno)));
  }
  state_ = State::kUp;
  return absl::OkStatus();
}

// --- all of them ---

absl::StatusOr<std::unique_ptr<ConnectionManager>> ConnectionManager::create(const CmApi& api,
                                                                             net::Poller& poller) {
  std::unique_ptr<ConnectionManager> made(new ConnectionManager(api, poller));
  made->channel_ = api.rdma_create_event_channel();
  if (made->channel_ == nullptr) {
    return absl::UnavailableError(absl::StrFormat(
        "rdma_cm cannot be used (%s): `modprobe rdma_ucm`, and make /dev/infiniband/rdma_cm "
        "readable and writable for this user; or leave -R out",
        strerror(errno)));
  }
  const int fd = made->channel_->fd;
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return absl::InternalError(absl::StrCat("rdma_cm's descriptor: ", strerror(errno)));
  }
  if (absl::Status status = poller.add(fd, EPOLLIN, made->watch_); !status.ok()) return status;
  return made;
}

ConnectionManager::~ConnectionManager() {
  if (channel_ == nullptr) return;
  for (const auto& [id, port] : parked_) api_.rdma_destroy_id(id);
  if (listener_ != nullptr) api_.rdma_destroy_id(listener_);
  poller_.remove(channel_->fd);
  api_.rdma_destroy_event_channel(channel_);
}

void ConnectionManager::port_up(const Port& up) {
  std::erase_if(parked_, [&](const auto& parked) {
    if (parked.second != &up) return false;
    api_.rdma_destroy_id(parked.first);
    return true;
  });
}

absl::StatusOr<uint16_t> ConnectionManager::listen() {
  constexpr int kBacklog = 256;
  // The address of all IPv6 interfaces stands for IPv4 too, except where there is no IPv6.
  for (const sa_family_t family : {AF_INET6, AF_INET}) {
    if (listener_ != nullptr) break;
    sockaddr_storage any{};
    any.ss_family = family;
    rdma_cm_id* made = nullptr;
    if (api_.rdma_create_id(channel_, &made, nullptr, RDMA_PS_TCP) != 0) continue;
    if (api_.rdma_bind_addr(made, plain(any)) == 0 && api_.rdma_listen(made, kBacklog) == 0) {
      listener_ = made;
    } else {
      const int error = errno;
      api_.rdma_destroy_id(made);
      errno = error;
    }
  }
  if (listener_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("rdma_cm cannot listen here (", strerror(errno), ")"));
  }
  return ntohs(api_.rdma_get_src_port(listener_));
}

absl::StatusOr<std::unique_ptr<CmLink>> ConnectionManager::call(const Port& from_port,
                                                                const ibv_gid& from,
                                                                const ibv_gid& to, uint16_t port,
                                                                CmTerms terms,
                                                                const Tuning& tuning) {
  auto source = socket_address(from_port, from, 0);
  auto target = socket_address(from_port, to, port);
  if (!source.ok()) return source.status();
  if (!target.ok()) return target.status();
  rdma_cm_id* id = nullptr;
  if (api_.rdma_create_id(channel_, &id, nullptr, RDMA_PS_TCP) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("rdma_create_id: ", strerror(errno)));
  }
  std::unique_ptr<CmLink> link(new CmLink(*this, id, from_port));
  id->context = link.get();
  link->to_ = gid_text(to);
  link->terms_ = std::move(terms);
  link->timeout_ms_ = static_cast<int>(
      std::chrono::duration_cast<std::chrono::milliseconds>(tuning.connect).count());
  if (uint8_t tos = tuning.traffic_class; tos != 0) {
    api_.rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos);
  }
  if (api_.rdma_resolve_addr(id, plain(*source), plain(*target), link->timeout_ms_) != 0) {
    link->on_event(RDMA_CM_EVENT_ADDR_ERROR, errno, 0, {});
  }
  return link;
}

absl::StatusOr<std::unique_ptr<CmLink>> ConnectionManager::take(const CmRequest& request,
                                                                const Port& port) {
  if (absl::Status status = check_device(*request.id, port); !status.ok()) return status;
  std::unique_ptr<CmLink> link(new CmLink(*this, request.id, port));
  request.id->context = link.get();
  link->to_ = "the caller";
  return link;
}

absl::Status ConnectionManager::accept(CmLink& link, CmTerms terms) {
  link.terms_ = std::move(terms);
  link.data_ = absl::StrCat(std::string(kMagic), link.terms_.proof);
  rdma_conn_param parameter = link.parameters();
  if (api_.rdma_accept(link.id_, &parameter) != 0) {
    return absl::UnavailableError(absl::StrCat("rdma_accept: ", strerror(errno)));
  }
  link.state_ = CmLink::State::kUp;
  return absl::OkStatus();
}

bool ConnectionManager::progress(const std::function<absl::Status(const CmRequest&)>& on_request) {
  if (std::exchange(watch_.ready, 0) == 0) return false;
  bool any = false;
  rdma_cm_event* event = nullptr;
  while (api_.rdma_get_cm_event(channel_, &event) == 0) {
    any = true;
    const auto type = event->event;
    const int status = event->status;
    const uint32_t queue_pair = event->param.conn.qp_num;
    rdma_cm_id* const id = event->id;
    std::string data;
    if (event->param.conn.private_data != nullptr) {
      data.assign(static_cast<const char*>(event->param.conn.private_data),
                  event->param.conn.private_data_len);
    }
    // At once: destroying an identifier waits for the acknowledgement of its events.
    api_.rdma_ack_cm_event(event);
    if (type != RDMA_CM_EVENT_CONNECT_REQUEST) {
      auto* link = static_cast<CmLink*>(id->context);
      if (link != nullptr) link->on_event(type, status, queue_pair, data);
      continue;
    }
    id->context = nullptr;  // it was the listener's
    const absl::Status taken = on_request({proof_in(data), queue_pair, id});
    if (taken.ok()) continue;
    reject(api_, id, std::string(taken.message()));
    api_.rdma_destroy_id(id);
  }
  return any;
}

}  // namespace baton::verbs
