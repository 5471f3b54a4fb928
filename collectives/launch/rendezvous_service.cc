// Accepting callers, and advancing ranks from their join to their answer.
#include "collectives/launch/rendezvous_service.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "transport/base/durations.h"
#include "transport/clock.h"
#include "transport/net/acceptor.h"
#include "transport/net/interfaces.h"
#include "transport/net/link.h"
#include "transport/net/message_stream.h"

namespace baton::launch {
namespace {

using net::Acceptor;

constexpr Time kHandshakeTime = std::chrono::seconds(5);
constexpr Time kPatience = std::chrono::seconds(5);  // with a rank that joins, or takes its answer
// Bytes that are encrypted before the rank takes them.
constexpr size_t kAhead = 128 << 10;

}  // namespace

// A rank's connection, once it has proved itself: one message in, one answer out, and patience in
// between.
class RankConnection {
 public:
  enum class Stage { kJoining, kWaiting, kAnswering, kLeaving };

  // Takes over the socket of `link`, which the poller does not watch yet.
  RankConnection(const net::Link& link, net::Poller& poller, Time now);

  // Goes on as far as the socket allows. False: the connection is over.
  bool advance(Time now);
  // The poller has seen something for advance() to do.
  bool ready() const { return stream_.ready != 0; }
  Stage stage() const { return stage_; }
  // Valid from the moment that the rank waits.
  const Join& join() const { return join_; }
  // `messages`: shared by all ranks of a group, for together they are long.
  void answer(std::shared_ptr<const std::vector<std::string>> messages, Time now);

  Time deadline() const { return deadline_; }  // when it is dropped
  // Looks at the socket, whatever the poller has seen.
  bool hung_up();
  void leave_to_parent() { stream_.abandon(); }

 private:
  bool silent();  // nothing was said, and the connection is up
  bool read_join();
  void send_answer();

  net::MessageStream stream_;
  Stage stage_ = Stage::kJoining;
  Time deadline_;
  Join join_;
  std::shared_ptr<const std::vector<std::string>> answer_;
  size_t sent_ = 0;  // messages of it
};

// The join may have come already: a stream begins as one that is ready.
RankConnection::RankConnection(const net::Link& link, net::Poller& poller, Time now)
    : stream_(link, poller, rendezvous_stream()), deadline_(now + kPatience) {}

bool RankConnection::silent() { return !stream_.next().has_value() && stream_.open(); }

bool RankConnection::read_join() {
  const auto words = stream_.next();
  if (!words.has_value()) return stream_.open();
  const auto message = decode_message(*words);
  if (!message.ok() || message->type != MessageType::kJoin) return false;
  auto join = decode_join(message->body);
  if (!join.ok()) return false;
  join_ = *std::move(join);
  stage_ = Stage::kWaiting;
  deadline_ = kNever;  // the gathering's business from here
  return silent();     // a rank says one thing and then waits
}

void RankConnection::send_answer() {
  while (sent_ < answer_->size() && stream_.waiting() < kAhead) stream_.send((*answer_)[sent_++]);
  if (sent_ == answer_->size() && stream_.waiting() == 0) stage_ = Stage::kLeaving;
}

bool RankConnection::advance(Time now) {
  if (now >= deadline_) return false;
  if (stage_ == Stage::kJoining) return read_join();
  // Closing before the rank has read everything could take the answer away from it: that one hangs
  // up.
  if (!silent()) return false;
  if (stage_ == Stage::kAnswering) send_answer();
  return stream_.open();
}

void RankConnection::answer(std::shared_ptr<const std::vector<std::string>> messages, Time now) {
  answer_ = std::move(messages);
  sent_ = 0;
  stage_ = Stage::kAnswering;
  deadline_ = now + kPatience;
}

bool RankConnection::hung_up() {
  stream_.ready |= EPOLLIN;
  return !silent();
}

absl::StatusOr<std::unique_ptr<RendezvousService>> RendezvousService::listen(
    const ClusterKey& key, const std::string& host, uint16_t port, uint32_t ranks) {
  if (ranks > kMostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a rendezvous of ", ranks, " ranks: there can be ", kMostRanks, " at most"));
  }
  auto poller = net::Poller::create();
  if (!poller.ok()) return poller.status();
  auto listener = net::listen_on(host, port, rendezvous_sockets());
  if (!listener.ok()) {
    return absl::Status(
        listener.status().code(),
        absl::StrCat("serving the rendezvous (BATON_RENDEZVOUS): ", listener.status().message()));
  }
  std::unique_ptr<RendezvousService> service(
      new RendezvousService(key, *listener, *std::move(poller), ranks));
  // The port that BATON_ADVERTISE may name leads to a worker.
  auto told = net::advertised_as("", *listener, true);
  if (!told.ok()) return told.status();
  service->address_ = *std::move(told);
  absl::Status watched = service->poller_->add(*listener, EPOLLIN, service->listener_watch_);
  if (!watched.ok()) return watched;
  return service;
}

RendezvousService::RendezvousService(const ClusterKey& key, int listener,
                                     std::unique_ptr<net::Poller> poller, uint32_t ranks)
    : key_(key),
      poller_(std::move(poller)),
      listener_(listener),
      // Twice: those of one generation may still be leaving while the next one comes.
      most_ranks_(2 * size_t{ranks == 0 ? kMostRanks : ranks}),
      gathering_(ranks) {}

RendezvousService::~RendezvousService() = default;

void RendezvousService::run_once(absl::Span<pollfd> others, Time until) {
  Time now = Clock::steady().now();
  until = std::min({until, gathering_.deadline(), look_again_});
  for (const Caller& caller : callers_) until = std::min(until, caller.handshake->deadline());
  for (const auto& [id, rank] : ranks_) {
    until = std::min(until, rank->ready() ? now : rank->deadline());
  }
  polled_.assign(others.begin(), others.end());
  polled_.push_back({.fd = poller_->fd(), .events = POLLIN, .revents = 0});
  const timespec left = base::to_timespec(std::max(Time::zero(), until - now));
  const int ready = ::ppoll(polled_.data(), polled_.size(), &left, nullptr);
  for (size_t i = 0; i < others.size(); ++i) others[i].revents = ready > 0 ? polled_[i].revents : 0;
  poller_->poll();

  now = Clock::steady().now();
  advance_ranks(now);
  advance_callers(now);
  std::vector<Gathering::Answer> answers;
  gathering_.expire(now, answers);
  deliver(answers, now);
  if (listener_watch_.ready != 0) accept_callers(now);
  if (look_again_ <= now) {
    const bool looks = poller_->add(listener_.get(), EPOLLIN, listener_watch_).ok();
    look_again_ = looks ? kNever : now + Acceptor::kLookAway;
  }
}

void RendezvousService::leave_to_parent() {
  poller_->leave_to_parent();
  for (const auto& [id, rank] : ranks_) rank->leave_to_parent();
}

void RendezvousService::close(const std::string& why) {
  std::vector<Gathering::Answer> answers;
  gathering_.close(why, answers);
  deliver(answers, Clock::steady().now());
}

bool RendezvousService::answering() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& entry) {
    return entry.second->stage() == RankConnection::Stage::kAnswering;
  });
}

