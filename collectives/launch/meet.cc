// A rank's side of the rendezvous, and the rendezvous itself on a thread of its own.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "collectives/launch/rendezvous_service.h"
#include "collectives/launch/rendezvous_wire.h"
#include "collectives/rendezvous.h"
#include "transport/base/durations.h"
#include "transport/base/limits/event_fd.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake_connection.h"
#include "transport/net/message_stream.h"
#include "transport/net/poller.h"

namespace baton::collectives {

using launch::MessageType;

namespace {

constexpr Time kConnectTime = std::chrono::seconds(3);  // then another address is tried
constexpr Time kFirstPause = std::chrono::milliseconds(5);
constexpr Time kLongestPause = std::chrono::milliseconds(250);

Time now() { return Clock::steady().now(); }

Time left_until(Time deadline) {
  return deadline == kNever ? kNever : std::max(Time::zero(), deadline - now());
}

// Waits for `events` of `fd` (or, with -1, for nothing) until `deadline`; false: it has passed.
bool wait_for(int fd, short events, Time deadline) {  // NOLINT(google-runtime-int): poll's type
  while (true) {
    const Time left = left_until(deadline);
    const timespec timeout = base::to_timespec(left);
    pollfd one{.fd = fd, .events = events, .revents = 0};
    if (::ppoll(&one, 1, &timeout, nullptr) > 0) return true;
    if (left == Time::zero()) return false;
  }
}

// One connection to the server. Unavailable: worth another try.
class RendezvousClient {
 public:
  RendezvousClient(const ClusterKey& key, const RankInfo& info, Time deadline)
      : key_(key), info_(info), deadline_(deadline) {}

  absl::StatusOr<std::vector<RankInfo>> run(const net::Endpoint& to) {
    if (absl::Status good = connect(to); !good.ok()) return good;
    // The server answers a little before this rank's own patience ends, because it knows which
    // ranks are missing.
    launch::Join join{.patience = left_until(deadline_), .info = info_};
    if (join.patience != kNever) {
      join.patience -= std::min<Time>(join.patience / 4, std::chrono::milliseconds(500));
    }
    stream_->send(launch::encode_message(MessageType::kJoin, encode_join(join)));
    return receive_rank_infos();
  }
  bool was_up() const { return stream_ != nullptr; }

 private:
  // Leaves an authenticated connection in stream_.
  absl::Status connect(const net::Endpoint& to) {
    auto poller = net::Poller::create();
    if (!poller.ok()) return poller.status();
    poller_ = *std::move(poller);
    auto fd = net::start_connect(to, launch::rendezvous_sockets());
    if (!fd.ok()) return fd.status();
    net::HandshakeConnection handshake(*fd, *poller_, net::Handshake::Role::kClient, key_,
                                       launch::rendezvous_hello(), net::Handshake::Options(),
                                       deadline_, nullptr);
    const Time until = std::min(deadline_, now() + kConnectTime);
    if (!wait_for(*fd, POLLOUT, until)) {
      return absl::UnavailableError(
          "the connection attempt is not answered: does a firewall block it?");
    }
    using State = net::HandshakeConnection::State;
    while (true) {
      poller_->poll();
      const State state = handshake.advance();
      if (state == State::kDone) break;
      if (state == State::kFailed) return refusal(to, handshake.error());
      if (!wait_for(poller_->fd(), POLLIN, deadline_)) {
        return late("it accepted the connection but sends nothing");
      }
    }
    if (!launch::is_rendezvous(handshake.peer())) {
      return launch::no_rendezvous(handshake.peer(), to.text());
    }
    const net::Link link{handshake.take_fd(), handshake.keys()};
    stream_ = std::make_unique<net::MessageStream>(link, *poller_, launch::rendezvous_stream());
    return absl::OkStatus();
  }

  static absl::Status refusal(const net::Endpoint& to, const absl::Status& why) {
    if (!absl::IsPermissionDenied(why)) return why;
    return absl::UnauthenticatedError(
        absl::StrCat("the rendezvous at ", to.text(), ": ", std::string(why.message())));
  }

  absl::StatusOr<std::vector<RankInfo>> receive_rank_infos() {
    std::vector<RankInfo> rank_infos;
    while (true) {
      poller_->poll();
      while (const auto words = stream_->next()) {
        if (absl::Status good = take(*words, rank_infos); !good.ok()) return good;
        if (rank_infos.size() == info_.ranks) return rank_infos;
      }
      if (!stream_->open()) return stream_->why();
      if (!wait_for(poller_->fd(), POLLIN, deadline_)) return late();
    }
  }

  absl::Status take(std::string_view words, std::vector<RankInfo>& rank_infos) {
    const auto message = launch::decode_message(words);
    if (!message.ok()) return message.status();
    if (message->type == MessageType::kRefusal) return launch::decode_refusal(message->body);
    auto info = RankInfo::decode(message->body);
    if (!info.ok()) return info.status();
    if (message->type != MessageType::kRankInfo || info->rank != rank_infos.size() ||
        info->ranks != info_.ranks || info->generation != info_.generation) {
      return absl::InternalError(
          "the rendezvous sent rank info that does not belong to this group");
    }
    rank_infos.push_back(*std::move(info));
    return absl::OkStatus();
  }

  static absl::Status late(std::string_view what) {
    return absl::DeadlineExceededError(
        absl::StrCat(std::string(what), ": is its process stopped?"));
  }
  static absl::Status late() {
    return late("it took this rank's information but does not report which ranks are missing");
  }