void RendezvousService::accept_callers(Time now) {
  // Some at a time: connections that have sent something are read before others take their places.
  constexpr int kAtATime = 16;
  listener_watch_.ready = 0;
  for (int i = 0; i < kAtATime; ++i) {
    net::Endpoint from;
    from.size = sizeof from.storage;
    const int fd = ::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from.storage),
                             &from.size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // No descriptor, no memory: the listener stays readable, so look away for a moment.
      if (!callers_.empty()) drop_a_caller();
      poller_->remove(listener_.get());
      look_again_ = now + Acceptor::kLookAway;
      return;
    }
    if (callers_.size() >= Acceptor::kMaxHalfOpen) drop_a_caller();
    callers_.push_back({std::make_unique<net::HandshakeConnection>(
                            fd, *poller_, net::Handshake::Role::kServer, key_, rendezvous_hello(),
                            net::Handshake::Options(), now + kHandshakeTime, &no_answer_),
                        from});
  }
}

void RendezvousService::drop_a_caller() {
  std::vector<net::Caller> waiting;
  for (const Caller& caller : callers_) {
    waiting.push_back({&caller.from, caller.handshake->names_our_key()});
  }
  callers_.erase(callers_.begin() + static_cast<std::ptrdiff_t>(net::caller_to_drop(waiting)));
}

void RendezvousService::advance_callers(Time now) {
  using State = net::HandshakeConnection::State;
  for (size_t i = 0; i < callers_.size();) {
    net::HandshakeConnection& handshake = *callers_[i].handshake;
    const bool look = handshake.ready != 0 || !handshake.error().ok();
    const State state = look ? handshake.advance() : State::kUnderway;
    if (state == State::kUnderway && now < handshake.deadline()) {
      ++i;
      continue;
    }
    const bool rank = state == State::kDone &&
                      handshake.purpose() == net::Handshake::Purpose::kRail &&
                      is_rendezvous(handshake.peer()) && ranks_.size() < most_ranks_;
    if (rank) {
      const net::Link link{handshake.take_fd(), handshake.keys()};
      ranks_.emplace(next_rank_++, std::make_unique<RankConnection>(link, *poller_, now));
    }
    callers_.erase(callers_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void RendezvousService::advance_ranks(Time now) {
  std::vector<uint64_t> ids;
  for (const auto& [id, rank] : ranks_) {
    if (rank->ready() || rank->deadline() <= now) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    const auto found = ranks_.find(id);  // may have been dropped on behalf of another
    if (found == ranks_.end()) continue;
    RankConnection& rank = *found->second;
    const bool waited = rank.stage() == RankConnection::Stage::kWaiting;
    if (!rank.advance(now)) {
      drop(id);
    } else if (!waited && rank.stage() == RankConnection::Stage::kWaiting) {
      on_join(id, rank, now);
    }
  }
}

void RendezvousService::on_join(uint64_t id, RankConnection& rank, Time now) {
  // A rank that died and was restarted may arrive before the server has read the end of its old
  // connection.
  if (const auto* twin = gathering_.waiting_as(rank.join().info);
      twin != nullptr && ranks_.at(*twin)->hung_up()) {
    drop(*twin);
  }
  std::vector<Gathering::Answer> answers;
  gathering_.join(id, rank.join(), now, answers);
  deliver(answers, now);
}

void RendezvousService::deliver(std::vector<Gathering::Answer>& answers, Time now) {
  for (auto& answer : answers) {
    RankConnection& rank = *ranks_.at(answer.connection);
    rank.answer(std::move(answer.messages), now);
    if (!rank.advance(now)) drop(answer.connection);
  }
}

void RendezvousService::drop(uint64_t id) {
  gathering_.leave(id);
  ranks_.erase(id);
}

}  // namespace baton::launch