  const ClusterKey& key_;
  const RankInfo& info_;
  const Time deadline_;
  std::unique_ptr<net::Poller> poller_;
  std::unique_ptr<net::MessageStream> stream_;
};

// The endpoints behind "host:port[,host:port]".
absl::StatusOr<std::vector<net::Endpoint>> resolve_all(const std::string& addresses) {
  std::vector<net::Endpoint> all;
  absl::Status why;
  for (const auto one : absl::StrSplit(addresses, ',')) {
    auto found = net::resolve(std::string(one));
    if (found.ok()) {
      all.insert(all.end(), found->begin(), found->end());
    } else if (why.ok() || absl::IsInvalidArgument(found.status())) {
      why = found.status();
    }
  }
  if (all.empty() || absl::IsInvalidArgument(why)) return why;
  return all;
}

absl::Status check(const RankInfo& info) {
  if (info.ranks == 0 || info.rank >= info.ranks) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rank %u of %u is out of range: ranks are counted from 0", info.rank, info.ranks));
  }
  if (const size_t size = info.encode().size(); size > launch::kMaxRankInfoBytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the information of rank %u has %u bytes, more than %u: give it fewer regions", info.rank,
        size, launch::kMaxRankInfoBytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<RankInfo>> meet(const std::string& address, const ClusterKey& key,
                                           const RankInfo& info, Time timeout) {
  if (absl::Status good = check(info); !good.ok()) return good;
  if (address.empty() && info.ranks == 1) return std::vector<RankInfo>{info};
  const Time deadline = base::deadline_after(now(), timeout);
  Time pause = kFirstPause;
  absl::Status last;
  std::string lost;  // why a connection ended that was up
  for (size_t attempt = 0;; ++attempt) {
    auto found = resolve_all(address);
    if (absl::IsInvalidArgument(found.status())) {
      return absl::InvalidArgumentError(
          absl::StrCat("the rendezvous ", std::string(found.status().message())));
    }
    if (found.ok()) {
      RendezvousClient client(key, info, deadline);
      auto rank_infos = client.run((*found)[attempt % found->size()]);
      if (rank_infos.ok()) return rank_infos;
      last = rank_infos.status();
      // A server that answers says everything; one that cannot be reached may still be on its way.
      const bool own = absl::IsDeadlineExceeded(last) && left_until(deadline) == Time::zero();
      const bool nobody = absl::IsUnavailable(last) || absl::IsNotFound(last);
      if (!nobody && !own) {
        if (lost.empty()) return last;
        return absl::Status(last.code(), absl::StrCat(std::string(last.message()),
                                                      "; the attempt before failed: ", lost));
      }
      if (client.was_up()) lost = std::string(last.message());
    } else {
      last = found.status();
    }
    if (left_until(deadline) == Time::zero()) break;
    wait_for(-1, 0, std::min(deadline, now() + pause));
    pause = std::min(2 * pause, kLongestPause);
  }
  return absl::DeadlineExceededError(
      absl::StrFormat("rank %u of %u did not meet the others at the rendezvous %s within %.1f s: "
                      "%s; check that rank "
                      "0 or the launcher serves at this address",
                      info.rank, info.ranks, address,
                      std::chrono::duration<double>(timeout).count(), std::string(last.message())));
}

using launch::RendezvousService;

struct RendezvousServer::Impl {
  explicit Impl(std::unique_ptr<RendezvousService> served) : service(std::move(served)) {}
  void begin() {
    thread = std::thread([this] {
      pollfd stop{.fd = wake.fd(), .events = POLLIN, .revents = 0};
      while (!stopped.load(std::memory_order_acquire)) service->run_once({&stop, 1}, kNever);
      // A rank may end its server as soon as it has its own answer.
      while (service->answering()) service->run_once({}, kNever);
    });
  }
  ~Impl() {
    if (!thread.joinable()) return;
    stopped.store(true, std::memory_order_release);
    wake.ring();
    thread.join();
  }

  std::unique_ptr<RendezvousService> service;
  base::EventFd wake;
  std::atomic<bool> stopped = false;
  std::thread thread;
};

RendezvousServer::RendezvousServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RendezvousServer::~RendezvousServer() = default;

absl::StatusOr<std::unique_ptr<RendezvousServer>> RendezvousServer::start(const ClusterKey& key,
                                                                          const std::string& host,
                                                                          uint16_t port,
                                                                          uint32_t ranks) {
  auto service = RendezvousService::listen(key, host, port, ranks);
  if (!service.ok()) return service.status();
  auto impl = std::make_unique<Impl>(*std::move(service));
  if (!impl->wake.status().ok()) return impl->wake.status();
  impl->begin();
  return std::unique_ptr<RendezvousServer>(new RendezvousServer(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<RendezvousServer>> RendezvousServer::start_at(
    const ClusterKey& key, const std::string& rendezvous, uint32_t ranks) {
  auto parts = net::split_host_port(rendezvous.substr(0, rendezvous.find(',')));
  if (!parts.ok()) return parts.status();
  return start(key, only_this_machine(rendezvous) ? parts->first : "*", parts->second, ranks);
}

bool only_this_machine(const std::string& rendezvous) {
  const std::vector<std::string> places = absl::StrSplit(rendezvous, ',');
  return std::all_of(places.begin(), places.end(), [](const std::string& place) {
    const auto parts = net::split_host_port(place);
    return parts.ok() && net::loopback_host(parts->first);
  });
}

std::string listen_host_for(const std::string& rendezvous) {
  return only_this_machine(rendezvous) ? "" : "*";
}

std::string RendezvousServer::address() const { return impl_->service->address(); }

}  // namespace baton::collectives
